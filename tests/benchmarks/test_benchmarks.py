"""The benchmarks' own instruments: a wrong meter would make every figure wrong."""

import json
import math
import os
import random
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from library_imports import import_library

from benchmarks.harness import measure, provenance, table, timing
from benchmarks.harness.agreement import agreement
from benchmarks.harness.draw import Draw, Runner
from benchmarks.harness.measure import interleave
from benchmarks.harness.providers import OPS, Op
from benchmarks.harness.schedule import FIRST, OutOfTime, Schedule, selection, turns
from benchmarks.harness.sdpa_backend import SdpaBackend
from benchmarks.harness.timing import plan_rounds
from benchmarks.harness.workloads import Workload, workloads
from benchmarks.host import __main__ as host
from benchmarks.host import calls
from benchmarks.report import results
from fastvit import reference
from fastvit.study.memory.peak import saved_bytes
from fastvit.study.sources.baselines import use_sdpa
from fastvit.tuning.clock import HOST_BOUND, Clock, Quantiles

CPU = torch.device("cpu")
MB = 1 << 20


class _Plugin:
    """The part of pytest-benchmark's fixture that `interleave` uses."""

    disabled = False

    def __init__(self) -> None:
        self.stats = SimpleNamespace(stats=SimpleNamespace(data=[]))

    def pedantic(self, target: Callable[[], object], setup: Callable[[], None], rounds: int) -> None:
        for _ in range(rounds):
            setup()
            target()
            self.stats.stats.data.append(1.0)


def test_rounds_are_interleaved_and_all_recorded():
    calls: list[str] = []
    steps = {name: lambda name=name: calls.append(name) for name in ("eager", "sdpa", "fastvit")}
    seconds = dict.fromkeys(steps, 0.1)
    samples = interleave(_Plugin(), Clock(CPU), steps, seconds, Schedule(math.inf, 2.5), 200)
    assert calls == [name for names in timing.orders(steps, 8) for name in names]
    assert [len(values) for values in samples.values()] == [8, 8, 8]
    assert samples["fastvit"] == [1.0] * 8
    short = interleave(_Plugin(), Clock(CPU), steps, seconds, Schedule(math.inf, 0.1), 200)
    assert len(short["eager"]) == measure.ROUNDS


def test_no_provider_has_a_place_of_its_own_in_the_rounds():
    drawn = timing.orders("abc", 600)
    assert drawn == timing.orders("abc", 600)
    counts = Counter(map(tuple, drawn))
    assert len(counts) == 6
    assert min(counts.values()) > 70
    assert all(sorted(names) == ["a", "b", "c"] for names in drawn)


def test_the_interval_of_paired_ratios():
    assert timing.paired_interval([3.0, 2.0, 4.0, 5.0, 6.0, 7.0], [1.0] * 6) == (2.0, 7.0)
    assert timing.paired_interval([3.0, 2.0, math.nan, 5.0, 6.0, 7.0], [1.0] * 6) is None, "five have 94 %"
    nine = timing.paired_interval([2.0 * n for n in range(1, 10)], [2.0] * 9)
    assert nine == (2.0, 8.0), "of nine, the second and the last but one have 96 %"


def test_quantiles():
    q = Quantiles.of([5.0, 1.0, 2.0, 3.0, 4.0, 100.0])
    assert (q.median, q.least, q.rounds) == (3.5, 1.0, 6)
    assert 1.0 < q.q20 < q.median < q.q80 < 100.0


def test_rounds_fit_the_budget():
    assert plan_rounds(0.1, 2.0) == 20
    assert plan_rounds(5.0, 2.0) == 3
    assert plan_rounds(1e-6, 2.0) == 200
    assert plan_rounds(5.0, 2.0, most=1) == 1
    assert plan_rounds(1.0, 0.0) == 3


def test_clock_measures_seconds(monkeypatch):
    now = iter([1.0, 1.25])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(now))
    assert Clock(CPU).time(lambda: None) == 0.25


def _workload(monkeypatch: pytest.MonkeyPatch, build: Callable[..., Runner], **sizes: int) -> Workload:
    monkeypatch.setitem(OPS, "toy", Op(build))
    return Workload("toy", sizes)


