"""`fastvit fit`: its report, its figures as JSON, its picture, and its status."""

import json
from dataclasses import replace

import pytest
from study_models import SMALL, known

from fastvit import study, zoo
from fastvit.cli import fit, main
from fastvit.study.fitting.report import draw, in_words
from fastvit.study.memory.plot import BACKGROUNDS

MIB = 2**20
WHOLE = ["fit", SMALL, "--budget", "1GiB", "--batch", "16", "--device", "cpu"]


@pytest.fixture(scope="module")
def planned() -> study.Fit:
    """The fit for a budget between the least peak and that without recomputation, of enough blocks for two runs."""
    options = {"batch": 16, "dtype": "bf16", "device": "cpu"}
    with known(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(zoo.CONFIGS, SMALL, zoo.CONFIGS[SMALL] | {"depth": 5})
        points = study.fit(SMALL, budget="1GiB", **options).frontier
        assert points[0].peak < 0.8 * points[-1].peak, "the budget must decide"
        return study.fit(SMALL, budget=(points[0].peak + points[-1].peak) // 2, **options)


def printed(monkeypatch, capsys, result: study.Fit, *options: str) -> str:
    """Return what the verb prints of a fit, and check its status and the arguments that it passes on."""
    calls = []
    monkeypatch.setattr(study, "fit", lambda *args, progress, **options: calls.append((args, options)) or result)
    assert main([*WHOLE, *options]) == int(not result.fits)
    (((model,), given),) = calls
    assert model == SMALL
    assert given == {
        "budget": 2**30, "batch": 16, "image_size": None, "dtype": "bf16", "optimizer": "adamw", "device": "cpu",
    }  # fmt: skip
    return capsys.readouterr().out


def test_the_report(planned, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    out = printed(monkeypatch, capsys, planned)
    assert max(map(len, out.splitlines())) <= 80
    step, within, *rest = out.splitlines()
    assert step == f"{SMALL}, batch 16, 32 px, bf16, adamw, CPU"
    assert within == f"within {planned.budget / MIB:.1f} MiB, recompute:"
    runs = rest[: rest.index("")]
    assert runs == [f"  {run}" for run in in_words(planned.choices).split("; ")]
    rows = [line.rsplit(maxsplit=5) for line in rest[rest.index("") + 3 :]]
    table = {name: (mib, share, fits) for name, mib, _, share, _, fits in rows}
    assert list(table) == ["chosen", *(p.name for p in planned.alternatives)]
    assert table["chosen"] == (f"{planned.peak / MIB:.1f}", f"{100 * planned.recomputed:.1f}", "yes")
    assert table["nothing"][1:] == ("0.0", "no")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"micro_batch": 6, "accumulation": 3, "largest_batch": 7}, "with 3 batches of 6 whose gradients are accumul"),
        ({"micro_batch": 7, "accumulation": 0, "largest_batch": 7}, "nor do accumulated gradients next to one image"),
        ({"micro_batch": 0, "accumulation": 0, "largest_batch": 0}, "not even one image fits into "),
        ({"recomputed": 0.25, "least_recomputed": 0.2}, "no choice that fits computes less than 20.0 % again"),
    ],
)
def test_what_does_not_fit_is_said(planned, changes, text, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    out = printed(monkeypatch, capsys, replace(planned, **changes))
    assert text in out
    assert ("chosen" in out) == (changes.get("micro_batch") != 0)


def test_json_and_the_picture_are_the_fit(planned, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    options = "--json", "--plot", str(tmp_path / "fit.svg"), "--theme", "dark"
    got = json.loads(printed(monkeypatch, capsys, planned, *options))
    assert got == json.loads(json.dumps(fit.as_json(planned)))
    assert (got["fits"], got["peak"], got["recomputed"]) == (True, planned.peak, planned.recomputed)
    assert [(c["attention"], c["mlp"], c["block"]) for c in got["choices"]] == [*map(tuple, planned.choices)]
    assert BACKGROUNDS["dark"] in (tmp_path / "fit.svg").read_text()
    (axis,) = draw(planned, "light").axes
    first, second, chosen = axis.lines
    for line, points in ((first, planned.frontier), (second, planned.whole_blocks)):
        assert line.get_xydata().tolist() == [[p.peak / 2**30, 100 * p.recomputed] for p in points]
    assert chosen.get_xydata().tolist() == [[planned.peak / 2**30, 100 * planned.recomputed]]
    assert axis.patches[0].get_x() == planned.budget / 2**30
