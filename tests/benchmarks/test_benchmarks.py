"""The benchmarks' own instruments: a wrong meter would make every figure wrong."""

import dataclasses
import json
import math
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from library_imports import import_library

from benchmarks.harness import conditions, measure, provenance, table, timing
from benchmarks.harness.agreement import agreement
from benchmarks.harness.draw import Draw, Runner
from benchmarks.harness.measure import cost, interleave
from benchmarks.harness.providers import OPS, Op
from benchmarks.harness.record import Provider, Record, environment
from benchmarks.harness.schedule import FIRST, OutOfTime, Schedule, selection, turns
from benchmarks.harness.sdpa_backend import SdpaBackend
from benchmarks.harness.timing import Ceilings, plan_rounds
from benchmarks.harness.workloads import Workload, workloads
from benchmarks.host import dispatch, low_precision
from benchmarks.report import plot, read, results
from fastvit import ops, reference
from fastvit.study.memory.peak import saved_bytes
from fastvit.study.memory.plot import draw
from fastvit.study.sources.baselines import use_sdpa
from fastvit.tuning.clock import HOST_BOUND, Clock, Quantiles

CPU = torch.device("cpu")
MB = 1 << 20


class _Plugin:
    """pytest-benchmark's fixture, as far as `interleave` uses it."""

    disabled = False

    def __init__(self) -> None:
        self.stats = SimpleNamespace(stats=SimpleNamespace(data=[]))

    def pedantic(self, target: Callable[[], object], setup: Callable[[], None], rounds: int) -> None:
        for _ in range(rounds):
            setup()
            target()
            self.stats.stats.data.append(1.0)


def test_rounds_are_interleaved_and_all_recorded() -> None:
    calls: list[str] = []
    steps = {name: lambda name=name: calls.append(name) for name in ("eager", "sdpa", "fused")}
    seconds = dict.fromkeys(steps, 0.1)
    samples = interleave(_Plugin(), Clock(CPU), steps, seconds, budget=2.5, most=200)
    assert calls == [name for names in timing.orders(steps, 8) for name in names]
    assert [len(values) for values in samples.values()] == [8, 8, 8]
    assert samples["fused"] == [1.0] * 8
    assert len(interleave(_Plugin(), Clock(CPU), steps, seconds, budget=0.1, most=200)["eager"]) == measure.ROUNDS


def test_no_provider_has_a_place_of_its_own_in_the_rounds() -> None:
    drawn = timing.orders("abc", 600)
    assert drawn == timing.orders("abc", 600)
    counts = Counter(map(tuple, drawn))
    assert len(counts) == 6
    assert min(counts.values()) > 70
    assert all(sorted(names) == ["a", "b", "c"] for names in drawn)


