"""A clock of a device, and the quantiles of what it measured."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

FLUSH_BYTES = 256 << 20  # larger than any L2
SPIN_LEAST, SPIN_MOST = 5e-5, 0.05  # seconds; with more than the most, a measurement would take too long


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
