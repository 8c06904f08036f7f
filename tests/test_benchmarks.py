"""The benchmarks' own instruments: a wrong meter would make every figure wrong."""

import dataclasses
import json
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks.harness import dispatch, table, timing
from benchmarks.harness import providers as eager
from benchmarks.harness.agreement import agreement, error_ratio
from benchmarks.harness.cases import Case, Draw, Runner
from benchmarks.harness.measure import cost, interleave
from benchmarks.harness.memory import exponent, peak_bytes, running_peak, saved_bytes
from benchmarks.harness.record import Provider, Record, environment
from benchmarks.harness.timing import Ceilings, Clock, Quantiles, plan_rounds, speedups
from fastvit import ops, reference

CPU = torch.device("cpu")
MB = 1 << 20


def test_peak_of_a_known_temporary() -> None:
    x = torch.zeros(1 << 20)  # 4 MB, allocated before: does not count

    def work() -> torch.Tensor:
        temporary = torch.empty(16 << 20)  # 64 MB
        del temporary
        return x + 1  # 4 MB, when the 64 are gone

    work()
    assert 64 * MB <= peak_bytes(work, CPU) < 64.1 * MB


def test_peak_counts_what_lives_together() -> None:
    def work() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty(8 * MB, dtype=torch.int8), torch.empty(24 * MB, dtype=torch.int8)

    work()
    assert 32 * MB <= peak_bytes(work, CPU) < 32.1 * MB


def test_peak_sees_allocations_inside_ops_and_in_backward() -> None:
    x = torch.randn(1, 256, 3, 4, 16, requires_grad=True)
    scores = 4 * 256 * 256 * 4

    def step() -> object:
        return torch.autograd.grad(eager.attention(x).sum(), x)

    step()
    peak = peak_bytes(step, CPU)
    assert 2 * scores <= peak <= 5 * scores  # probabilities, and at least their gradient, at one time


def test_running_peak_follows_the_order() -> None:
    assert running_peak([10, -10, 7, 5, -12, 11]) == 12
    assert running_peak([-100, 30]) == 0  # releases of what was allocated before
    assert running_peak([]) == 0


def test_saved_bytes_counts_a_storage_once_and_no_parameter() -> None:
    x = torch.randn(128, 64, requires_grad=True)
    linear = nn.Linear(64, 64)

    def forward() -> torch.Tensor:
        h = linear(x)  # saves x and the weight
        return h.exp() + x.view(64, 128).square().sum()  # saves exp's output, and x again as a view

    parameters = tuple(linear.parameters())
    assert saved_bytes(forward, parameters) == 2 * x.nbytes
    assert saved_bytes(forward, ()) == 2 * x.nbytes + linear.weight.nbytes


@pytest.mark.parametrize("power", [1.0, 1.5, 2.0])
def test_exponent_of_a_power_law(power: float) -> None:
    sizes = [197, 577, 1025, 4097]
    assert exponent(sizes, [3.0 * n**power for n in sizes]) == pytest.approx(power)


def test_exponent_needs_points() -> None:
    with pytest.raises(ValueError, match="two or more points"):
        exponent([1.0], [1.0])


def test_ratios_are_of_the_same_round() -> None:
    """A machine that slows down for a while, and a hiccup in one round, leave the ratio; medians alone would say 30."""
    samples = {"eager": [3.0, 30.0, 30.0], "fused": [1.0, 10.0, 1.0]}
    assert speedups(samples, "fused") == {"eager": pytest.approx(3.0)}


class _Plugin:
    """pytest-benchmark's fixture, as far as `interleave` uses it."""

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
    samples = interleave(_Plugin(), Clock(CPU), steps, seconds, budget=1.6, most=200)
    assert calls == ["eager", "sdpa", "fused"] * 5
    assert [len(values) for values in samples.values()] == [5, 5, 5]
    assert samples["fused"] == [1.0] * 5


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


def test_error_ratio_is_the_rule() -> None:
    exact = torch.full((4,), 1.0, dtype=torch.float64)
    ulp = 2.0**-23
    near, far = (torch.tensor([1.0 + k * ulp] * 4) for k in (1, 3))
    assert error_ratio(near, near, exact, 2.0) == pytest.approx(1 / 1.5)
    assert error_ratio(far, near, exact, 2.0) == pytest.approx(2.0)  # 3 ulp = 2 * 1 + 1: just allowed
    assert error_ratio(torch.full((4,), torch.nan), near, exact, 2.0) == float("inf")
    with pytest.raises(ValueError, match="float16"):
        error_ratio(near.half(), near, exact, 2.0)


def _toy(error: float) -> Case:
    def build(provider: str, draw: Draw, M: int) -> Runner:
        x = draw.normal(M, 8)
        return Runner(lambda: x * x + (error if provider == "fused" else 0.0), (x,))

    return Case("toy", {"M": 16}, build, ("eager", "fused"))


def test_agreement_lets_through_what_is_right_and_stops_what_is_wrong() -> None:
    right = agreement(_toy(0.0), "inference", ("eager", "fused"), torch.float32, CPU)
    assert right["fused"] == right["eager"] < 1.0
    with pytest.raises(AssertionError, match="fused is not timed"):
        agreement(_toy(1e-3), "inference", ("eager", "fused"), torch.float32, CPU)