def _phases(draw: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Every four measurements the machine is of another speed."""
    runs, count = shape[0], math.prod(shape[1:])
    speeds = np.repeat(1 + draw.random((runs, count)), 4, axis=1)[:, :count]
    return speeds.reshape(shape) + 0.01 * draw.standard_normal(shape)


NOISE: dict[str, Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]] = {
    "normal": lambda draw, shape: 1 + 0.05 * draw.standard_normal(shape),
    "log-normal": lambda draw, shape: np.exp(0.5 * draw.standard_normal(shape)),
    "bimodal": lambda draw, shape: np.where(draw.random(shape) < 0.5, 1.0, 1.4) + 0.01 * draw.standard_normal(shape),
    "drift": lambda draw, shape: (
        1 + 0.05 * np.arange(math.prod(shape[1:])).reshape(shape[1:]) + 0.01 * draw.standard_normal(shape)
    ),
    "phases": _phases,
}


@pytest.mark.parametrize("rounds", [7, 20])
@pytest.mark.parametrize("noise", NOISE)
def test_equal_providers_are_told_apart_in_at_most_5_percent_of_runs(noise: str, rounds: int) -> None:
    """Simulated. Two of three providers are the same; what they take depends on when they run."""
    runs, names = 4000, ("a", "b", "c")
    times = NOISE[noise](np.random.default_rng(0), (runs, rounds, len(names)))
    place = np.array([[order.index(name) for name in names] for order in timing.orders(names, rounds)])
    found = np.take_along_axis(times, np.broadcast_to(place, times.shape), 2)
    apart = 0
    for run in found:
        interval = timing.paired_interval(run[:, 0], run[:, 1])
        assert interval is not None
        apart += not interval[0] <= 1 <= interval[1]
    assert apart / runs < 0.05
    if noise == "normal":
        slower = [timing.paired_interval(1.5 * run[:, 0], run[:, 1]) for run in found[:100]]
        assert all(interval is not None and interval[0] > 1 for interval in slower)


def test_the_interval_of_paired_ratios() -> None:
    assert timing.paired_interval([3.0, 2.0, 4.0, 5.0, 6.0, 7.0], [1.0] * 6) == (2.0, 7.0)
    assert timing.paired_interval([3.0, 2.0, math.nan, 5.0, 6.0, 7.0], [1.0] * 6) is None, "five have 94 %"
    nine = timing.paired_interval([2.0 * n for n in range(1, 10)], [2.0] * 9)
    assert nine == (2.0, 8.0), "of nine, the second and the last but one have 96 %"


def test_quantiles() -> None:
    q = Quantiles.of([5.0, 1.0, 2.0, 3.0, 4.0, 100.0])
    assert (q.median, q.least, q.rounds) == (3.5, 1.0, 6)
    assert 1.0 < q.q20 < q.median < q.q80 < 100.0


def test_rounds_fit_the_budget() -> None:
    assert plan_rounds(0.1, 2.0) == 20
    assert plan_rounds(5.0, 2.0) == 3
    assert plan_rounds(1e-6, 2.0) == 200
    assert plan_rounds(5.0, 2.0, most=1) == 1
    assert plan_rounds(1.0, 0.0) == 3


def test_clock_measures_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([1.0, 1.25])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(now))
    assert Clock(CPU).time(lambda: None) == 0.25


def _workload(monkeypatch: pytest.MonkeyPatch, build: Callable[..., Runner], **sizes: int) -> Workload:
    monkeypatch.setitem(OPS, "toy", Op(build))
    return Workload("toy", sizes)


@pytest.mark.parametrize("error", [0.0, 1e-3])
def test_agreement_lets_through_what_is_right_and_stops_what_is_wrong(
    error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(provider: str, draw: Draw, M: int) -> Runner:
        x = draw.normal(M, 8)
        return Runner(lambda: x * x + (error if provider == "fused" else 0.0), (x,))

    toy = _workload(monkeypatch, build, M=16)
    if error:
        with pytest.raises(AssertionError, match="fused is not timed"):
            agreement(toy, "inference", ("eager", "fused"), torch.float32, CPU)
    else:
        ratios = agreement(toy, "inference", ("eager", "fused"), torch.float32, CPU)
        assert ratios["fused"] == ratios["eager"] < 1.0


def test_agreement_judges_one_unlucky_element_by_other_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of fused's in the first, where eager has such elements in the others."""
    seen: list[torch.Tensor] = []

    def build(provider: str, draw: Draw) -> Runner:
        x = draw.normal(1000)
        if provider == "fused":
            seen.append(x)
        error = torch.full((1000,), 0.0 if draw.compute is torch.float64 else 1e-3, dtype=x.dtype)
        if provider == ("fused" if len(seen) < 2 else "eager"):
            error[0] *= 9
        return Runner(lambda: x * x + error, (x,))

    ratios = agreement(_workload(monkeypatch, build), "inference", ("eager", "fused"), torch.float32, CPU)
    assert ratios["fused"] == pytest.approx(1, abs=0.1)
    assert len(seen) == 4
    assert not torch.equal(seen[0], seen[1])


def test_cost_of_a_matmul(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(provider: str, draw: Draw, M: int, K: int, N: int) -> Runner:
        a, b = draw.normal(M, K), draw.normal(K, N)
        return Runner(lambda: a @ b, (a,), (b,))

    matmul = _workload(monkeypatch, build, M=8, K=16, N=32)
    read, written = 4 * (8 * 16 + 16 * 32), 4 * 8 * 32
    assert cost(matmul, "inference", torch.float32) == (2 * 8 * 16 * 32, read + written)
    assert cost(matmul, "training", torch.float32) == (3 * 2 * 8 * 16 * 32, 3 * read + 2 * written)


def test_draw_gives_every_precision_the_same_numbers() -> None:
    low, exact = (Draw(torch.bfloat16, CPU, compute).normal(64) for compute in (torch.bfloat16, torch.float64))
    assert exact.dtype == torch.float64
    assert torch.equal(low.double(), exact)
    assert low.std() > 0.5


def test_draw_fills_modules_alike() -> None:
    first, second = (Draw(torch.float32, CPU).module(lambda: reference.Block(32, 2)) for _ in range(2))
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert a.std() > 0.0, name


@pytest.mark.parametrize("options", [{}, {"qk_norm": True, "scale_attn_norm": True}], ids=str)
def test_sdpa_baseline_is_the_reference(options: dict[str, Any]) -> None:
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


def _record(op: str, N: int, eager_peak: int, fused_peak: int) -> Record:
    record = Record(op, f"N{N}", "training", {"N": N}, {}, flops=10**9, moved_bytes=10**6)
    record.providers = {
        "eager": Provider(Quantiles.of([0.012, 0.0123, 0.0126]), eager_peak, 100, 1.0, over_fused=(2.9, 3.1)),
        "sdpa": Provider(skipped="does not fit"),
        "fused": Provider(Quantiles.of([0.004, 0.0041, 0.0042]), fused_peak, 10, 0.5),
    }
    return record


def _lines(record: Record, ceilings: Ceilings | None = None) -> list[str]:
    ((op, lines),) = table.render([record], ceilings)
    assert op == record.op
    return lines


def _row(lines: list[str], column: str) -> list[str]:
    """The first row of the table that has this column."""
    start = next(i for i, line in enumerate(lines) if f" {column} " in f"{line} ")
    return lines[start + 2].split()


def test_table_shows_times_ratios_and_gaps() -> None:
    ceilings = Ceilings(bytes_per_second=1e10, flops_per_second=1e12)
    lines = _lines(_record("attention", 197, 8_000_000, 2_000_000), ceilings)
    assert _row(lines, "ms") == ["N197", "fwd+bwd", "12.3", "skipped", "4.10", "3.00x", "-", "24%", "0.50"]
    assert _row(lines, "MB") == ["N197", "fwd+bwd", "8.00", "-", "2.00", "4.00x", "-"]
    assert "compile" not in "".join(lines)
    assert "skipped: N197 fwd+bwd, sdpa: does not fit" in lines


def test_the_table_has_calls_beside_the_gpu_alone() -> None:
    record = _record("attention", 197, 8, 2)
    record.providers["eager"].called, record.providers["eager"].called_over_fused = Quantiles.of([0.03] * 3), (1.4, 1.6)
    record.providers["fused"].called = Quantiles.of([0.02] * 3)
    record.providers["fused"].remark = "no graph: refused"
    lines = _lines(record)
    assert _row(lines, "ms")[2:6] == ["12.3", "skipped", "4.10", "3.00x"]
    assert _row(lines, "called")[2:6] == ["30.0", "skipped", "20.0", "1.50x"]
    assert "N197 fwd+bwd, fused: no graph: refused" in lines


def test_a_provider_that_waited_for_its_host_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = {"eager": [math.nan, math.nan, 1.0], "fused": [1.0, math.nan, 2.0]}
    monkeypatch.setattr(measure, "interleave", lambda *_, **__: samples)
    schedule = Schedule(deadline=1e18, case_seconds=0.1)
    session = measure.Session(CPU, torch.float32, ("quick",), ("eager", "fused"), Clock(CPU), schedule)
    benchmark: Any = SimpleNamespace(extra_info={})
    (workload,) = workloads("quick", ops=("layer_norm",))
    record = measure.measure(benchmark, session, workload, "inference")
    assert record.providers["eager"].time is None
    assert record.providers["eager"].remark == HOST_BOUND
    assert record.providers["fused"].time == Quantiles.of([1.0, 2.0])


def test_printed_ratios_are_those_of_the_figures_beside_them() -> None:
    """Also where the median of the rounds' own ratios says otherwise: 1.5 here."""
    record = _record("attention", 197, 8, 2)
    fused, eager = [1.0, 2.0, 4.0], [1.5, 1.9, 6.0]
    record.providers = {"eager": Provider(Quantiles.of(eager)), "fused": Provider(Quantiles.of(fused))}
    assert _row(_lines(record), "ms")[2:5] == ["1,900", "2,000", "~0.95x"]


@pytest.mark.parametrize(
    ("eager", "interval", "apart"),
    [
        (1.2, (1.1, 1.3), True), (0.8, (0.7, 0.9), True), (1.2, (0.9, 1.3), False), (1.2, None, False),
        (1.2, (0.8, 0.9), False),
    ],
)  # fmt: skip
def test_what_the_rounds_do_not_tell_apart_is_marked(eager: float, interval: Any, apart: bool) -> None:
    """The last: medians and pairs say different things."""
    record = _record("attention", 197, 8, 2)
    record.providers = {name: Provider(Quantiles.of([value])) for name, value in (("eager", eager), ("fused", 1.0))}
    record.providers["eager"].over_fused = interval
    assert record.told_apart("eager") is apart
    assert _row(_lines(record), "ms")[4].startswith("~") is not apart


def test_table_without_fused_has_no_ratios() -> None:
    record = _record("attention", 197, 8, 2)
    del record.providers["fused"]
    assert record.memory_ratios() == record.time_ratios() == {}
    assert _row(_lines(record), "ms")[-4:] == ["-", "-", "-", "-"]


def test_tables_fit_a_hundred_columns() -> None:
    record = _record("model", 197, 8, 2)
    record.case = "vit_small_patch16_224 B16 px518 patch_size14"
    record.providers["compile"] = Provider(Quantiles.of([1234.5] * 3), 10**11, 1, 1.0)
    lines = _lines(record, Ceilings(1e10, 1e12))
    assert max(map(len, lines)) <= 100
    assert "patch_size14" in "".join(lines).replace("\n", ""), "long names are broken, not cut"
    del record.providers["compile"]
    record.case = "interleaved B1 N197 D768 H12"
    ((_, narrow),) = table.render([record], Ceilings(1e10, 1e12), 80)
    assert max(map(len, narrow)) <= 80
    assert _row(narrow, "ms")[-3:] == ["-", "24%", "0.50"]


def test_growth_is_fitted_to_the_largest_sizes_and_says_which() -> None:
    """In whichever order they ran."""
    records = [_record("memory, attention", n, 4 * n * n, 64 * n) for n in (4097, 2305, 1025, 577, 197)]
    assert table.growth_lines(records) == [
        "eager: peak grows as N^2.00 from N = 1025 to 4097",
        "fused: peak grows as N^1.00 from N = 1025 to 4097",
    ]
    for few in (records[:2], records[-2:], [_record("memory, attention", n, n, n) for n in (50, 197, 577)]):
        (line,) = table.growth_lines(few)
        assert line.startswith("eager, fused: no exponent of growth")


def test_rows_are_in_order_of_work_and_notes_stand_once() -> None:
    records = [_record(op, N, 8, 2) for op in ("block", "attention") for N in (577, 197)]
    for r in records:
        r.flops, r.note, r.sdpa_backend = r.shape["N"], "on images", "flash"
    sections = dict(table.render(records, None))
    assert list(sections) == ["attention", "block", "notes"]
    assert [line.split()[0] for line in sections["block"] if line.startswith("N")] == ["N197", "N577"] * 2
    assert sections["notes"] == ["block; attention: on images", "block; attention: sdpa runs flash"]


def test_every_column_is_explained() -> None:
    record = _record("attention", 197, 8, 2)
    record.providers["compile"] = record.providers["eager"]
    lines = _lines(record, Ceilings(1e10, 1e12))
    explained = {word for line in table.LEGEND.splitlines() for word in line[:10].split()}
    assert set(lines[0].split()) | set(lines[1].split()) <= explained
    assert max(map(len, table.LEGEND.splitlines())) <= 80


def test_the_picture_names_every_line_and_its_slope(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    records = [_record("memory, attention", n, 4000 * n * n, 64000 * n) for n in (197, 577, 1025)]
    for r, peak in zip(records, (n * 64100 for n in (197, 577, 1025)), strict=True):
        r.shape |= {"B": 1, "H": 12}
        r.providers["sdpa"] = Provider(peak_bytes=peak)
    (panel,) = draw(table.growth(records), "a CPU", "dark", "peak").axes
    texts = [text.get_text() for text in panel.texts]
    assert [text.split()[0] for text in texts] == ["eager", "SDPA", "fastvit", "the"]
    assert ["{2.00}" in texts[0], "{1.00}" in texts[1], "{1.00}" in texts[2], texts[3]] == [
        *[True] * 3,
        "the lines overlap",
    ]
    for path in plot.save(records, "a CPU", tmp_path):
        assert "<svg" in path.read_text()
    with pytest.raises(ValueError, match="the memory study did not run"):
        plot.save([], "a CPU", tmp_path)


def test_header_says_plainly_that_no_gpu_was_measured() -> None:
    text = "\n".join(table.header(environment(CPU, torch.bfloat16), None))
    assert "CPU path (ATen), no GPU measured" in text
    assert "bfloat16" in text
    assert torch.__version__ in text


def test_a_busy_machine_marks_the_run() -> None:
    record, limits = _record("layer_norm", 197, 8, 2), Ceilings(1e10, 1e12, 2e10)
    calm = conditions.Conditions(limits, Ceilings(1.05e10, 1e12, 2e10), 0.1, 2.0, 2)
    assert calm.best == Ceilings(1.05e10, 1e12, 2e10)
    (line,) = conditions.lines(calm, [record], limits)
    assert line == "load of the last minute 0.1 before the run, 2.0 after it, on 2 cores"
    assert conditions.Conditions.read(json.loads(json.dumps(dataclasses.asdict(calm)))) == calm
    slowed = dataclasses.replace(calm, end=Ceilings(1e10, 0.8e12, 2e10))
    _, mark, *reasons = conditions.lines(slowed, [record], Ceilings(1e10, 2e11, 2e10))
    assert mark.startswith(conditions.MARK)
    assert [reason.split(", ")[0] for reason in map(str.strip, reasons)] == [
        "matmul at the end -20% against the start", "layer_norm N197",
    ]  # fmt: skip
    assert reasons[1].endswith("fused at 122% of the limits")


def test_what_fits_into_a_cache_is_held_against_a_copy_in_the_cache() -> None:
    limits = Ceilings(1e10, 1e12, 4e10)
    assert (limits.least_seconds(0, 1e8), limits.least_seconds(0, 1e9)) == (1e8 / 4e10, 1e9 / 1e10)
    assert Ceilings(1e10, 1e12).least_seconds(0, 1e8) == 1e8 / 1e10


def test_record_survives_json() -> None:
    record = _record("attention", 197, 8, 2)
    ceilings = Ceilings(1e10, 1e12)
    data = json.loads(json.dumps(record.as_dict(environment(CPU, torch.float32), ceilings)))
    assert data["providers"]["eager"]["time"] == dataclasses.asdict(Quantiles.of([0.012, 0.0123, 0.0126]))
    assert (data["ceilings"], data["environment"]["dtype"]) == (dataclasses.asdict(ceilings), "float32")
    again = read.record(data)
    assert again == record
    for provider in data["providers"].values():
        del provider["over_fused"], provider["called_over_fused"]
    assert not read.record(data).told_apart("eager"), "a file of before has no intervals"
    assert (again.memory_ratios(), again.time_ratios()) == ({"eager": 4.0}, {"eager": pytest.approx(3.0)})
    assert again.share_of_ceiling("fused", ceilings) == pytest.approx(1 / 4.1)


@pytest.mark.parametrize("tokens", [False, True])
def test_agreement_is_that_of_the_worst_image(tokens: bool) -> None:
    """The nearest patch of another image is not one of the same image, however similar."""
    exact = torch.eye(4, dtype=torch.float64)[[0, 1, 2]]  # logits of three images
    if tokens:  # a CLS and two patches each: those of an image are more similar than those of two
        exact = exact[:, None] + torch.tensor([0.0, 0.5, 0.6], dtype=torch.float64)[:, None] * torch.eye(4).double()[3]
    got = exact.clone().float()
    same = low_precision.agreement(got, exact)
    assert same == {"cosine": pytest.approx(1.0), "error": 0.0, "top1": 1.0}
    first = got[1, 0] if tokens else got[1]
    first.copy_(torch.tensor([1.0, 0.0, 0.0, 0.0]))
    worse = low_precision.agreement(got, exact)
    assert (worse["cosine"], worse["error"]) == (0.0, 1.0)
    assert worse["top1"] == (1.0 if tokens else pytest.approx(2 / 3))
    if tokens:
        got[1, 1:] = torch.tensor([[1.0, 0.0, 0.0, 0.5], [-1.0, 0.0, 0.0, 0.0]])  # now nearest to the first image's
        assert low_precision.agreement(got, exact)["top1"] < 1.0


# ---- the list of workloads ----


def test_every_benchmark_has_one_id() -> None:
    for grid in (("quick",), ("cpu", "long"), ("gpu",)):
        found = [w.id for w in workloads(*grid)]
        assert len(found) == len(set(found))
    assert {w.op for w in workloads("quick")} == {w.op for w in workloads("cpu")} == {w.op for w in workloads("gpu")}


def test_an_unknown_op_is_named() -> None:
    with pytest.raises(ValueError, match=r"no op \['softmax'\], the ops are"):
        workloads("quick", ops=("softmax",))


def test_labels_name_every_size() -> None:
    sizes = {"name": "vit", "B": 1, "scales": True, "residual": False, "dropout_p": 0.1}
    assert str(Workload("model", sizes)) == "vit B1 scales dropout_p0.1"
    for w in workloads("quick", ops=("model", "accelerate")):
        assert f"depth{w.sizes['depth']}" in str(w).split(), "no whole model, and none by name"


def test_the_ops_of_the_readme_are_benchmarks() -> None:
    labels = {(w.op, str(w)) for w in workloads("cpu", "long")}
    assert {cases[0] for _, cases, *_ in results._OPS} <= labels


@pytest.mark.parametrize("workload", workloads("sanitize", "kernels"), ids=lambda w: w.id)
def test_every_option_builds_on_a_device_without_memory(workload: Workload) -> None:
    """What the sanitizer and the compilers run, by fakes: shapes and leaves fit together."""
    runner = workload.runner("fused", Draw(torch.bfloat16, "meta"))
    outputs = runner.outputs()
    gradients = runner.gradients(tuple(torch.empty_like(out) for out in outputs))
    assert [g.shape for g in gradients] == [leaf.shape for leaf in runner.leaves]


@pytest.mark.slow
def test_the_graph_provider_is_the_library_s_model_with_fused_ops() -> None:
    import_library("timm")
    (workload,) = workloads("quick", ops=("accelerate",))
    plain, graph = (workload.runner(name, Draw(torch.float32, "cpu")).train(True) for name in ("sdpa", "graph"))
    torch.testing.assert_close(graph.outputs(), plain.outputs(), atol=1e-5, rtol=1e-4)
    saved = [saved_bytes(runner.outputs, runner.parameters) for runner in (plain, graph)]
    assert saved[1] < 0.75 * saved[0]  # 10 token tensors a block of 16


# ---- order and time of a run ----


@pytest.mark.parametrize("grid", [("quick",), ("cpu",), ("cpu", "long"), ("gpu",)], ids=" ".join)
def test_every_op_has_its_turn_before_any_has_its_second(grid: tuple[str, ...]) -> None:
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


def test_a_case_that_would_end_late_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_the_command_names_what_was_left_out_and_nothing_else(seed: int) -> None:
    cases = [(w, mode) for w in workloads("cpu", "long") for mode in table.MODE]
    draw = random.Random(seed)
    left_out = [case for case in cases if draw.random() < 0.4 or case[0].op in ("mlp", "memory, block")]
    ran = {w.op for w, mode in cases if (w, mode) not in left_out}
    terms = selection(left_out, ran).split(" or ")
    chosen = [(w, mode) for w, mode in cases if any(term in f"bench_op[{w.id}-{mode}]" for term in terms)]
    assert chosen == left_out
    assert "[mlp-" in terms


def test_a_run_without_time_prints_a_command_that_works() -> None:
    run = [
        sys.executable,
        "-m",
        "pytest",
        "benchmarks",
        "-k",
        "[layer_norm- or [add_layer",
        "--benchmark-only",
        "--quick",
    ]
    ours = "TRITON_INTERPRET", "PYTEST_XDIST"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    options: Any = {"cwd": provenance.ROOT, "capture_output": True, "text": True, "env": environment}
    out = subprocess.run([*run, "--bench-minutes", "1e-4"], **options).stdout
    assert "left out, for want of time: 4 of 4 benchmarks\n    layer_norm 2; add_layer_norm 2\n" in out
    assert "4 left out" in out.splitlines()[-1]
    assert max(map(len, out.splitlines())) <= 100
    command = out.split("add_layer_norm 2\n")[1].split("not asked for")[0]
    again = subprocess.run(f"{command.rstrip()} --collect-only -q", shell=True, **options).stdout
    assert "4/" in again.splitlines()[-1], again
    assert again.count("layer_norm-B1-N50-D192-") == 4


def test_the_benchmarks_are_collected_without_the_libraries_that_they_compare_with() -> None:
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


# ---- dispatch ----


def test_dispatch_measures_every_op(tmp_path) -> None:
    found = dispatch.measure(rounds=1, calls=1)  # asserts that op and ATen calls agree
    none = {"Norm", "Rotary", "dropout", "use_backend"}  # no work in inference
    assert {name.split(",")[0] for name in found} == {*ops.__all__} - none
    assert all(row["fused"] > 0 and row["aten"] > 0 for row in found.values())
    path = tmp_path / "dispatch.json"
    path.write_text(
        json.dumps({"environment": {"device": "x", "torch": "y"}, "commit": "z" * 40, "microseconds": found})
    )
    lines = dispatch.render(path)
    assert all(any(line.startswith(f"{name} ") for line in lines) for name in found)