@pytest.mark.parametrize("error", [0.0, 1e-3])
def test_agreement_lets_through_what_is_right_and_stops_what_is_wrong(error, monkeypatch):
    def build(provider: str, draw: Draw, M: int) -> Runner:
        x = draw.normal(M, 8)
        return Runner(lambda: x * x + (error if provider == "fastvit" else 0.0), (x,))

    toy = _workload(monkeypatch, build, M=16)
    if error:
        with pytest.raises(AssertionError, match="fastvit is not timed"):
            agreement(toy, "inference", ("eager", "fastvit"), torch.float32, CPU)
    else:
        ratios = agreement(toy, "inference", ("eager", "fastvit"), torch.float32, CPU)
        assert ratios["fastvit"] == ratios["eager"] < 1.0


def test_agreement_judges_one_unlucky_element_by_other_draws(monkeypatch):
    """Fused has one in the first draw, where eager has one in the others."""
    seen: list[torch.Tensor] = []

    def build(provider: str, draw: Draw) -> Runner:
        x = draw.normal(1000)
        if provider == "fastvit":
            seen.append(x)
        error = torch.full((1000,), 0.0 if draw.compute is torch.float64 else 1e-3, dtype=x.dtype)
        if provider == ("fastvit" if len(seen) < 2 else "eager"):
            error[0] *= 9
        return Runner(lambda: x * x + error, (x,))

    ratios = agreement(_workload(monkeypatch, build), "inference", ("eager", "fastvit"), torch.float32, CPU)
    assert ratios["fastvit"] == pytest.approx(1, abs=0.1)
    assert len(seen) == 4
    assert not torch.equal(seen[0], seen[1])


def test_cost_of_a_matmul(monkeypatch):
    def build(provider: str, draw: Draw, M: int, K: int, N: int) -> Runner:
        a, b = draw.normal(M, K), draw.normal(K, N)
        return Runner(lambda: a @ b, (a,), (b,))

    matmul = _workload(monkeypatch, build, M=8, K=16, N=32)
    read, written = 4 * (8 * 16 + 16 * 32), 4 * 8 * 32
    assert matmul.cost("inference", torch.float32) == (2 * 8 * 16 * 32, read + written)
    assert matmul.cost("training", torch.float32) == (3 * 2 * 8 * 16 * 32, 3 * read + 2 * written)


def test_draw_gives_every_precision_the_same_numbers():
    low, exact = (Draw(torch.bfloat16, CPU, compute).normal(64) for compute in (torch.bfloat16, torch.float64))
    assert exact.dtype == torch.float64
    assert torch.equal(low.double(), exact)
    assert low.std() > 0.5


def test_draw_fills_modules_alike():
    first, second = (Draw(torch.float32, CPU).module(lambda: reference.Block(32, 2)) for _ in range(2))
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert a.std() > 0.0, name


@pytest.mark.parametrize("options", [{}, {"qk_norm": True}], ids=str)
def test_sdpa_baseline_is_the_reference(options):
    plain, sdpa = (Draw(torch.float64, CPU).module(lambda: reference.Block(32, 2, **options)) for _ in range(2))
    x = Draw(torch.float64, CPU).normal(2, 17, 32)
    expected = plain(x)
    use_sdpa(sdpa)
    with SdpaBackend() as backend:
        got = sdpa(x)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    assert backend.name != "", "the SDPA kernel has a name"
    with SdpaBackend() as none:
        plain(x)
    assert none.name == "math"


def test_a_provider_that_waited_for_its_host_has_no_time(monkeypatch):
    samples = {"eager": [math.nan, math.nan, 1.0], "fastvit": [1.0, math.nan, 2.0]}
    monkeypatch.setattr(measure, "interleave", lambda *_, **__: samples)
    schedule = Schedule(deadline=1e18, case_seconds=0.1)
    session = measure.Session(CPU, torch.float32, ("quick",), ("eager", "fastvit"), Clock(CPU), schedule)
    benchmark: Any = SimpleNamespace(extra_info={})
    (workload,) = workloads("quick", ops=("layer_norm",))
    record = measure.measure(benchmark, session, workload, "inference")
    assert record.providers["eager"].time is None
    assert record.providers["eager"].remark == HOST_BOUND
    assert record.providers["fastvit"].time == Quantiles.of([1.0, 2.0])


