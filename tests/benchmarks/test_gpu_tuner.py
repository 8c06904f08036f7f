"""The tuner: how a choice is made, what is written, and what cannot be tuned. Times are made up."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.tuner import Run, Timer, Tuner, candidates, decide, difference
from fastvit.kernels import _attention_configs, _tuned

ARCH, GPU = "sm_90", "Test GPU 80GB"
KEY = (20, 16, 2, 0, 0)  # of attention_fwd
Choice = tuple[int, ...] | None

pytestmark = pytest.mark.usefixtures("nothing_tuned")


def test_a_choice_must_be_two_percent_faster():
    """By the median of the rounds: one lucky round, or a machine that slows down half-way, is no gain."""
    for tried, chosen in (
        ({(1,): [0.981] * 3}, (None, 1.0)),
        ({}, (None, 1.0)),
        ({(1,): [0.979] * 3, (2,): [0.5] * 3, (3,): [1.1] * 3, (4,): [float("nan")] * 3}, ((2,), 2.0)),
        ({(1,): [0.1, 1.0, 1.0]}, (None, 1.0)),
    ):
        assert decide([1.0, 1.0, 1.0], tried) == chosen
    assert decide([1.0, 3.0, 3.0], {(1,): [1.0, 3.0, 3.0]}) == (None, 1.0)


def test_differences_are_relative_to_the_largest_result():
    one = torch.tensor([1.0, -4.0])
    assert difference((one, one), (one, one + torch.tensor([0.1, 0.0]))) == pytest.approx(0.025)
    assert difference((torch.tensor([torch.nan]),), (torch.ones(1),)) == torch.inf


def by_rows(seconds: dict[int, float]) -> Timer:
    """Return a timer of calls that take these seconds with so many query rows in a tile."""
    return lambda run: seconds[_attention_configs.attention_fwd(20, 16, 2, False, ARCH).block_m]


def tuner(folder: Path, timer: Timer, sources: str = "kernels") -> Tuner:
    about = {"gpu": GPU, "arch": ARCH, "measured": {"sources": sources}}
    return Tuner(timer, folder / _tuned.path_of(GPU).name, about, most=3)


def tune(tuner: Tuner, outcome: Callable[[Choice], float] = lambda choice: 1.0) -> list[str]:
    """Tune a call whose result is a function of the choice in use, in memory that is written again."""
    out = torch.empty(1)

    def build() -> Run:
        return lambda: (out.fill_(outcome(_tuned.choice(ARCH, "attention_fwd", *KEY))),)

    return [*tuner.tune("attention_fwd", "outcome", build)]


def test_the_faster_choice_is_written_and_followed(tmp_path, monkeypatch):
    """The shipped choice has 64 query rows; the candidate with 128 takes half the time. Tuning goes on unless the
    kernels have changed. With other results it is unfit."""
    timer = by_rows({64: 1.0, 128: 0.5})
    (line,) = tune(tuner(tmp_path, timer))
    assert "(128, 64, 8, 3), 2.000x" in line
    data = json.loads((tmp_path / _tuned.path_of(GPU).name).read_text())
    fields = {"block_m": 128, "block_n": 64, "num_warps": 8, "num_stages": 3}
    assert data["tables"] == {"attention_fwd": {"20,16,2,0,0": fields}}
    monkeypatch.setattr(_tuned, "FOLDER", tmp_path)
    _tuned.load(ARCH, GPU)
    assert _attention_configs.attention_fwd(20, 16, 2, False, ARCH).block_m == 128
    again = tuner(tmp_path, timer)
    assert tune(again) == []
    assert again.data["tables"] == data["tables"]
    other = tuner(tmp_path, timer, "other kernels")
    (line,) = tune(other, lambda choice: 2.0 if choice and choice[0] == 128 else 1.0)
    assert "as shipped; 2 tried, 1 unfit" in line


def test_every_candidate_is_valid_and_new():
    keys: dict[str, tuple[int, ...]] = {
        "layer_norm": (768, 1),
        "column_sum": (9, 768),
        "activation_backward": (3072, 2),
        "gemm": (16, 3072, 768, 2),
        "use_triton_gemm": (16, 3072, 768, 2, 1),
        "patch_embed": (16, 768, 768, 2, 2, 0),
    } | {f"attention_{t}": (197, 64, 2, 0, 0) for t in ("fwd", "bwd_dq", "bwd_dkdv", "bwd_short")}
    assert set(keys) == set(_tuned.FIELDS)
    for table, key in keys.items():
        choices = candidates(table, key)
        assert len(set(choices)) == len(choices) >= 2
        assert {len(choice) for choice in choices} == {len(_tuned.FIELDS[table])}
