"""The tuner: how a choice is made, what is written, and what cannot be tuned. Times are made up."""

import functools
import json
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compiling import needs_triton, python

from benchmarks.gpu import tune
from benchmarks.gpu import tuner as tuning
from benchmarks.gpu.candidates import candidates
from benchmarks.gpu.tuner import Timer, Tuner, Work, decide, difference
from fastvit.kernels import _attention_configs, _tuned

ARCH, GPU = "sm_90", "Test GPU 80GB"
KEY = (20, 16, 2, 0, 0)  # of attention_fwd
CPU = torch.device("cpu")
Choice = tuple[int, ...] | None

pytestmark = pytest.mark.usefixtures("nothing_tuned")


@pytest.mark.parametrize(
    ("tried", "chosen"),
    [
        ({(1,): [0.981] * 3}, None),
        ({(1,): [0.979] * 3}, (1,)),
        ({}, None),
        ({(1,): [0.979] * 3, (2,): [0.9] * 3, (3,): [1.1] * 3}, (2,)),
        ({(1,): [0.1, 1.0, 1.0]}, None),  # one lucky round
    ],
)
def test_a_choice_must_be_two_percent_faster(tried, chosen):
    assert decide([1.0, 1.0, 1.0], tried) == chosen


def test_ratios_are_of_the_same_round():
    """A machine that slows down half-way does not make a choice faster."""
    assert decide([1.0, 3.0, 3.0], {(1,): [1.0, 3.0, 3.0]}) is None


def test_differences_are_relative_to_the_largest_result():
    one = torch.tensor([1.0, -4.0])
    assert difference((one, one), (one, one + torch.tensor([0.1, 0.0]))) == pytest.approx(0.025)
    assert difference((torch.tensor([torch.nan]),), (torch.ones(1),)) == torch.inf


def by_rows(seconds: dict[int, float]) -> Timer:
    """Return a timer of calls that take these seconds with so many query rows in a tile."""
    return lambda run: seconds[_attention_configs.attention_fwd(20, 16, 2, False, ARCH).block_m]


def tuner(folder: Path, timer: Timer) -> Tuner:
    return Tuner(CPU, timer, folder / _tuned.file_name(GPU), GPU, functools.partial(tune.measured, CPU), most=3)


def choosing(outcome: Callable[[Choice], float] = lambda choice: 1.0) -> Work:
    """Return a work whose result is a function of the choice in use, in memory that is written again."""
    out = torch.empty(1)

    def run() -> tuple[torch.Tensor, ...]:
        return (out.fill_(outcome(_tuned.choice(ARCH, "attention_fwd", *KEY))),)

    return Work("attention_fwd", "outcome", lambda device: run)


def test_the_faster_choice_is_written_and_followed(tmp_path, monkeypatch):
    """The shipped choice has 64 query rows; the candidate with 128 takes half the time."""
    (line,) = tuner(tmp_path, by_rows({64: 1.0, 128: 0.5})).tune(choosing())
    assert "(128, 64, 8, 3), 2.000x" in line
    data = json.loads((tmp_path / _tuned.file_name(GPU)).read_text())
    fields = {"block_m": 128, "block_n": 64, "num_warps": 8, "num_stages": 3}
    assert data["tables"] == {"attention_fwd": {"20,16,2,0,0": fields}}
    sample = data["samples"]["attention_fwd[20,16,2,0,0]"]
    assert sample["shipped"] == {"median": 1.0, "q20": 1.0, "q80": 1.0, "least": 1.0, "rounds": tuning.ROUNDS[1]}
    assert sample["tried"]["(128, 64, 8, 3)"]["median"] == 0.5
    _tuned.load(ARCH, GPU, tmp_path)  # as a user's table: it says with which kernels it was measured
    assert _attention_configs.attention_fwd(20, 16, 2, False, ARCH).block_m == 128


def test_the_shipped_choice_stays_within_the_margin(tmp_path):
    (line,) = tuner(tmp_path, by_rows({64: 1.0, 128: 0.99})).tune(choosing())
    assert "as shipped" in line
    data = json.loads((tmp_path / _tuned.file_name(GPU)).read_text())
    assert data["tables"] == {"attention_fwd": {}}
    assert data["samples"]["attention_fwd[20,16,2,0,0]"]["chosen"] is None


def too_large(choice: Choice) -> float:
    if choice is not None and choice[0] == 128:
        raise RuntimeError("out of resource: shared memory")
    return 1.0


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [(lambda choice: 2.0 if choice and choice[0] == 128 else 1.0, "differs from"), (too_large, "shared memory")],
)
def test_a_fast_choice_with_other_results_or_none_is_unfit(outcome, reason, tmp_path):
    (line,) = tuner(tmp_path, by_rows({64: 1.0, 128: 0.5})).tune(choosing(outcome))
    assert "as shipped; 2 tried, 1 unfit" in line
    data = json.loads((tmp_path / _tuned.file_name(GPU)).read_text())
    assert reason in data["samples"]["attention_fwd[20,16,2,0,0]"]["unfit"]["(128, 64, 8, 3)"]


