"""The benchmarks' own instruments: a wrong meter would make every figure wrong."""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from host_recorder import HostRecorder

from benchmarks.harness import clock as clock_module
from benchmarks.harness import measure, timing
from benchmarks.harness.clock import Clock, Quantiles
from benchmarks.harness.draw import Draw, Runner
from benchmarks.harness.provenance import ROOT
from benchmarks.harness.providers import OPS, Op
from benchmarks.harness.record import Provider
from benchmarks.harness.sdpa_backend import SdpaBackend
from benchmarks.harness.workloads import Workload, on_the_page, workloads
from benchmarks.report import plot
from fastvit import reference
from fastvit.cuda_graphs import recorder
from fastvit.study.sources.baselines import use_sdpa

CPU, CUDA = torch.device("cpu"), torch.device("cuda")

# ---- rounds, agreement, draws ----


def test_rounds_are_interleaved_in_random_order_and_all_recorded():
    calls: list[str] = []
    steps = {name: lambda name=name: calls.append(name) for name in ("eager", "sdpa", "fastvit")}
    samples = measure.interleave(Clock(CPU), steps, 8)
    assert calls == [name for names in timing.orders(steps, 8) for name in names]
    assert [len(values) for values in samples.values()] == [8, 8, 8]
    assert len({tuple(names) for names in timing.orders("abc", 100)}) == 6


def test_statistics_of_rounds():
    assert timing.paired_interval([3.0, 2.0, math.nan, 5.0, 6.0, 7.0], [1.0] * 6) is None, "five have 94 %"
    nine = timing.paired_interval([2.0 * n for n in range(1, 10)], [2.0] * 9)
    assert nine == (2.0, 8.0), "of nine, the second and the last but one have 96 %"
    assert timing.measured([1.0, math.nan]) == timing.measured([]) == [], "most must be measurements"
    assert Quantiles.of([5.0, 1.0, 2.0, 3.0, 4.0, 100.0]) == Quantiles(3.5, 2.0, 5.0, 1.0, 6)
    assert [timing.plan_rounds(seconds, 2.0, most=200) for seconds in (0.1, 5.0, 1e-6)] == [20, 3, 200]


def toy(monkeypatch: pytest.MonkeyPatch, build: Callable[..., Runner], **sizes: int) -> Workload:
    monkeypatch.setitem(OPS, "toy", Op(build))
    return Workload("toy", sizes)


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("error", [0.0, 1e-3])
def test_agreement_lets_through_what_is_right_and_stops_what_is_wrong(error, mode, monkeypatch):
    def build(provider: str, draw: Draw, M: int) -> Runner:
        x = draw.normal(M, 8)
        return Runner(lambda: x * x * (1 + (error if provider == "fastvit" else 0.0)), (x,))

    arguments = toy(monkeypatch, build, M=16), mode, ("eager", "fastvit"), torch.float32, CPU
    if error:
        with pytest.raises(AssertionError, match="fastvit is not timed"):
            measure.agreement(*arguments)
    else:
        ratios = measure.agreement(*arguments)
        assert ratios["fastvit"] == ratios["eager"] < 1.0


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_graphs_are_compared_and_timed_as_replays(mode, monkeypatch):
    """Where nothing is captured, the remark says why."""
    made: list[HostRecorder] = []
    monkeypatch.setattr(HostRecorder, "made", made)
    monkeypatch.setattr(recorder, "Recorder", HostRecorder)
    (block,) = workloads("quick", ops=("block",))
    ratios = measure.agreement(block, mode, ("fastvit", "graphs"), torch.float32, CPU)
    assert ratios["graphs"] == ratios["fastvit"]
    assert made[-1].replays == (1 if mode == "inference" else 2)

    def first_calls() -> tuple[Callable[[], object], str]:
        session: Any = SimpleNamespace(dtype=torch.float32, device=CPU, clock=Clock(CPU))
        record: Any = SimpleNamespace(mode=mode, providers={"graphs": Provider()})
        step, _ = measure._first_calls(session, block, "graphs", record)
        return step, record.providers["graphs"].remark

    step, remark = first_calls()
    before = made[-1].replays
    step()
    assert (made[-1].replays > before, remark) == (True, "")
    monkeypatch.setattr(HostRecorder, "refuses", "of a reason")
    with pytest.warns(UserWarning, match="its capture failed"):
        _, remark = first_calls()
    assert remark.startswith("not timed, it runs as without graphs: its capture failed at")


