"""The clock of a GPU and its graphs, on a GPU that only keeps the time of what is queued."""

import contextlib
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.harness import clock, graphs, timing
from benchmarks.harness.clock import Clock
from benchmarks.harness.graphs import capture_all
from benchmarks.harness.timing import measured, per_call

CUDA: Any = SimpleNamespace(type="cuda")
FLUSH = 90e-6


class Gpu:
    """Runs queued work in order, each as soon as it is queued and the previous one has ended. In seconds."""

    def __init__(self) -> None:
        self.host = 1.0  # the host's clock
        self.free = 1.0  # when all that is queued will have ended
        self.cycles = 2e9  # a second

    def queue(self, seconds: float, host: float = 4e-6) -> None:
        """Queue a launch. seconds: of the GPU. host: seconds to queue it."""
        self.host += host
        self.free = max(self.free, self.host) + seconds

    def wait(self, *_: object) -> None:
        self.host = max(self.host, self.free)

    def event(self, enable_timing: bool) -> Any:
        event = SimpleNamespace(at=math.nan)

        def record() -> None:
            self.queue(0.0, 1e-6)
            event.at = self.free

        def synchronize() -> None:
            self.host = max(self.host, event.at)

        def elapsed_time(end: Any) -> float:
            assert self.host >= end.at, "the time is read before the GPU has come there"
            return 1e3 * (end.at - event.at)

        event.record, event.synchronize, event.elapsed_time = record, synchronize, elapsed_time
        event.query = lambda: event.at <= self.host
        assert enable_timing
        return event


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    cuda = SimpleNamespace(
        Event=gpu.event, _sleep=lambda cycles: gpu.queue(cycles / gpu.cycles), synchronize=lambda device: gpu.wait()
    )
    flush = SimpleNamespace(zero_=lambda: gpu.queue(FLUSH))
    for module in (clock, timing):
        monkeypatch.setattr(module, "torch", SimpleNamespace(cuda=cuda, int8=None, empty=lambda *_, **__: flush))
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: gpu.host))
    return gpu


def launches(gpu: Gpu, count: int, seconds: float, host: float) -> Callable[[], None]:
    def work() -> None:
        for _ in range(count):
            gpu.queue(seconds, host)

    return work


# launches, GPU's seconds and host's for each: one kernel; a training call, slow and slower on the host; many kernels
HIDDEN = [(1, 3e-6, 2e-6), (20, 5e-6, 20e-6), (100, 2e-6, 50e-6), (300, 30e-6, 5e-6)]


@pytest.mark.parametrize(("count", "seconds", "host"), HIDDEN)
def test_the_clock_sees_the_gpu_and_not_the_host(count, seconds, host, gpu):
    clock, work = Clock(CUDA), launches(gpu, count, seconds, host)
    clock.time(work)  # the first calls of a work tell how long the host takes
    for _ in range(5):
        assert clock.time(work, tries=1) == pytest.approx(count * seconds)
        assert gpu.host >= gpu.free - 1e-9, "the next measurement begins on an idle GPU"


def test_a_gpu_that_waits_for_its_host_is_not_timed(gpu):
    """0.2 s of the host cannot be hidden: there is no figure, because it would be the host's."""
    assert math.isnan(Clock(CUDA).time(launches(gpu, 1000, 1e-6, 2e-4)))
    clock = Clock(CUDA)
    samples = [clock.time(launches(gpu, 1, 5e-6, host), tries=1) for host in (4e-6, 5e-3, 4e-6)]
    assert samples[0] == pytest.approx(5e-6)
    assert math.isnan(samples[1]), "the host was slower than ever before"
    assert samples[2] == pytest.approx(5e-6)


def test_another_try_waits_longer(gpu):
    """The GPU's clock is faster by now, and a spin shorter."""
    clock = Clock(CUDA)
    gpu.cycles *= 6
    clock.time(launches(gpu, 1, 5e-6, 4e-6))
    assert clock.time(launches(gpu, 30, 5e-6, 1e-4)) == pytest.approx(30 * 5e-6)


