"""Time in rounds of random order, find intervals of ratios, measure the machine's ceilings."""

from __future__ import annotations

import gc
import itertools
import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.harness.clock import Clock

Steps = Mapping[str, Callable[[], object]]
Within = Callable[[str], AbstractContextManager[object]]
LIMIT_SECONDS = 0.5  # for each of the machine's limits: long enough for a quiet moment of a shared machine
WARM_SECONDS = 2.0  # until a GPU's clocks and power are steady


def measured(samples: Sequence[float]) -> list[float]:
    """Return the samples that are not NaN; none at all if most are NaN."""
    good = [seconds for seconds in samples if not math.isnan(seconds)]
    return good if 2 * len(good) > len(samples) else []


def warm(work: Callable[[], object], clock: Clock, *, calls: int = 3, seconds: float = 0.1) -> float:
    """Run work `calls` times or for `seconds`, whichever ends first, at least once. Returns the seconds of the last
    measurement, with everything that belongs to it."""
    start = time.perf_counter()
    for _ in range(calls):
        before = time.perf_counter()
        clock.time(work)
        last = time.perf_counter() - before
        if time.perf_counter() > start + seconds:
            break
    return last


def per_call(
    steps: Steps, device: torch.device, *, seconds: float, rounds: int, within: Within = nullcontext
) -> dict[str, list[float]]:
    """Return the seconds of a call of each function, host and device together, caches warm: in every round a loop of
    each, in random order. A loop takes about `seconds` and gives one sample.

    within: the context of a loop, by the function's name; entering it is not timed.
    """

    def loop(name: str, count: int) -> float:
        with within(name):
            _wait(device)
            start = time.perf_counter()
            for _ in range(count):
                steps[name]()
            _wait(device)
            return (time.perf_counter() - start) / count

    counts = {}
    for name in steps:
        loop(name, 1)
        counts[name] = int(np.clip(seconds / max(loop(name, 2), 1e-9), 1, 2000))
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for names in orders(steps, rounds):
        for name in names:
            samples[name].append(loop(name, counts[name]))
    return samples


def orders(names: Iterable[str], rounds: int) -> list[list[str]]:
    """Return for each round a random order of the names, the same in every run.

    In a fixed order, or in one and its reverse by turns, the same function measured as two providers differed by up to
    6 %: what ran before leaves caches and free memory in a state of its own. A random order favours none, so that the
    sign of a round's difference is a fair coin wherever two providers are the same function.
    """
    draw, names = random.Random(0), list(names)
    return [draw.sample(names, len(names)) for _ in range(rounds)]


def interleave(clock: Clock, steps: Steps, rounds: int) -> dict[str, list[float]]:
    """Run so many rounds, in which every provider runs once, in random order. Return every provider's samples, round by
    round."""
    samples: dict[str, list[float]] = {name: [] for name in steps}
    gc.collect()
    gc.disable()  # for all alike
    try:
        for name in itertools.chain(*orders(steps, rounds)):
            samples[name].append(clock.time(steps[name]))
    finally:
        gc.enable()
    return samples


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def plan_rounds(round_seconds: float, budget: float, *, least: int = 3, most: int = 200) -> int:
    """Return how many rounds fit into the budget."""
    return int(np.clip(budget / max(round_seconds, 1e-9), min(least, most), most))


def paired_interval(others: Sequence[float], own: Sequence[float]) -> tuple[float, float] | None:
    """Return the interval that holds the median of other / own, pair by pair, with at least 95 %; None below six pairs,
    whose range has less. Pairs with a NaN do not count.

    Its ends are two of the ratios: the k-th smallest and the k-th largest, where k is the largest for which a fair coin
    falls on one side fewer than k times with at most 2.5 %. So it leaves out 1 exactly where the sign test rejects it,
    and holds its level for noise of any distribution.
    """
    ratios = sorted(a / b for a, b in zip(others, own, strict=True) if not math.isnan(a / b))
    n, k, tail = len(ratios), 0, 1
    while 40 * tail <= 2**n:
        k += 1
        tail += math.comb(n, k)
    return (ratios[k - 1], ratios[n - k]) if k else None


LARGE = 1 << 27  # bytes that a large copy reads; what moves fewer may find them in a cache


@dataclass(frozen=True)
class Ceilings:
    """Limits that this machine reached in this run: of a large copy (read and written bytes), of a large matmul in the
    dtype, and on a CPU of a copy within its caches."""

    bytes_per_second: float
    flops_per_second: float
    cached_bytes_per_second: float | None = None  # a GPU's cache is cleared before every measurement

    def least_seconds(self, flops: float, moved: float) -> float:
        bandwidth = max(self.bytes_per_second, self.cached_bytes_per_second or 0.0 if moved < LARGE else 0.0)
        return max(flops / self.flops_per_second, moved / bandwidth)


def measure_ceilings(clock: Clock, dtype: torch.dtype, *, quick: bool = False) -> Ceilings:
    """Measure the limits of the machine. quick: of five samples each."""
    gpu = clock.device.type == "cuda"
    source = torch.zeros((1 << 30) if gpu else LARGE, dtype=torch.int8, device=clock.device)
    target = torch.empty_like(source)
    n = 8192 if gpu else 1024
    a, b = (torch.randn(n, n, device=clock.device).to(dtype) for _ in range(2))

    def best(work: Callable[[], object]) -> float:
        warm(work, clock, calls=10_000 if gpu else 2, seconds=WARM_SECONDS)
        samples, end = [clock.time(work) for _ in range(5 if quick else 15)], time.perf_counter() + LIMIT_SECONDS
        while time.perf_counter() < end and not quick:
            samples.append(clock.time(work))
        return min(measured(samples))  # the most that the machine can do

    def copy(count: int) -> float:
        return 2 * count / best(lambda: target[:count].copy_(source[:count]))

    cached = None if gpu else max(copy(1 << shift) for shift in (18, 20, 22))
    return Ceilings(copy(source.numel()), 2 * n**3 / best(lambda: torch.mm(a, b)), cached)