def test_cost_of_a_matmul(monkeypatch):
    def build(provider: str, draw: Draw, M: int, K: int, N: int) -> Runner:
        a, b = draw.normal(M, K), draw.normal(K, N)
        return Runner(lambda: a @ b, (a,), (b,))

    matmul = toy(monkeypatch, build, M=8, K=16, N=32)
    into, written = 4 * (8 * 16 + 16 * 32), 4 * 8 * 32
    assert matmul.cost("inference", torch.float32) == (2 * 8 * 16 * 32, into + written)
    assert matmul.cost("training", torch.float32) == (3 * 2 * 8 * 16 * 32, 3 * into + 2 * written)


def test_every_precision_and_provider_draws_the_same_numbers():
    low, exact = (Draw(torch.bfloat16, CPU, compute).normal(64) for compute in (torch.bfloat16, torch.float64))
    assert exact.dtype == torch.float64
    assert torch.equal(low.double(), exact)
    plain, sdpa = (Draw(torch.float64, CPU).module(lambda: reference.Block(32, 2)) for _ in range(2))
    for (name, a), b in zip(plain.named_parameters(), sdpa.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert a.std() > 0.0, name
    use_sdpa(sdpa)
    x = Draw(torch.float64, CPU).normal(2, 17, 32)
    expected = plain(x)
    with SdpaBackend() as backend:
        torch.testing.assert_close(sdpa(x), expected, rtol=1e-12, atol=1e-12)
    assert backend.name == "flash_attention_for_cpu"


# ---- the clock of a GPU and its graphs ----


class Gpu:
    """A GPU that only keeps the time of what is queued: each begins as soon as it is queued and the previous one has
    ended. In seconds."""

    def __init__(self) -> None:
        self.host = 1.0  # the host's clock
        self.free = 1.0  # when all that is queued will have ended
        self.cycles = 2e9  # a second

    def queue(self, seconds: float, host: float = 4e-6) -> None:
        """Queue a launch. seconds: of the GPU. host: seconds to queue it."""
        self.host += host
        self.free = max(self.free, self.host) + seconds

    def launches(self, count: int, seconds: float, host: float) -> Callable[[], None]:
        return lambda: [self.queue(seconds, host) for _ in range(count)] and None

    def wait(self, *_: object) -> None:
        self.host = max(self.host, self.free)

    def event(self, enable_timing: bool) -> Any:
        event = SimpleNamespace(at=math.nan, query=lambda: event.at <= self.host)

        def record() -> None:
            self.queue(0.0, 1e-6)
            event.at = self.free

        def synchronize() -> None:
            self.host = max(self.host, event.at)

        def elapsed_time(end: Any) -> float:
            assert self.host >= end.at, "the time is read before the GPU has come there"
            return 1e3 * (end.at - event.at)

        event.record, event.synchronize, event.elapsed_time = record, synchronize, elapsed_time
        return event


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    cuda = SimpleNamespace(Event=gpu.event, _sleep=lambda cycles: gpu.queue(cycles / gpu.cycles), synchronize=gpu.wait)
    flush = SimpleNamespace(zero_=lambda: gpu.queue(90e-6))
    for module in (clock_module, timing):
        monkeypatch.setattr(module, "torch", SimpleNamespace(cuda=cuda, int8=None, empty=lambda *_, **__: flush))
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: gpu.host))
    return gpu