def test_cost_of_a_matmul() -> None:
    def build(provider: str, draw: Draw, M: int, K: int, N: int) -> Runner:
        a, b = draw.normal(M, K), draw.normal(K, N)
        return Runner(lambda: a @ b, (a,), (b,))

    case = Case("matmul", {"M": 8, "K": 16, "N": 32}, build)
    read, written = 4 * (8 * 16 + 16 * 32), 4 * 8 * 32
    assert cost(case, "inference", torch.float32) == (2 * 8 * 16 * 32, read + written)
    assert cost(case, "training", torch.float32) == (3 * 2 * 8 * 16 * 32, 3 * read + 2 * written)


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


def test_sdpa_baseline_is_the_reference() -> None:
    plain, sdpa = (Draw(torch.float64, CPU).module(lambda: reference.Block(32, 2)) for _ in range(2))
    x = Draw(torch.float64, CPU).normal(2, 17, 32)
    expected = plain(x)
    eager.use_sdpa(sdpa)
    with eager.SdpaBackend() as backend:
        got = sdpa(x)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    assert backend.name != "", "the SDPA kernel has a name"
    with eager.SdpaBackend() as none:
        plain(x)
    assert none.name == "math"


def _record(op: str, N: int, eager_peak: int, fused_peak: int) -> Record:
    record = Record(op, f"N{N}", "training", {"N": N}, {}, flops=10**9, moved_bytes=10**6)
    record.providers = {
        "eager": Provider(Quantiles.of([0.012, 0.012]), eager_peak, 100, 1.0),
        "sdpa": Provider(skipped="does not fit"),
        "fused": Provider(Quantiles.of([0.004, 0.004]), fused_peak, 10, 0.5),
    }
    record.speedups = {"eager": 3.0}
    return record


def test_table_shows_times_ratios_and_gaps() -> None:
    ceilings = Ceilings(bytes_per_second=1e10, flops_per_second=1e12)
    lines = table.render([_record("attention", 197, 8_000_000, 2_000_000)], ceilings)
    row = lines[3].split()
    times, peaks, ratios = ["12.0", "skipped", "4.00"], ["8.00", "-", "2.00"], ["3.00x", "-", "4.00x", "-"]
    assert row == ["attention", "N197", "fwd+bwd", *times, *peaks, *ratios, "25%", "0.50"]
    assert "compile" not in "".join(lines)
    assert len({len(line) for line in lines if set(line) == {"-"}}) == 1


def test_table_without_fused_has_no_ratios() -> None:
    record = _record("attention", 197, 8, 2)
    del record.providers["fused"]
    record.speedups = {}
    assert record.memory_ratios() == {}
    assert table.render([record], None)[3].split()[-2:] == ["-", "-"]


def test_notes_name_what_was_skipped() -> None:
    assert "skipped: attention N197 fwd+bwd, sdpa: does not fit" in table.notes([_record("attention", 197, 8, 2)])


def test_growth_is_fitted_per_provider() -> None:
    records = [_record("memory, attention", n, 4 * n * n, 64 * n) for n in (197, 577, 1025)]
    lines = table.growth_lines(records)
    assert any("eager: peak ~ N^2.00" in line for line in lines)
    assert any("fused: peak ~ N^1.00" in line for line in lines)
    assert len(lines) == 2


def test_header_says_plainly_that_no_gpu_was_measured() -> None:
    text = "\n".join(table.header(environment(CPU, torch.bfloat16), None))
    assert "CPU path (ATen), no GPU measured" in text
    assert "bfloat16" in text
    assert torch.__version__ in text


def test_record_survives_json() -> None:
    record = _record("attention", 197, 8, 2)
    ceilings = Ceilings(1e10, 1e12)
    data = json.loads(json.dumps(record.as_dict(environment(CPU, torch.float32), ceilings)))
    assert data["providers"]["eager"]["time"] == dataclasses.asdict(Quantiles.of([0.012, 0.012]))
    assert data["memory_ratios"] == {"eager": 4.0}
    assert data["rates"]["fused"]["tflops_per_second"] == pytest.approx(0.25)
    assert data["rates"]["fused"]["share_of_ceiling"] == pytest.approx(0.25)


@pytest.mark.parametrize("grid", ["quick", "cpu", "gpu"])
def test_every_case_has_one_id(grid: str) -> None:
    from benchmarks import (
        bench_attention,
        bench_block,
        bench_layer_norm,
        bench_memory,
        bench_mlp,
        bench_model,
        bench_patch_embed,
    )

    modules = (
        bench_attention,
        bench_block,
        bench_layer_norm,
        bench_memory,
        bench_mlp,
        bench_model,
        bench_patch_embed,
    )
    for module in modules:
        ids = [case.id for case in module.cases(grid)]
        assert ids
        assert len(ids) == len(set(ids))


def test_dispatch_measures_every_op(tmp_path) -> None:
    found = dispatch.measure(rounds=1, calls=1)  # asserts that op and ATen calls agree
    assert {name.split(",")[0] for name in found} == {*ops.__all__} - {"dropout"}  # no work in inference
    assert all(row["fused"] > 0 and row["aten"] > 0 for row in found.values())
    path = tmp_path / "dispatch.json"
    path.write_text(
        json.dumps({"environment": {"device": "x", "torch": "y"}, "commit": "z" * 40, "microseconds": found})
    )
    assert all(f"| {name} |" in dispatch.render(path) for name in found)
