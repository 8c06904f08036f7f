"""`fastvit attention`, and the pictures that it reads and draws."""

import io
import json
import os
import subprocess
import sys
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
MODEL = "vit_cifar_small"  # 8 x 8 patches


def three_columns(height: int = 40, width: int = 60) -> np.ndarray:
    """Draw red, green and blue columns, from left to right."""
    pixels = np.zeros((height, width, 3), np.uint8)
    for i in range(3):
        pixels[:, i * width // 3 : (i + 1) * width // 3, i] = 255
    return pixels


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "picture.png"
    Image.fromarray(three_columns()).save(path)
    return path


def run(*arguments: Any) -> int:
    return main(["attention", *map(str, arguments)])


# ---- reading ----


def test_a_picture_is_cropped_in_the_centre_and_normalised(picture):
    found = study.read_picture(picture, (20, 20), (0.0, 0.5, 1.0), (1.0, 0.5, 2.0))
    assert found.shown.size == (40, 40)  # of 60 x 40, so 10 columns are gone on either side
    assert (found.pixels.shape, found.pixels.dtype) == ((3, 20, 20), torch.float32)
    red, green, blue = (found.pixels[:, 10, column] for column in (1, 10, 18))
    for got, rgb in ((red, (1, 0, 0)), (green, (0, 1, 0)), (blue, (0, 0, 1))):
        expected = (torch.tensor(rgb) - torch.tensor([0.0, 0.5, 1.0])) / torch.tensor([1.0, 0.5, 2.0])
        torch.testing.assert_close(got, expected, rtol=0.0, atol=0.03)  # the filter rings by a few levels


@pytest.mark.parametrize("size", [8, (300, 20)], ids=str)
def test_any_size(size, picture):
    found = study.read_picture(picture, size, *HALVES)
    height, width = (size, size) if isinstance(size, int) else size
    assert found.pixels.shape == (3, height, width)
    assert found.shown.width / found.shown.height == pytest.approx(width / height, rel=0.3)


def test_upright_by_its_exif_orientation(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    path = tmp_path / "turned.png"
    Image.fromarray(three_columns()).save(path, exif=exif)
    pixels = study.read_picture(path, (60, 40), *HALVES).pixels
    assert pixels[:, 5, 20].tolist() == [1.0, -1.0, -1.0]  # red is above
    assert pixels[:, 55, 20].tolist() == [-1.0, -1.0, 1.0]


PIXELS: dict[str, tuple[Any, float]] = {
    "P": (Image.new("L", (8, 8), 51).convert("P"), 0.2),
    "16 bits": (Image.fromarray(np.full((8, 8), 13107, np.uint16)), 0.2),
    "RGBA": (Image.new("RGBA", (8, 8), (51, 51, 51, 255)), 0.2),
    "LA": (Image.new("LA", (8, 8), (0, 0)), 1.0),
}


@pytest.mark.parametrize("kind", PIXELS)
def test_pixels_of_any_mode_become_rgb(kind, tmp_path):
    made, value = PIXELS[kind]
    made.save(tmp_path / "picture.png")
    found = study.read_picture(tmp_path / "picture.png", 8, (0.0,) * 3, (1.0,) * 3).pixels
    torch.testing.assert_close(found, torch.full((3, 8, 8), value), rtol=0.0, atol=1e-6)


def test_a_palette_with_a_transparent_colour(tmp_path):
    made = Image.new("P", (8, 8), 0)
    made.putpalette([0, 0, 0, 51, 51, 51])
    made.save(tmp_path / "picture.png", transparency=0)
    assert study.read_picture(tmp_path / "picture.png", 8, (0.0,) * 3, (1.0,) * 3).pixels.eq(1.0).all()


def test_statistics_that_are_none(picture):
    some, nan = (0.5,) * 3, float("nan")
    for mean, std, wrong in (((0.5,), some, "mean"), ((0.5, nan, 0.5), some, "mean"), (some, (0.5, 0.5, 0.0), "std")):
        with pytest.raises(ValueError, match=f"^{wrong} must have three values above"):
            study.read_picture(picture, 8, mean, std)


# ---- drawing ----


def light(tile: np.ndarray) -> np.ndarray:
    return tile[..., :3].sum(-1).astype(int)


def test_the_map_is_bright_where_the_weight_is():
    weights = torch.zeros(4, 4)
    weights[0, 3] = 0.7
    sheet = np.asarray(draw_maps(Image.new("RGB", (80, 80), "grey"), "here", [("map", weights)], "cls"))
    side = (sheet.shape[1] - 6) // 2
    assert sheet.shape == (side + 22, 2 * side + 6, 4)
    tile = light(sheet[:side, -side:])
    cells = tile.reshape(4, side // 4, 4, side // 4).mean((1, 3))
    assert np.unravel_index(cells.argmax(), cells.shape) == (0, 3)
    assert cells[0, 3] > 3 * cells[3, 0] > 0  # the picture is dark there, and still there
    assert not sheet[:, side : side + 6, 3].any()  # nothing between the tiles


def test_the_query_is_marked_on_every_tile():
    black, nothing = Image.new("RGB", (40, 80)), torch.full((4, 2), 1e-3)
    plain, marked = (
        np.asarray(draw_maps(black, "", [("", nothing), ("", nothing)], query)) for query in ("cls", (2, 1))
    )
    rows, columns = np.nonzero(light(plain) != light(marked))
    width = (plain.shape[1] - 12) // 3
    for tile in range(3):
        inside = (columns >= tile * (width + 6)) & (columns < tile * (width + 6) + width)
        assert inside.any()
        at = columns[inside] - tile * (width + 6)
        assert abs(at.min() - width / 2) <= 3  # the right column
        assert abs(rows[inside].min() - width) <= 3  # the third of four rows, of 2 width in all
        assert abs(rows[inside].max() - 1.5 * width) <= 3


@pytest.mark.parametrize(("maps", "columns", "rows"), [(1, 2, 1), (6, 4, 2), (24, 5, 5)])
def test_the_sheet_is_as_wide_as_a_page(maps, columns, rows):
    sheet = draw_maps(Image.new("RGB", (50, 50)), "", [("", torch.ones(2, 2))] * maps, "cls")
    assert 840 <= sheet.width <= 850
    side = (sheet.width + 6) // columns - 6
    assert sheet.height == rows * (side + 22 + 6) - 6


# ---- the command ----


def test_json_has_the_rows(picture, capsys, tmp_path):
    """The weights come from a file, whose head does not matter."""
    save_file = pytest.importorskip("safetensors.torch").save_file
    model = randomised(fastvit.create_model(MODEL, num_classes=7), 0.2)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    options = "--weights", tmp_path / "model.safetensors", "--layer", "-2", "--query", "3,4", "--rollout", "--json"
    assert run(MODEL, picture, *options) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err == ""
    pixels = study.read_picture(picture, 32, *HALVES).pixels
    maps = study.attention_maps(model, pixels, 10, queries=(3, 4))
    rollout = study.attention_rollout(model, pixels, (3, 4))
    assert list(found["rows"]) == ["head 0", "head 1", "head 2", "rollout"]
    expected = torch.cat([maps.rows[0, :, 0], rollout.rows])
    torch.testing.assert_close(torch.tensor(list(found["rows"].values())), expected, rtol=0.0, atol=1e-6)
    assert (found["grid"], found["num_prefix_tokens"], found["image_size"]) == ([8, 8], 1, [32, 32])
    assert (found["layer"], found["depth"], found["query"]) == (10, 12, [3, 4])


def test_the_table_fits_and_says_that_weights_are_random(picture, capsys):
    assert run(MODEL, picture, "--rollout", "--image-size", "32x64") == 0
    out, err = capsys.readouterr()
    assert err == f"fastvit: {MODEL} has random weights, without --weights\n"
    lines = out.splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0].startswith(f"{MODEL}, float32: query CLS in layer 11 of 12, 8 x 16 ")
    rows = [line for line in lines if line.startswith(("head", "rollout"))]
    assert [line[:7].strip() for line in rows] == ["head 0", "head 1", "head 2", "rollout"]
    assert all(line.count("(") == 4 and "%" in line for line in rows)


def test_out_is_a_picture(picture, tmp_path, capsys):
    assert run(MODEL, picture, "--head", 1, "--query", "0,7", "--out", tmp_path / "map.png") == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert f"wrote {tmp_path / 'map.png'}" in err
    with Image.open(tmp_path / "map.png") as sheet:
        assert (sheet.format, sheet.size) == ("PNG", (846, 420 + 22))
    torch.manual_seed(0)
    assert run(MODEL, picture, "--out", tmp_path / "all.png", "--json", "--mean", "0,0,0", "--std", "1,1,1") == 0
    assert json.loads(capsys.readouterr().out)["rows"].keys() == {"head 0", "head 1", "head 2"}
    with Image.open(tmp_path / "all.png") as sheet:
        assert sheet.width == 4 * 208 + 3 * 6


def test_by_layer_is_a_table_or_json_or_a_picture(picture, tmp_path, capsys, monkeypatch):
    """Several pictures, and random weights, which are the same after the same seed."""
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("COLUMNS", "80")
    other = tmp_path / "other.png"
    Image.fromarray(three_columns()[:, ::-1].copy()).save(other)

    def output(*options: Any) -> str:
        torch.manual_seed(0)
        assert run(SMALL, picture, other, "--by-layer", *options) == 0
        return capsys.readouterr().out

    torch.manual_seed(0)
    model = fastvit.create_model(SMALL)
    pixels = [study.read_picture(path, 32, *HALVES).pixels for path in (picture, other)]
    far, evolution = study.attention_distance(model, pixels), study.cls_evolution(model, pixels)
    light, dark = tmp_path / "light.svg", tmp_path / "dark.svg"
    found = json.loads(output("--json", "--plot", light))
    torch.testing.assert_close(torch.tensor(found["distance"]).double(), far.distance, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.tensor(found["cosine"]).double(), evolution.cosine, rtol=1e-5, atol=1e-5)
    assert (found["uniform"], found["state"], found["grid"]) == (far.uniform, "cls", [8, 8])

    lines = output().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == f"{SMALL}, 2 images of 32 x 32 px, 8 x 8 patches"
    heads = far.distance[-1]
    values = [f"{x:.1f}" for x in (heads.mean(), heads.min(), heads.max())]
    assert lines[2 + 1].split() == ["1", *values, f"{100 * heads.mean() / far.uniform:.0f}%", "1.000"]

    assert output("--plot", dark, "--theme", "dark") == ""
    for plot in (light, dark):
        assert f"dashes: uniform, {far.uniform:.0f} px" in plot.read_text()
    assert light.read_text() != dark.read_text()


def test_models_of_a_function_bring_their_weights(picture, capsys):
    """It loads them while it is made."""
    assert run("study_models:of_weights", picture, "--image-size", "32", "--json") == 0
    out, err = capsys.readouterr()
    assert (json.loads(out)["grid"], err) == ([4, 4], "")


def test_no_compiler_is_loaded():
    """Loading it takes seconds, more than the rest of the command."""
    program = """
import sys, torch, fastvit
from fastvit import study
study.attention_rollout(fastvit.VisionTransformer(32, 8, embed_dim=32, depth=1, num_heads=2), torch.zeros(3, 32, 32))
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | {"FASTVIT_BACKEND": "aten"})


def truncated() -> bytes:
    file = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    Image.fromarray(noise).save(file, "JPEG")
    return file.getvalue()[:1500]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file or directory: {path}"),
        (b"hello", "{path} is no picture that Pillow reads: cannot identify"),
        (truncated(), "{path} is no picture that Pillow reads: image file is truncated"),
    ],
    ids=["missing", "text", "truncated"],
)
def test_files_that_are_no_pictures(content, message, tmp_path, capsys):
    path = tmp_path / "picture.jpg"
    if content is not None:
        path.write_bytes(content)
    assert run(MODEL, path) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith(f"fastvit: {message.format(path=path)}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layer", str(2**63)], f"layers must be in -12..11, got {2**63}"),
        (["--weights", "/nowhere/model.safetensors"], "/nowhere/model.safetensors: no such file"),
        (["--out", "no/folder/map.png"], "there is no folder"),
        (["--plot", "layers.svg"], "--plot draws what --by-layer computes"),
        (["--by-layer", "--head", "1"], "--head is of maps, which --by-layer does not compute"),
        (["--by-layer", "--plot", "layers.pdf"], "--plot writes .png or .svg"),
        (["other.png"], "maps are of one IMAGE, got 2; --by-layer takes several"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_mistakes_are_one_line(options, message, picture, capsys):
    assert run(MODEL, picture, *options) == 2
    err = capsys.readouterr().err.splitlines()
    assert message in err[-1]
    assert len(err) == 1
