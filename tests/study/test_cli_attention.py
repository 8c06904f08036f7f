"""`fastvit attention`, and the pictures that it reads and draws."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import randomised
from study_models import SMALL

import fastvit
from fastvit import study
from fastvit.cli import main
from fastvit.study.attention.drawing import draw_maps

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("rich")
HALVES = (0.5,) * 3, (0.5,) * 3


def three_columns() -> np.ndarray:
    """Draw red, green and blue columns, from left to right."""
    return np.tile(np.repeat(np.eye(3, dtype=np.uint8) * 255, 20, axis=0), (40, 1, 1))


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "picture.png"
    Image.fromarray(three_columns()).save(path)
    return path


def run(*arguments: Any) -> int:
    return main(["attention", SMALL, *map(str, arguments)])


# ---- reading ----


def test_a_picture_is_cropped_in_the_centre_and_normalised(picture):
    read = study.read_picture(picture, (20, 20), (0.0, 0.5, 1.0), (1.0, 0.5, 2.0))
    assert read.shown.size == (40, 40)  # of 60 x 40, so 10 columns are gone on either side
    assert (read.pixels.shape, read.pixels.dtype) == ((3, 20, 20), torch.float32)
    red, green, blue = (read.pixels[:, 10, column] for column in (1, 10, 18))
    for got, rgb in ((red, (1, 0, 0)), (green, (0, 1, 0)), (blue, (0, 0, 1))):
        expected = (torch.tensor(rgb) - torch.tensor([0.0, 0.5, 1.0])) / torch.tensor([1.0, 0.5, 2.0])
        torch.testing.assert_close(got, expected, rtol=0.0, atol=0.03)  # the filter rings by a few levels
    tall = study.read_picture(picture, (300, 20), *HALVES)
    assert tall.pixels.shape == (3, 300, 20)
    assert tall.shown.size == (3, 40)


def test_upright_by_its_exif_orientation_and_in_rgb(tmp_path):
    """The upper 8 of 16 bits are taken; transparency becomes white."""
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    path = tmp_path / "picture.png"
    Image.fromarray(three_columns()).save(path, exif=exif)
    pixels = study.read_picture(path, (60, 40), *HALVES).pixels
    assert pixels[:, 5, 20].tolist() == [1.0, -1.0, -1.0]  # red is above
    assert pixels[:, 55, 20].tolist() == [-1.0, -1.0, 1.0]
    palette = Image.new("P", (8, 8), 0)
    palette.putpalette([0, 0, 0, 51, 51, 51])
    palette.info["transparency"] = 0
    sixteen = Image.fromarray(np.full((8, 8), 13107, np.uint16))
    for made, value in ((sixteen, 0.2), (Image.new("LA", (8, 8), (0, 0)), 1.0), (palette, 1.0)):
        made.save(path)
        pixels = study.read_picture(path, 8, (0.0,) * 3, (1.0,) * 3).pixels
        torch.testing.assert_close(pixels, torch.full((3, 8, 8), value), rtol=0.0, atol=1e-6)


# ---- drawing ----


def test_the_map_is_bright_where_the_weight_is():
    weights = torch.zeros(4, 4)
    weights[0, 3] = 0.7
    sheet = np.asarray(draw_maps(Image.new("RGB", (80, 80), "grey"), "here", [("map", weights)], "cls"))
    side = (sheet.shape[1] - 6) // 2
    cells = sheet[:side, -side:, :3].sum(-1).reshape(4, side // 4, 4, side // 4).mean((1, 3))
    assert np.unravel_index(cells.argmax(), cells.shape) == (0, 3)
    assert cells[0, 3] > 3 * cells[3, 0] > 0  # the picture is dark there, and still there


# ---- the command ----


def test_rows_as_json_as_a_table_and_as_a_picture(picture, capsys, tmp_path):
    """The weights come from a file, whose head does not matter."""
    save_file = pytest.importorskip("safetensors.torch").save_file
    model = randomised(fastvit.create_model(SMALL, num_classes=7), 0.2)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    options = "--weights", tmp_path / "model.safetensors", "--layer", "-2", "--query", "3,4", "--rollout", "--json"
    assert run(picture, *options) == 0
    out, err = capsys.readouterr()
    printed = json.loads(out)
    assert err == ""
    pixels = study.read_picture(picture, 32, *HALVES).pixels
    maps = study.attention_maps(model, pixels, 0, queries=(3, 4))
    rollout = study.attention_rollout(model, pixels, (3, 4))
    assert list(printed["rows"]) == ["head 0", "head 1", "head 2", "rollout"]
    expected = torch.cat([maps.rows[0, :, 0], rollout.rows])
    torch.testing.assert_close(torch.tensor(list(printed["rows"].values())), expected, rtol=0.0, atol=1e-6)
    assert (printed["grid"], printed["num_prefix_tokens"], printed["image_size"]) == ([8, 8], 1, [32, 32])
    assert (printed["layer"], printed["depth"], printed["query"]) == (0, 2, [3, 4])

    assert run(picture, "--image-size", "32x64", "--head", 1) == 0
    out, err = capsys.readouterr()
    assert err == f"fastvit: {SMALL} has random weights, without --weights\n"
    assert out.startswith(f"{SMALL}, float32: query CLS in layer 1 of 2, 8 x 16 ")
    assert [line[:6] for line in out.splitlines() if line.startswith(("head", "rollout"))] == ["head 1"]
    path = tmp_path / "map.png"
    assert run(picture, "--head", 1, "--mean", "0,0,0", "--out", path) == 0
    assert f"wrote {path}" in capsys.readouterr().err
    with Image.open(path) as sheet:
        assert (sheet.format, sheet.size) == ("PNG", (846, 420 + 22))


def test_by_layer_is_a_table_or_json(picture, tmp_path, capsys):
    """Several pictures, and random weights, which are the same after the same seed."""
    other = tmp_path / "other.png"
    Image.fromarray(three_columns()[:, ::-1].copy()).save(other)
    torch.manual_seed(0)
    model = fastvit.create_model(SMALL)
    pixels = [study.read_picture(path, 32, *HALVES).pixels for path in (picture, other)]
    far, evolution = study.attention_distance(model, pixels), study.cls_evolution(model, pixels)
    torch.manual_seed(0)
    assert run(picture, other, "--by-layer", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    for key, expected in (("distance", far.distance), ("cosine", evolution.cosine)):
        torch.testing.assert_close(torch.tensor(printed[key]).double(), expected, rtol=1e-5, atol=1e-5)
    assert (printed["uniform"], printed["state"], printed["grid"]) == (far.uniform, "cls", [8, 8])
    assert run(picture, other, "--by-layer") == 0
    assert capsys.readouterr().out.startswith(f"{SMALL}, 2 images of 32 x 32 px, 8 x 8 patches\n")
