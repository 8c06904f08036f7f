"""Measure what the host takes for a call: of small ops on a CPU, and at batch 1 until it is queued on a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import torch

from benchmarks.harness.draw import Draw
from benchmarks.harness.timing import Steps, least_microseconds, orders
from benchmarks.harness.workloads import Workload, workloads

PROVIDERS = ("eager", "sdpa", "fastvit")
MODES = {"inference": "forward", "training": "both passes"}
_MODELS = ("block", "model", "accelerate", "memory, attention", "memory, block")  # not ops

_ON_A_GPU = ("layer_norm", "attention", "layer_norm_mlp", "block", "model")
_ROUNDS = 60
_QUEUED = 600  # launches, about, between two waits: CUDA's queue holds about 1,000, and then the host waits
_LAUNCHES = {"block": 60, "model": 800}  # of a call in training, at least; of an op 20


def small_ops(rounds: int, calls: int, ops: tuple[str, ...] = ()) -> dict[str, dict[str, float]]:
    """Return by op, sizes and passes the microseconds of each provider on the CPU, the least of the rounds. At these
    sizes most of it is the host's: what an op costs over eager's is Python."""
    measured = {}
    for workload in workloads("quick", ops=ops):
        for mode, title in MODES.items() if workload.op not in _MODELS else ():
            steps = _steps(workload, mode, Draw(torch.float32, "cpu"))
            measured[f"{workload.op} {workload}, {title}"] = least_microseconds(steps, rounds, calls)
    return measured


def _steps(workload: Workload, mode: str, draw: Draw) -> Steps:
    return {name: workload.step(name, mode, draw)[0] for name in PROVIDERS if name in workload.providers}


def until_queued(device: torch.device) -> Iterator[tuple[str, ...]]:
    """Yield rows: workload, passes, and for each provider the least and the median of the host's microseconds.

    The clock stops when the last call is queued, whatever the GPU still has to do. Rounds have random orders. The least
    is the work of Python and PyTorch; the median is what a program sees on this machine.
    """
    headline = [w for w in workloads("headline", ops=_ON_A_GPU) if w.sizes["B"] == 1 and w.sizes.get("N", 197) == 197]
    for op in _ON_A_GPU:
        workload = next(w for w in headline if w.op == op)
        for mode, title in MODES.items():
            steps = _steps(workload, mode, Draw(torch.bfloat16, device))
            microseconds = _queue(steps, max(1, _QUEUED // _LAUNCHES.get(op, 20)), device)
            cells = [
                f"{min(each):,.0f} / {statistics.median(each):,.0f}" if (each := microseconds.get(name)) else "-"
                for name in PROVIDERS
            ]
            yield f"{op} {workload}", title, *cells


def _queue(steps: Steps, calls: int, device: torch.device) -> dict[str, list[float]]:
    """Return by name the microseconds of the host for one call, a value a round, of so many calls each."""
    for step in steps.values():
        for _ in range(3):
            step()
    microseconds: dict[str, list[float]] = {name: [] for name in steps}
    for names in orders(steps, _ROUNDS):
        for name in names:
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            for _ in range(calls):
                steps[name]()
            microseconds[name].append(1e6 * (time.perf_counter() - start) / calls)
    return microseconds