# launches, GPU's seconds and host's for each: a training call that is slow and slower on the host; many kernels
@pytest.mark.parametrize(("count", "seconds", "host"), [(20, 5e-6, 20e-6), (300, 30e-6, 5e-6)])
def test_the_clock_sees_the_gpu_and_not_the_host(count, seconds, host, gpu):
    clock, work = Clock(CUDA), gpu.launches(count, seconds, host)
    clock.time(work)  # the first calls of a work tell how long the host takes
    for _ in range(5):
        assert clock.time(work, tries=1) == pytest.approx(count * seconds)
        assert gpu.host >= gpu.free - 1e-9, "the next measurement begins on an idle GPU"
    assert math.isnan(clock.time(gpu.launches(1000, 1e-6, 2e-4))), "0.2 s of the host cannot be hidden"


@pytest.mark.parametrize(("seconds", "host", "expected"), [(5e-6, 50e-6, 50e-6), (5e-4, 50e-6, 5e-4)])
def test_a_call_takes_what_its_slower_side_takes(seconds, host, expected, gpu):
    samples = timing.per_call({"": gpu.launches(1, seconds, host)}, CUDA, seconds=0.1, rounds=3)[""]
    assert samples == pytest.approx([expected] * 3, rel=0.05)


# ---- the list of workloads, and a run ----


@pytest.mark.parametrize("grid", ["cpu", "gpu"])
def test_a_grid_has_every_workload_once_and_the_most_important_cases(grid):
    every = workloads(grid)
    assert len({w.id for w in every}) == len(every)
    assert {w.op for w in every} == {w.op for w in workloads("quick")}
    assert {w.op for w in every if (w.op, str(w)) in on_the_page()} == {w.op for w in every if w.op[:6] != "memory"}
    assert [w.sizes["N"] for w in every if w.op == "memory, block"] == [4097, 2305, 1025, 577, 197]


@pytest.mark.parametrize("workload", workloads("sanitize", "kernels"), ids=lambda w: w.id)
def test_every_option_builds_on_a_device_without_memory(workload):
    """The workloads of the sanitizer and the compilers, on meta tensors: shapes and leaves fit together."""
    runner = workload.runner("fastvit", Draw(torch.bfloat16, "meta"))
    gradients = runner.gradients(tuple(torch.empty_like(out) for out in runner.outputs()))
    assert [g.shape for g in gradients] == [leaf.shape for leaf in runner.leaves]


@pytest.mark.nightly
def test_a_run_prints_its_tables(tmp_path):
    """Two cases, without the libraries that are compared with."""
    arguments = ["benchmarks", "--benchmark-only", "--quick", "-p", "no:cacheprovider", "-k", "[layer_norm-"]
    program = f"""if True:
        import sys, pytest
        sys.modules |= dict.fromkeys(["timm", "torchvision", "transformers"])
        sys.exit(pytest.main([*{arguments}, "--benchmark-json", {str(tmp_path / "float32.json")!r}]))
    """
    ours = "TRITON_INTERPRET", "PYTEST_"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)} | {"COLUMNS": "80"}
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
    assert "accelerate: neither timm, torchvision nor transformers is installed" in run.stdout
    assert "fastvit against PyTorch" in run.stdout
    assert "measuring the machine's limits\n" in run.stdout
    lines = re.findall(r"^\[(\d)/2\] layer_norm B1 N50 D192 (fwd\S*) +[\d.]+ ms +~?[\d.]+x eager$", run.stdout, re.M)
    assert lines == [("1", "fwd"), ("2", "fwd+bwd")], run.stdout
    assert "%]" not in run.stdout, "pytest's own progress"
    records, *_ = plot.read([tmp_path / "float32.json"])
    assert [(r.op, r.mode, [*r.providers]) for r in records] == [
        ("layer_norm", mode, ["eager", "fastvit"]) for mode in ("inference", "training")
    ]
    assert all(p.time and p.peak_bytes and p.error_ratio for r in records for p in r.providers.values())
    medians = [b["stats"]["median"] for b in json.loads((tmp_path / "float32.json").read_text())["benchmarks"]]
    assert medians == pytest.approx([r.providers["fastvit"].time.median for r in records]), "the plugin has the same"
    assert records[1].providers["fastvit"].saved_bytes