def asking(table: str, ask: Callable[[], object]) -> Work:
    return Work(table, "a call", lambda device: lambda: (ask(), torch.ones(1))[1:])


def test_a_work_that_cannot_be_tuned_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="no launch asked"):
        tuner(tmp_path, by_rows({64: 1.0})).tune(asking("gemm", lambda: None))


def test_tuning_goes_on_unless_the_kernels_have_changed(tmp_path, monkeypatch):
    timer = by_rows({64: 1.0, 128: 0.5})
    assert len(tuner(tmp_path, timer).tune(choosing())) == 1
    again = tuner(tmp_path, timer)
    assert again.tune(choosing()) == []
    assert again.entries == {("attention_fwd", KEY): (128, 64, 8, 3)}
    monkeypatch.setattr(_tuned, "sources", lambda: "other kernels")
    assert len(tuner(tmp_path, timer).tune(choosing())) == 1


def test_sums_are_measured_for_the_rows_that_choices_leave(tmp_path):
    """Another table's choice sets the number of programs, and so of rows to add up."""

    def ask() -> None:
        _tuned.choice(ARCH, "column_sum", 9 if _tuned.choice(ARCH, "layer_norm", 768, 1) is None else 10, 768)

    one = tuner(tmp_path, lambda run: 1.0)
    choice = {"block_rows": 4, "num_warps": 4, "programs_per_sm": 4, "num_stages": 1}
    one.data["tables"] = {"layer_norm": {"768,1": choice}}
    assert one.tune(asking("column_sum", ask))[0].startswith("column_sum[10,768] ")


def test_choices_of_other_tables_are_fixed_so_that_the_kernel_runs():
    """On sm_90 the shipped choices launch attention's backward kernel for short sequences instead of two others."""
    entries = {("attention_bwd_short", (50, 64, 2, 0, 0)): (1, 64, 64, 4, 3), ("gemm", (13, 768, 768, 2)): (1,) * 8}
    fixed = tuning.base_entries("attention_bwd_dq", entries)
    assert fixed == {("attention_bwd_short", ()): (0, 64, 64, 4, 2), ("gemm", (13, 768, 768, 2)): (1,) * 8}
    with tuning.using(fixed) as asked:
        assert _attention_configs.attention_bwd_short(50, 64, 2, False, ARCH, False) is None
    assert {(arch, table, key) for arch, table, key in asked} == {(ARCH, "attention_bwd_short", (50, 64, 2, 0, 0))}


EVERY_TABLE = """
from benchmarks.codegen.launches import recording
from benchmarks.gpu.tables import works
from benchmarks.gpu.tuner import keys_of, using, base_entries
import torch
missing = []
with recording("sm_90"):
    for work in works():
        with using(base_entries(work.table, {})):
            run = work.build(torch.device("meta"))
        if not keys_of(run, work.table, {}):
            missing.append(work.label)
print(missing)
"""


@needs_triton
@pytest.mark.nightly
def test_every_work_asks_for_its_table():
    assert python("-c", EVERY_TABLE) == "[]\n"


def test_a_work_that_the_host_holds_up_is_not_tuned(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tune, "Clock", lambda device: types.SimpleNamespace(time=lambda run: float("nan")))
    monkeypatch.setattr(tune, "works", lambda tiny: [choosing()])
    assert tune.main(["--rehearse", "--table", "attention_fwd", "--out", str(tmp_path)]) == 1
    assert "not tuned, the GPU waited for the host" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    with pytest.raises(SystemExit):
        tune.main(["--rehearse"])
    assert "an --out of its own" in capsys.readouterr().err


def test_every_candidate_is_valid_and_new():
    keys = {
        "layer_norm": [(D, b) for D in (192, 768, 1664) for b in (0, 1)],
        "column_sum": [(9, 768)],
        "activation_backward": [(3072, 2)],
        "gemm": [(16, 3072, 768, 2)],
        "use_triton_gemm": [(16, 3072, 768, 2, 0), (16, 3072, 768, 2, 1)],
        "patch_embed": [(16, 768, 768, 2, 2, 0), (768, 768, 16, 2, 2, 1)],
    } | {f"attention_{t}": [(n, 64, 2, 0, 0) for n in (50, 197, 257)] for t in ("fwd", "bwd_dq", "bwd_dkdv")}
    keys["attention_bwd_short"] = [(n, 64, 2, 0, 0) for n in (50, 197, 256)]
    assert set(keys) == set(_tuned.FIELDS)
    for table, some in keys.items():
        for key in some:
            choices = candidates(table, key)
            assert len(choices) >= 2
            assert len(set(choices)) == len(choices)
            for choice in choices:
                _tuned.check(table, key, dict(zip(_tuned.FIELDS[table], choice, strict=True)))
    assert candidates("attention_bwd_short", (1025, 64, 2, 0, 0)) == [], "no kernel for short sequences"