# ---- the list of workloads ----


def test_every_benchmark_has_one_id():
    for grid in (("quick",), ("cpu", "long"), ("gpu",)):
        found = [w.id for w in workloads(*grid)]
        assert len(found) == len(set(found))
    assert {w.op for w in workloads("quick")} == {w.op for w in workloads("cpu")} == {w.op for w in workloads("gpu")}


def test_an_unknown_op_is_named():
    with pytest.raises(ValueError, match=r"no op \['softmax'\], the ops are"):
        workloads("quick", ops=("softmax",))


def test_labels_name_every_size():
    sizes = {"name": "vit", "B": 1, "scales": True, "residual": False, "dropout_p": 0.1}
    assert str(Workload("model", sizes)) == "vit B1 scales dropout_p0.1"
    for w in workloads("quick", ops=("model", "accelerate")):
        assert f"depth{w.sizes['depth']}" in str(w).split(), "no whole model, and none by name"


def test_the_ops_of_the_readme_are_benchmarks():
    labels = {(w.op, str(w)) for w in workloads("cpu", "long")}
    assert {case for _, case, *_ in results._OPS} <= labels


@pytest.mark.parametrize("workload", workloads("sanitize", "kernels"), ids=lambda w: w.id)
def test_every_option_builds_on_a_device_without_memory(workload):
    """The workloads of the sanitizer and the compilers, on meta tensors: shapes and leaves fit together."""
    runner = workload.runner("fastvit", Draw(torch.bfloat16, "meta"))
    outputs = runner.outputs()
    gradients = runner.gradients(tuple(torch.empty_like(out) for out in outputs))
    assert [g.shape for g in gradients] == [leaf.shape for leaf in runner.leaves]


@pytest.mark.nightly
def test_the_graph_provider_is_the_library_s_model_with_fused_ops():
    import_library("timm")
    (workload,) = workloads("quick", ops=("accelerate",))
    plain, graph = (workload.runner(name, Draw(torch.float32, "cpu")).train(True) for name in ("sdpa", "graph"))
    torch.testing.assert_close(graph.outputs(), plain.outputs(), atol=1e-5, rtol=1e-4)
    saved = [saved_bytes(runner.outputs, runner.parameters) for runner in (plain, graph)]
    assert saved[1] < 0.75 * saved[0]  # 10 token tensors a block of 16


# ---- order and time of a run ----


@pytest.mark.parametrize("grid", [("quick",), ("cpu",), ("cpu", "long"), ("gpu",)], ids=" ".join)
def test_every_op_has_its_turn_before_any_has_its_second(grid):
    found = workloads(*grid)
    turn = turns(found)
    order = sorted(found, key=lambda w: turn[w.id])
    first = [w for w in order if str(w) in FIRST[w.op]]
    if grid != ("quick",):
        assert {w.op for w in first} == {w.op for w in found}
        assert order[: len(first)] == first
        assert [w.sizes["N"] for w in order if w.op == "memory, block"] == [4097, 2305, 1025, 577, 197]
        assert {str(w) for w in found if w.op in ("model", "block")} >= {
            FIRST[op][grid == ("gpu",)] for op in ("model", "block")
        }
    others = [turn[w.id][0] for w in order]
    assert others == sorted(others)


