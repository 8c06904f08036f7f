"""`fastvit memory`: its table, files and pictures, and what fits into a budget."""

import itertools
import json
import sys

import pytest
from study_models import SMALL

from fastvit import study
from fastvit.cli import main

FAST = ["memory", SMALL, "--image-size", "32,64", "--batch", "2", "--device", "cpu", "--mode", "infer"]
ONE = [*FAST, "--providers", "fastvit"]


def test_the_table_and_json_are_the_study(capsys):
    want = study.memory(SMALL, image_sizes=(32, 64), batches=(2,), mode="infer", dtype="bf16", device="cpu")
    assert main(FAST) == 0
    out, err = capsys.readouterr()
    assert "\x1b" not in out
    assert not err
    for word in (SMALL, "eager", "SDPA", "fastvit", "attention as N^2", "257"):
        assert word in out
    assert main([*FAST, "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert [p["planned"]["peak"] for p in got["points"]] == [p.planned.peak for p in want.points]
    assert got["exponents"]["eager"] == pytest.approx(want.exponents("eager"))


def test_images_of_several_sizes_together(capsys):
    assert main([*FAST, "--together"]) == 0
    assert f"{2 * (65 + 257)}" in capsys.readouterr().out


def test_the_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "memory.svg"
    assert main([*ONE, "--plot", str(path), "--theme", "dark"]) == 0
    assert capsys.readouterr().err == f"wrote {path}\n"
    assert "#0d1117" in path.read_text()


def test_a_budget(capsys):
    """With other patches; and for a model of one size, whose largest image is not searched."""
    words = ["--budget", "16MiB", "--providers", "sdpa", "--json", "--batch", "2", "--device", "cpu", "--mode", "infer"]
    assert main(["memory", SMALL, "--image-size", "36", "--patch-size", "6", *words]) == 0
    (fit,) = json.loads(capsys.readouterr().out)["fits"]
    options = {"patch_size": 6, "provider": "sdpa", "mode": "infer", "dtype": "bf16", "device": "cpu"}
    assert fit["batch"]["36"] == study.largest_batch(SMALL, 16 << 20, image_size=36, **options)
    assert fit["image_size"]["2"] == study.largest_image(SMALL, 16 << 20, batch=2, **options)
    assert main(["memory", "study_models:one_size", *words]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["fits"][0]["image_size"]["2"] is None
    assert "takes no image_size: its model has one only" in err


def test_a_captured_graph(capsys):
    """In the table, the JSON and the search of what fits."""
    pytest.importorskip("triton")
    options = {"mode": "infer", "dtype": "bf16", "device": "cuda"}
    parts = study.memory(SMALL, **options, image_sizes=(32,), batches=(64,), graphs=True).points[-1].planned
    words = f"memory {SMALL} --batch 64 --device cuda --mode infer --providers fastvit --graphs".split()
    assert main(words) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    (row,) = (line for head, line in itertools.pairwise(lines) if head[-2:] == ["graph", "planned"])
    assert row[-2:] == [f"{n / 2**20:.1f}" for n in (parts.graph, parts.peak)]
    assert main([*words, "--budget", "16MiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["points"][0]["planned"] == vars(parts) | {"peak": parts.peak}
    fitting = [study.largest_batch(SMALL, "16MiB", **options, graphs=graphs) for graphs in (True, False)]
    assert [found["fits"][0]["batch"]["32"]] == fitting[:1] < fitting[1:]


def test_a_function_in_the_folder_of_the_caller(tmp_path, monkeypatch, capsys):
    source = "import fastvit\ndef vit(): return fastvit.VisionTransformer(32, 8, embed_dim=48, depth=1, num_heads=3)\n"
    (tmp_path / "in_this_folder.py").write_text(source)
    words = ["memory", "in_this_folder:vit", "--providers", "fastvit", "--mode", "infer", "--device", "cpu", "--json"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["fastvit", *words])
    assert main() == 0
    assert json.loads(capsys.readouterr().out)["points"][0]["tokens"] == 17
