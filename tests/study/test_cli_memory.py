"""`fastvit memory`: its table, files and pictures, and what fits into a budget."""

import csv
import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from study_models import SMALL

from fastvit import study
from fastvit._units import read_bytes
from fastvit.cli import main

FAST = ["memory", SMALL, "--image-size", "32,64", "--batch", "2", "--device", "cpu", "--mode", "infer"]


def test_the_table(capsys):
    assert main(FAST) == 0
    out, err = capsys.readouterr()
    assert max(map(len, out.splitlines())) <= 100
    assert "\x1b" not in out
    assert not err
    for word in (SMALL, "eager", "SDPA", "fastvit", "attention as N^2", "257"):
        assert word in out


def test_json_and_csv_are_the_study(capsys):
    assert main([*FAST, "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    want = study.memory(SMALL, image_sizes=(32, 64), batches=(2,), mode="infer", dtype="bf16", device="cpu")
    assert [p["planned"]["peak"] for p in got["points"]] == [p.planned.peak for p in want.points]
    assert got["exponents"]["eager"] == pytest.approx(want.exponents("eager"))
    assert main([*FAST, "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [int(r["planned"]) for r in rows] == [p.planned.peak for p in want.points]
    assert [int(r["tokens"]) for r in rows] == [p.tokens for p in want.points]


def test_images_of_several_sizes_together(capsys):
    assert main([*FAST, "--together"]) == 0
    out = capsys.readouterr().out
    assert "32 + 1" in out
    assert f"{2 * (65 + 257)}" in out
    for option, message in ((["--budget", "1GiB"], "--budget searches"), (["--plot", "a.svg"], "--plot draws")):
        assert main([*FAST, "--together", *option]) == 2
        assert message in capsys.readouterr().err


def test_the_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    for name, theme in (("memory.svg", "dark"), ("memory.png", "light")):
        assert main([*FAST, "--plot", str(tmp_path / name), "--theme", theme]) == 0
        assert capsys.readouterr().err == f"wrote {tmp_path / name}\n"
    assert "#0d1117" in (tmp_path / "memory.svg").read_text()
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_a_budget_by_the_command(capsys):
    assert main([*FAST, "--budget", "64MiB", "--providers", "fastvit", "--json"]) == 0
    (fit,) = json.loads(capsys.readouterr().out)["fits"]
    want = study.largest_batch(SMALL, 64 << 20, image_size=64, mode="infer", dtype="bf16", device="cpu")
    assert fit["batch"]["64"] == want
    assert fit["image_size"]["2"] % 4 == 0


def test_a_budget_of_other_patches_and_of_one_size(capsys):
    words = ["--budget", "64MiB", "--providers", "sdpa", "--json", "--batch", "2", "--device", "cpu", "--mode", "infer"]
    assert main(["memory", SMALL, "--image-size", "36", "--patch-size", "6", *words]) == 0
    assert json.loads(capsys.readouterr().out)["fits"][0]["image_size"]["2"] % 6 == 0
    assert main(["memory", "study_models:of_one_size", *words]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["fits"][0]["image_size"]["2"] is None
    assert "takes no image_size: its model has one only" in err


def test_a_function_in_the_folder_of_the_caller(tmp_path):
    (tmp_path / "mine.py").write_text("import fastvit\ndef vit(): return fastvit.create_model('vit_cifar_small')\n")
    words = ["memory", "mine:vit", "--providers", "fastvit", "--mode", "infer", "--device", "cpu", "--json"]
    program = f"import sys; sys.path.pop(0); sys.argv[1:] = {words!r}\nfrom fastvit.cli import main; sys.exit(main())"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["points"][0]["tokens"] == 65


def test_a_full_disk(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert main([*FAST, "--plot", str(tmp_path / "a.png")]) == 2
    assert capsys.readouterr().err == f"fastvit: No space left on device: {tmp_path / 'a.png'}\n"
    assert not list(tmp_path.iterdir())


def test_sizes_in_words():
    assert read_bytes("24GiB") == 24 << 30
    assert read_bytes("0.5 gb") == 5 * 10**8