def test_a_case_that_would_end_late_is_left_out(monkeypatch):
    now = 0.0
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    small, large = workloads("cpu", ops=("attention",))[:2]
    schedule = Schedule(deadline=100.0, case_seconds=1.0, total=4)
    assert schedule.budget() == 1.0
    assert schedule.admits((small, "inference"), 0.01), "nothing is known yet"
    schedule.finish("layer_norm", 1e-6, 2.0)  # 1 s that every case takes
    schedule.finish("attention", 0.1, 12.0)  # 100 steps
    assert schedule.estimate("attention", 0.2) == pytest.approx(1 + 1 + 20)
    assert schedule.estimate("block", 0.2) == pytest.approx(1 + 1 + 20), "as the largest of all"
    assert schedule.estimate("layer_norm", 1e-3) == pytest.approx(1 + 1)
    now = 80.0
    assert not schedule.admits((large, "inference"), 0.2)
    assert schedule.admits((small, "training"), 0.1), "a smaller one still fits"
    assert [case for case, _ in schedule.left_out] == [(large, "inference")]
    assert schedule.minutes() == 1
    now = 99.0
    assert schedule.budget() == pytest.approx(0.5), "half of what is left, for the one to come"
    schedule.check()
    now = 101.0
    assert schedule.left() == schedule.budget() == 0.0
    with pytest.raises(OutOfTime):
        schedule.check()


@pytest.mark.parametrize("seed", range(5))
def test_the_command_names_what_was_left_out_and_nothing_else(seed):
    cases = [(w, mode) for w in workloads("cpu", "long") for mode in table.MODE]
    draw = random.Random(seed)
    left_out = [case for case in cases if draw.random() < 0.4 or case[0].op in ("mlp", "memory, block")]
    ran = {w.op for w, mode in cases if (w, mode) not in left_out}
    terms = selection(left_out, ran).split(" or ")
    chosen = [(w, mode) for w, mode in cases if any(term in f"bench_op[{w.id}-{mode}]" for term in terms)]
    assert chosen == left_out
    assert "[mlp-" in terms


def test_a_run_without_time_prints_the_command_for_the_rest():
    chosen = "[layer_norm- or [add_layer_norm-"
    run = [sys.executable, "-m", "pytest", "benchmarks", "--benchmark-only", "--quick", "-k", chosen]
    ours = "TRITON_INTERPRET", "PYTEST_XDIST"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    out = subprocess.run(
        [*run, "--bench-minutes", "1e-4"], cwd=provenance.ROOT, capture_output=True, text=True, env=environment
    ).stdout
    assert "left out, no time was left: 4 of 4 benchmarks\n    layer_norm 2; add_layer_norm 2\n" in out
    assert "4 left out" in out.splitlines()[-1]
    assert max(map(len, out.splitlines())) <= 100
    printed = out.split("add_layer_norm 2\n")[1].split("not asked for")[0].replace("\\\n", "")
    python, *words = shlex.split(printed)
    assert (provenance.ROOT / python).samefile(sys.executable)
    assert words == [*run[1:6], "--bench-minutes", "1", "-k", chosen]


def test_the_benchmarks_are_collected_without_the_libraries_that_they_compare_with():
    program = (
        "import sys, pytest; sys.modules |= dict.fromkeys(['timm', 'torchvision', 'transformers']); "
        "sys.exit(pytest.main(['benchmarks', '--benchmark-only', '--quick', '--collect-only', '-q']))"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_"))}
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=provenance.ROOT, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout
    assert "bench_models.py" in run.stdout
    assert "none of timm, torchvision and transformers is installed" in run.stdout


# ---- the host's time ----


def test_small_ops_are_measured_and_shown(tmp_path):
    microseconds = calls.small_ops(1, 1, ops=("layer_norm", "attention_varlen"))
    assert {name.split(" ")[0] for name in microseconds} == {"layer_norm", "attention_varlen"}
    assert all(us > 0 for row in microseconds.values() for us in row.values())
    path = tmp_path / "host.json"
    where = {"device": "x", "torch": "y", "triton": "z"}
    step = {"us": 80.0, "kernels": 5, "vendor": 2, "stand_in": 3.7}
    launches = {"layer_norm_fwd_kernel": {"arguments": 20, "triton": 10.0, "direct": 2.5}}
    path.write_text(
        json.dumps({"environment": where, "commit": "0" * 40, "launches": launches, "block": {"forward": step},
                    "ops": microseconds})
    )  # fmt: skip
    lines = host.render(path)
    assert [line.split() for line in lines if line.startswith("forward")] == [["forward", "80", "5", "2", "3.7"]]
    assert next(line for line in lines if line.startswith("layer_norm B1")).split()[-2] == "-", "no SDPA"
