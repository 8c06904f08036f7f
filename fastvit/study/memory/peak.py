"""Measures the memory of a function: peak bytes, bytes saved for backward, and how a peak grows with N."""

from __future__ import annotations

import gc
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from fastvit.ops.runtime.backend import hidden_from_profilers


def peak_bytes(function: Callable[[], object], device: torch.device) -> int:
    """Return the most bytes that `function` holds at one time, on top of what was allocated before: activations,
    temporaries, and its result. Run `function` once before, so that caches and lazy initialisation do not count."""
    gc.collect()
    return _cuda_peak(function, device) if device.type == "cuda" else _cpu_peak(function)


def _cuda_peak(function: Callable[[], object], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = function()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del result
    return peak


def _cpu_peak(function: Callable[[], object]) -> int:
    """Follow PyTorch's CPU allocator. It does not see scratch memory that a library such as oneDNN takes by itself."""
    with hidden_from_profilers(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = function()
    del result
    assert recorded.profiler is not None
    # the public events() leaves out allocations inside an op
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    return running_peak(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))


def running_peak(changes: Iterable[int]) -> int:
    """Return the maximum of the running sum of allocations (positive) and releases (negative), at least 0."""
    return max(itertools.accumulate(changes, initial=0))


def saved_bytes(function: Callable[[], object], parameters: Sequence[Tensor]) -> int:
    """Return the bytes that autograd keeps from `function` for backward: every storage once, without the parameters'.
    Works on any device, "meta" included, where storages have sizes but no addresses."""
    own = {p.untyped_storage()._cdata for p in parameters}
    kept: dict[int, torch.UntypedStorage] = {}  # kept alive, so that no identity is used twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage
        return tensor.detach()  # an output that is saved as it is would keep itself alive

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function()
    del result
    return sum(storage.nbytes() for storage in kept.values())


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Return p of the least-squares fit values = c * sizes**p, in logarithms."""
    return statistics.linear_regression(list(map(math.log, sizes)), list(map(math.log, values))).slope


LONG = 1000  # tokens; with fewer, most of a peak is gradients of parameters and what grows linearly


class Growth(NamedTuple):
    """A peak that grows as N**exponent from N = first to N = last."""

    exponent: float
    first: int
    last: int


def growth_exponent(tokens: Sequence[int], peaks: Sequence[float]) -> Growth | None:
    """Fit the exponent at the three largest sizes; None if there are fewer, or the largest has under LONG tokens.

    Args:
        tokens: in ascending order.
        peaks: bytes for each, without what was allocated before.
    """
    if len(tokens) < 3 or tokens[-1] < LONG:
        return None
    return Growth(exponent(tokens[-3:], peaks[-3:]), tokens[-3], tokens[-1])
