"""Timing: a clock per device, interleaved rounds, the quantiles of what was measured, and the machine's ceilings."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

FLUSH_BYTES = 256 << 20  # larger than any L2
WARM_SECONDS = 2.0  # until a GPU's clocks and power are steady


class Clock:
    """Called before and after a piece of work; the difference of the two values is its seconds.

    On the CPU that is `perf_counter`. On a GPU the two calls record events around the work: the first returns 0.0 at
    once, so that the host runs ahead while the GPU still clears its cache, and the second waits and returns the
    seconds between the events.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._gpu = device.type == "cuda"
        if self._gpu:
            self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
            self._running = False

    def __call__(self) -> float:
        if not self._gpu:
            return time.perf_counter()
        self._running = not self._running
        if self._running:
            self._start.record()
            return 0.0
        self._end.record()
        self._end.synchronize()
        return self._start.elapsed_time(self._end) * 1e-3

    def prepare(self) -> None:
        """Before each measurement: evicts what the last one left in a GPU's cache."""
        if self._gpu:
            self._running = False  # whatever became of the last measurement
            self._flush.zero_()

    def time(self, work: Callable[[], object]) -> float:
        self.prepare()
        start = self()
        result = work()
        seconds = self() - start
        del result
        return seconds


def warm(work: Callable[[], object], clock: Clock, *, calls: int = 3, seconds: float = 0.1) -> float:
    """Runs work `calls` times or for `seconds`, whichever ends first, at least once; the last run's seconds."""
    end = time.perf_counter() + seconds
    for _ in range(calls):
        last = clock.time(work)
        if time.perf_counter() > end:
            break
    return last


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
        return min(clock.time(work) for _ in range(15))  # the most that the machine can do

    copy = best(lambda: target.copy_(source))
    return Ceilings(2 * source.nbytes / copy, 2 * n**3 / best(lambda: torch.mm(a, b)))