def test_one_slow_call_does_not_slow_all_later_ones(gpu):
    clock, work = Clock(CUDA), launches(gpu, 1, 5e-6, 4e-6)
    clock.time(launches(gpu, 1, 5e-6, 2.0))  # a compilation
    for _ in range(120):
        clock.time(work)
    before = gpu.host
    clock.time(work)
    assert gpu.host - before < 1e-3


def test_a_plugin_may_call_the_clock(gpu):
    """pytest-benchmark calls it, also after a measurement that was broken off."""
    clock, work = Clock(CUDA), launches(gpu, 1, 5e-6, 4e-6)
    clock.prepare()
    clock()  # whose work raised
    for _ in range(3):
        clock.prepare()
        start = clock()
        work()
        assert clock() - start == pytest.approx(5e-6)


def test_most_samples_must_be_measurements():
    assert measured([1.0, math.nan, 2.0]) == [1.0, 2.0]
    assert measured([1.0, math.nan]) == measured([]) == []


@pytest.mark.parametrize(("seconds", "host", "expected"), [(5e-6, 50e-6, 50e-6), (5e-4, 50e-6, 5e-4)])
def test_a_call_takes_what_its_slower_side_takes(seconds, host, expected, gpu):
    samples = per_call({"": launches(gpu, 1, seconds, host)}, CUDA, seconds=0.1, rounds=3)[""]
    assert samples == pytest.approx([expected] * 3, rel=0.05)


# ---- graphs ----


class Cuda:
    """Replaces torch.cuda's streams and captures, and records which work ran on which stream."""

    def __init__(self) -> None:
        self.on = "default"  # the current stream
        self.seen: list[tuple[str, str]] = []  # what ran, and on which stream
        self.lost = False  # the context

    def Stream(self, name: str = "side") -> Any:  # noqa: N802
        return SimpleNamespace(name=name, wait_stream=lambda other: None)

    def current_stream(self) -> Any:
        return self.Stream(self.on)

    def set_stream(self, stream: Any) -> None:
        self.on = stream.name

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.on = self.on, stream.name
        yield
        self.on = before

    def CUDAGraph(self) -> Any:  # noqa: N802
        return SimpleNamespace(replay=lambda: self.seen.append(("replay", self.on)))

    @contextlib.contextmanager
    def graph(self, graph: Any, pool: Any = None) -> Iterator[None]:
        self.synchronize()
        before, self.on = self.on, "capture"
        yield  # a capture that fails leaves its stream current
        self.on = before

    def graph_pool_handle(self) -> tuple[int, int]:
        return (1, 1)

    def synchronize(self) -> None:
        if self.lost:
            raise RuntimeError("an illegal memory access was encountered")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda, one = Cuda(), SimpleNamespace(add_=lambda value: None, item=lambda: 1)
    monkeypatch.setattr(graphs, "torch", SimpleNamespace(cuda=cuda, zeros=lambda *_, **__: one))
    return cuda


def named(cuda: Cuda, name: str, fails: bool = False) -> Callable[[], None]:
    def work() -> None:
        cuda.seen.append((name, cuda.on))
        if fails and cuda.on == "capture":
            raise RuntimeError("operation not permitted when stream is capturing")

    return work


def test_works_run_before_they_are_captured(cuda):
    replays, remarks = capture_all({"a": named(cuda, "a"), "b": named(cuda, "b")})
    warm = [("a", "side")] * 3 + [("b", "side")] * 3
    assert cuda.seen[:6] == warm, "all of them, before the memory of a graph is held"
    assert cuda.seen[6:] == [("a", "capture"), ("replay", "default"), ("b", "capture"), ("replay", "default")]
    assert [*replays] == ["a", "b"]
    assert not remarks


def test_a_refused_capture_is_named_and_the_next_one_tried(cuda):
    replays, remarks = capture_all({"a": named(cuda, "a", fails=True), "b": named(cuda, "b")})
    assert remarks == {"a": "no graph: RuntimeError: operation not permitted when stream is capturing; "}
    assert [*replays] == ["b"]
    assert cuda.on == "default"


def test_a_lost_context_is_no_refusal(cuda):
    def work() -> None:
        if cuda.on == "capture":
            cuda.lost = True
            raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        capture_all({"a": work, "b": named(cuda, "b")})
    assert ("b", "capture") not in cuda.seen
