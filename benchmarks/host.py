"""Measure the host's time: until calls are queued on a GPU, next to eager and SDPA; without a GPU, of one launch.

    python -m benchmarks.host

Without a GPU a driver stands in for it that loads and launches nothing (benchmarks/codegen/stub_driver.py), so that
what is left of a launch is Python's part; CUDA's own takes some 2 us. Noise only ever adds, so the least round counts.
"""

from __future__ import annotations

import statistics
import sys
import time
import timeit
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import fastvit
from benchmarks.harness.columns import make
from benchmarks.harness.draw import Draw
from benchmarks.harness.provenance import commit
from benchmarks.harness.timing import Steps, orders
from benchmarks.harness.workloads import workloads

PROVIDERS = ("eager", "sdpa", "fastvit")
MODES = {"inference": "forward", "training": "both passes"}
Rows = Iterator[tuple[str, ...]]
_ON_A_GPU = {"layer_norm": 20, "attention": 20, "layer_norm_mlp": 20, "block": 60, "model": 800}  # launches, at least
_ROUNDS = 60
_QUEUED = 600  # launches, about, between two waits: CUDA's queue holds about 1,000, and then the host waits
_CALLS = 10  # a round


def until_queued(device: torch.device) -> Rows:
    """Yield the least and the median of the host's microseconds for each provider, at batch 1.

    The clock stops when the last call is queued, whatever the GPU still has to do. Rounds have random orders. The least
    is the work of Python and PyTorch; the median is what a program sees on this machine.
    """
    headline = workloads("headline", ops=tuple(_ON_A_GPU))
    for op, launches in _ON_A_GPU.items():
        sizes = ((w, w.sizes["B"], w.sizes.get("N", 197)) for w in headline if w.op == op)
        workload = next(w for w, B, N in sizes if (B, N) == (1, 197))
        for mode, title in MODES.items():
            providers = [name for name in PROVIDERS if name in workload.providers]
            steps = {name: workload.step(name, mode, Draw(torch.bfloat16, device))[0] for name in providers}
            microseconds = _queue(steps, max(1, _QUEUED // launches), device)
            cells = (
                f"{min(each):,.0f} / {statistics.median(each):,.0f}" if (each := microseconds.get(name)) else "-"
                for name in PROVIDERS
            )
            yield f"{op} {workload}, {title}", *cells


def _queue(steps: Steps, calls: int, device: torch.device) -> dict[str, list[float]]:
    """Return by name the microseconds of the host for one call, a value a round, of so many calls each."""
    microseconds: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(3):
            step()
    for name in (name for names in orders(steps, _ROUNDS) for name in names):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            steps[name]()
        microseconds[name].append(1e6 * (time.perf_counter() - start) / calls)
    return microseconds


def launches(rounds: int) -> Rows:
    """Yield for every kernel of a block's training step, at a short and at a long sequence, its arguments and the
    microseconds of one launch by Triton and by fastvit."""
    from benchmarks.codegen.stub_driver import stub_gpu  # here: it needs triton
    from fastvit.ops.runtime.launch import launch, launching

    calls: dict[str, Any] = {}
    block = fastvit.Block(768, 12, qkv_bias=True).to(torch.bfloat16)
    with stub_gpu(records=False):
        with launching(lambda *call: calls.update({call[0].__name__: call})):
            for tokens in (197, 1025):
                block(torch.randn(1, tokens, 768, dtype=torch.bfloat16)).sum().backward()
        for name, (kernel, programs, tensors, numbers, constants) in calls.items():
            ways = (
                partial(kernel[(programs,)], *tensors, *numbers, **constants),
                partial(launch, kernel, programs, tensors, numbers, constants),
            )
            seconds = (min(timeit.repeat(way, number=_CALLS, repeat=rounds)) / _CALLS for way in ways)
            yield name, str(len(kernel.arg_names)), *(f"{1e6 * least:.1f}" for least in seconds)


def main() -> int:
    where = f"torch {torch.__version__}, commit {commit()[:10]}"
    if torch.cuda.is_available():
        columns = ("us of the host, least / median", "eager", "SDPA", "fastvit")
        print(*make(columns, list(until_queued(torch.device("cuda")))), sep="\n")
        print(f"\n{torch.cuda.get_device_name()}, bfloat16, {where}")
        return 0
    torch.set_num_threads(1)
    heads = ("kernel", "arguments", "Triton's way\nus", "fastvit's\nus")
    print(*make(heads, list(launches(1000))), "", sep="\n")
    print(f"one thread, the least of the rounds, {where}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
