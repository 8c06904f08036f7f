"""Measures time on a device, and summarises samples by quantiles."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

FLUSH_BYTES = 256 << 20  # larger than any L2
SPIN_LEAST, SPIN_MOST = 5e-5, 0.05  # seconds; a longer spin would make a measurement too slow


class Clock:
    """Measures the seconds of a piece of work: on the CPU by `perf_counter`, on a GPU between two events.

    If a GPU waits for its host, the host is measured. So the GPU spins for longer than the host recently needed to
    queue the work, and then evicts its cache; meanwhile the host queues the work. If the GPU reached the first event
    before everything was queued, it may have waited, and the result is NaN.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._gpu = device.type == "cuda"
        if self._gpu:
            self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
            self._queueing = SPIN_LEAST  # seconds that the host needs to queue the work, by recent measurements
            self._cycles = 1e9  # of a spin, per second
            for _ in range(2):  # the first also starts the device
                self._cycles *= 1e-2 / self._spin(1e-2)

    def _spin(self, seconds: float) -> float:
        """Let the GPU spin for about so long, wait for it, and return the seconds it took. Calibrates the cycles."""
        self._start.record()
        torch.cuda._sleep(int(seconds * self._cycles))
        self._end.record()
        self._end.synchronize()
        return self._start.elapsed_time(self._end) * 1e-3

    def time(self, work: Callable[[], object], *, tries: int = 4) -> float:
        """Return the seconds of one call, or NaN if the GPU waited for the host in all tries."""
        if not self._gpu:
            return _time(work)
        timed = (self._time_on_gpu(work) for _ in range(tries))
        return next((seconds for seconds in timed if not math.isnan(seconds)), math.nan)

    def _time_on_gpu(self, work: Callable[[], object]) -> float:
        torch.cuda._sleep(int(min(2 * self._queueing, SPIN_MOST) * self._cycles))
        self._flush.zero_()
        self._start.record()
        host = time.perf_counter()
        result = work()
        self._end.record()
        waited = self._start.query()  # before synchronize: after it, always True
        took = time.perf_counter() - host
        self._queueing = max(took, 2 * self._queueing if waited else 0.9 * self._queueing, SPIN_LEAST)
        self._end.synchronize()
        del result
        return math.nan if waited else self._start.elapsed_time(self._end) * 1e-3


def _time(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - start
    del result
    return seconds


HOST_BOUND = "the GPU waited for the host: no time of the GPU"


@dataclass(frozen=True)
class Quantiles:
    """Quantiles of samples in seconds."""

    median: float
    q20: float
    q80: float
    least: float
    rounds: int

    @staticmethod
    def of(samples: Sequence[float]) -> Quantiles:
        q20, median, q80 = (float(q) for q in np.quantile(samples, (0.2, 0.5, 0.8)))
        return Quantiles(median, q20, q80, float(min(samples)), len(samples))
