"""Timing: a clock per device, interleaved rounds, the quantiles of what was measured, and the machine's ceilings."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

FLUSH_BYTES = 256 << 20  # larger than any L2
SPIN_LEAST, SPIN_MOST = 5e-5, 0.05  # seconds; with more than the most, a measurement would take too long
WARM_SECONDS = 2.0  # until a GPU's clocks and power are steady


class Clock:
    """Called before and after a piece of work; the difference of the two values is its seconds. On the CPU that is
    `perf_counter`, on a GPU the time between two events.

    A GPU that waits for its host measures the host. So `prepare` first gives it a spin, longer than the host took to
    queue work of late, and then clears its cache; meanwhile the host queues the work. Where the GPU came to the first
    event before all was queued, it may have waited, and the result is NaN: no measurement.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._gpu = device.type == "cuda"
        if self._gpu:
            self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
            self._running = False
            self._queueing = SPIN_LEAST  # seconds that the host takes to queue the work, with those of late in mind
            self._cycles = 1e9  # of a spin, in a second
            for _ in range(2):  # the first also starts the device
                self._cycles *= 1e-2 / self._spin(1e-2)

    def _spin(self, seconds: float) -> float:
        """Makes the GPU wait about so long; the seconds that it took. Only to count cycles: it waits for the GPU."""
        self._start.record()
        torch.cuda._sleep(int(seconds * self._cycles))
        self._end.record()
        self._end.synchronize()
        return self._start.elapsed_time(self._end) * 1e-3

    def prepare(self) -> None:
        """Before each measurement: keeps a GPU busy until the host is done, and evicts what the last one left."""
        if self._gpu:
            self._running = False  # whatever became of the last measurement
            torch.cuda._sleep(int(min(2 * self._queueing, SPIN_MOST) * self._cycles))
            self._flush.zero_()

    def __call__(self) -> float:
        if not self._gpu:
            return time.perf_counter()
        self._running = not self._running
        if self._running:
            self._start.record()
            self._host = time.perf_counter()
            return 0.0
        self._end.record()
        waited = self._start.query()  # before the host waits: afterwards the answer is always yes
        took = time.perf_counter() - self._host
        self._queueing = max(took, 2 * self._queueing if waited else 0.9 * self._queueing, SPIN_LEAST)
        self._end.synchronize()
        return math.nan if waited else self._start.elapsed_time(self._end) * 1e-3

    def time(self, work: Callable[[], object], *, tries: int = 4) -> float:
        """Seconds of one call; NaN if the host did not stay ahead of the GPU in any of the tries."""
        for _ in range(tries):
            self.prepare()
            start = self()
            result = work()
            seconds = self() - start
            del result
            if not math.isnan(seconds):
                break
        return seconds


HOST_BOUND = "the GPU waited for the host: no time of the GPU"


def measured(samples: Sequence[float]) -> list[float]:
    """The samples that are measurements; none at all if most are not."""
    good = [seconds for seconds in samples if not math.isnan(seconds)]
    return good if 2 * len(good) > len(samples) else []


def warm(work: Callable[[], object], clock: Clock, *, calls: int = 3, seconds: float = 0.1) -> float:
    """Runs work `calls` times or for `seconds`, whichever ends first, at least once; what the last measurement took,
    all that belongs to it included."""
    start = time.perf_counter()
    for _ in range(calls):
        before = time.perf_counter()
        clock.time(work)
        last = time.perf_counter() - before
        if time.perf_counter() > start + seconds:
            break
    return last


def per_call(work: Callable[[], object], device: torch.device, *, seconds: float = 0.1, rounds: int = 3) -> list[float]:
    """Seconds a call takes in a steady loop, host and device together, caches warm; one sample a loop."""

    def loop(count: int) -> float:
        _wait(device)
        start = time.perf_counter()
        for _ in range(count):
            work()
        _wait(device)
        return (time.perf_counter() - start) / count

    loop(1)
    count = int(np.clip(seconds / max(loop(2), 1e-9), 1, 2000))
    return [loop(count) for _ in range(rounds)]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def plan_rounds(round_seconds: float, budget: float, *, least: int = 3, most: int = 200) -> int:
    """How many rounds fit into the budget."""
    return int(np.clip(budget / max(round_seconds, 1e-9), min(least, most), most))


@dataclass(frozen=True)
class Quantiles:
    """Of samples in seconds."""

    median: float
    q20: float
    q80: float
    least: float
    rounds: int

    @property
    def uncertainty(self) -> float:
        """Of the median, relative, at 95 %: two standard errors, were the samples normal; infinite below three."""
        if self.rounds < 3:
            return math.inf
        deviation = (self.q80 - self.q20) / 1.683
        return 2 * 1.253 * deviation / math.sqrt(self.rounds) / self.median

    @staticmethod
    def of(samples: Sequence[float]) -> Quantiles:
        q20, median, q80 = (float(q) for q in np.quantile(samples, (0.2, 0.5, 0.8)))
        return Quantiles(median, q20, q80, float(min(samples)), len(samples))


@dataclass(frozen=True)
class Ceilings:
    """What this machine reached in this run: a large copy (read and written bytes), a large matmul in the dtype."""

    bytes_per_second: float
    flops_per_second: float

    def least_seconds(self, flops: float, moved: float) -> float:
        return max(flops / self.flops_per_second, moved / self.bytes_per_second)


def measure_ceilings(clock: Clock, dtype: torch.dtype) -> Ceilings:
    gpu = clock.device.type == "cuda"
    source = torch.zeros((1 << 30) if gpu else (1 << 27), dtype=torch.int8, device=clock.device)
    target = torch.empty_like(source)
    n = 8192 if gpu else 1024
    a, b = (torch.randn(n, n, device=clock.device).to(dtype) for _ in range(2))

    def best(work: Callable[[], object]) -> float:
        warm(work, clock, calls=10_000 if gpu else 2, seconds=WARM_SECONDS)
        return min(measured([clock.time(work) for _ in range(15)]))  # the most that the machine can do

    copy = best(lambda: target.copy_(source))
    return Ceilings(2 * source.nbytes / copy, 2 * n**3 / best(lambda: torch.mm(a, b)))
