"""`fastvit fit`: its report, its figures as JSON, its picture, and its status."""

import functools
import json
import math
import re
from dataclasses import replace

import pytest
from study_models import SMALL

from fastvit import study, zoo
from fastvit.cli import fit, main
from fastvit.study.fitting.plot import draw
from fastvit.study.memory.plot import BACKGROUNDS, COLOURS

MIB = 2**20
remembered = functools.cache(study.fit)
STEP = ["--batch", "64", "--device", "cpu"]


@pytest.fixture(autouse=True)
def _model(monkeypatch):
    """SMALL has enough blocks for policies of two runs; each step is planned once for all tests."""
    monkeypatch.setitem(zoo.CONFIGS, SMALL, zoo.CONFIGS[SMALL] | {"depth": 5})
    monkeypatch.setattr(study, "fit", lambda *args, progress=None, **options: remembered(*args, **options))


def planned(budget: int) -> study.Fit:
    return remembered(SMALL, budget=budget, batch=64, image_size=None, dtype="bf16", optimizer="adamw", device="cpu")


@pytest.fixture
def between() -> int:
    """A budget between the least peak and that without recomputation."""
    points = planned(2**30).frontier
    assert points[0].peak < 0.8 * points[-1].peak, "the budget must decide"
    return (points[0].peak + points[-1].peak) // 2


def command(budget: int, *more: str) -> list[str]:
    return ["fit", SMALL, "--budget", f"{budget}B", *STEP, *more]


def test_the_report(between, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(command(between)) == 0
    out, err = capsys.readouterr()
    assert not err
    assert max(map(len, out.splitlines())) <= 80
    want = planned(between)
    step, within, *rest = out.splitlines()
    assert step == f"{SMALL}, batch 64, 32 px, bf16, adamw, CPU"
    assert within == f"within {between / MIB:.1f} MiB, recompute:"
    runs = rest[: rest.index("")]
    said = {}
    for run in runs:
        where, words = run.split(": ")
        first, *last = map(int, re.findall(r"\d+", where))
        said |= dict.fromkeys(range(first, (last or [first])[0] + 1), words)
    assert said == {i: str(choice) for i, choice in enumerate(want.choices)}
    assert len(runs) == len(set(want.choices)) > 1
    assert f"{want}".splitlines()[: 2 + len(runs)] == [step, within, *runs]
    rows = [line.rsplit(maxsplit=5) for line in rest[rest.index("") + 3 :]]
    found = {name: (mib, share, fits) for name, mib, _, share, _, fits in rows}
    ways = {"chosen": (want.peak, want.recomputed)} | {p.name: (p.peak, p.recomputed) for p in want.alternatives}
    assert list(found) == [*ways] == ["chosen", "nothing", "activations, as by default", "every block"]
    for name, (peak, share) in ways.items():
        assert found[name] == (f"{peak / MIB:.1f}", f"{100 * share:.1f}", "yes" if peak <= between else "no")
    assert {found["chosen"][2], found["nothing"][2]} == {"yes", "no"}


def test_a_batch_that_does_not_fit_is_accumulated(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    budget = planned(2**30).frontier[0].peak // 2
    want = planned(budget)
    assert 1 < want.micro_batch < want.largest_batch < 64
    assert main(command(budget)) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert f"64 images do not fit into {budget / MIB:.1f} MiB, {want.largest_batch} would" in out
    assert f"with {want.accumulation} batches of {want.micro_batch} whose gradients are accumulated: " in out
    assert want.accumulation == math.ceil(64 / want.micro_batch)
    assert f"planned for a training step of {want.micro_batch} images" in out


def test_not_even_one_image(capsys):
    assert main(command(MIB)) == 1
    out = capsys.readouterr().out
    assert "not even one image fits into 1.0 MiB: the least is " in out
    assert "planned for a training step of 1 image\n" in out
    assert "chosen" not in out
    assert "yes" not in out


def test_json_is_the_study(between, capsys):
    assert main(command(between, "--json")) == 0
    got, want = json.loads(capsys.readouterr().out), planned(between)
    assert got["fits"] is True
    assert (got["peak"], got["recomputed"], got["budget"]) == (want.peak, want.recomputed, between)
    assert [(c["attention"], c["mlp"], c["block"], c["words"]) for c in got["choices"]] == [
        (*choice, str(choice)) for choice in want.choices
    ]
    assert [p["peak"] for p in got["frontier"]] == [p.peak for p in want.frontier]
    assert len(got["blocks"]) == len(got["choices"]) == 5
    assert got.keys() == fit.as_json(want).keys() >= {"micro_batch", "accumulation", "largest_batch", "alternatives"}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("vit_of_no_zoo", "is not a known model"),
        ("study_models:of_a_convolution", "no block of Sequential"),
        ("study_models:of_no_list", "has no list of blocks of one class"),
    ],
)
def test_models_without_blocks(model, message, capsys):
    assert main(["fit", model, "--budget", "1GiB", *STEP]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert message in err
    assert err.startswith("fastvit: ")
    assert err.count("\n") == 1


def test_pictures(between, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    for name, theme in (("fit.svg", "dark"), ("fit.png", "light")):
        assert main(command(between, "--plot", str(tmp_path / name), "--theme", theme)) == 0
        assert capsys.readouterr().err == f"wrote {tmp_path / name}\n"
    assert BACKGROUNDS["dark"] in (tmp_path / "fit.svg").read_text()
    assert (tmp_path / "fit.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("far", "chosen"), [(0.25, 0), (0.95, 1), (1, 1), (4, -1)])
def test_the_picture_is_the_fit(between, far, chosen):
    """The curves, the chosen point, and a budget on the axis or past either end of it; no label is on another one."""
    pytest.importorskip("matplotlib")
    found = planned(between)
    point = found.frontier[chosen]
    found = replace(found, budget=int(far * between), peak=point.peak, recomputed=point.recomputed)
    figure = draw(found, "light")
    (axis,) = figure.axes
    curves = {line.get_label(): line.get_xydata().tolist() for line in axis.lines}
    for points, label in ((found.frontier, "the cheapest choice"), (found.whole_blocks, "checkpointing")):
        (curve,) = (curve for name, curve in curves.items() if name.startswith(label))
        assert curve == [[p.peak / 2**30, 100 * p.recomputed] for p in points]
    marked = [line for line in axis.lines if line.get_markeredgecolor() == COLOURS["light"]["fastvit"]][-1]
    assert marked.get_xydata().tolist() == [[found.peak / 2**30, 100 * found.recomputed]]
    budget, name = axis.texts
    assert f"budget {found.budget / MIB:.1f} MiB" in budget.get_text()
    assert f"chosen: {found.peak / MIB:.1f} MiB\n{100 * found.recomputed:.1f} % again" == name.get_text()
    (low, high), at = axis.get_xlim(), found.budget / 2**30
    assert sum(list(line.get_xdata()) == [at, at] for line in axis.lines) == (low <= at <= high)
    assert ("\N{LEFTWARDS ARROW}" in budget.get_text()) == (at < low)
    assert ("\N{RIGHTWARDS ARROW}" in budget.get_text()) == (at > high)
    figure.draw_without_rendering()
    first, second, frame = (text.get_window_extent() for text in (budget, name, axis))
    assert not first.overlaps(second)
    for at in axis.transData.transform([[p.peak / 2**30, 100 * p.recomputed] for p in found.whole_blocks]):
        assert frame.contains(*at)
        assert not first.contains(*at)
    for box in (first, second):
        assert frame.containsx(box.x0)
        assert frame.containsx(box.x1)
        assert frame.containsy(box.y0)
        assert frame.containsy(box.y1)
