"""Measure the host's time: until calls are queued on a GPU, next to eager and SDPA; without a GPU, of small ops on the
CPU, of one launch, and of a ViT-B/16 block.

    python -m benchmarks.host

Without a GPU a driver stands in for it that loads and launches nothing (benchmarks/codegen/stub_driver.py), so that
what is left of a launch is Python's part; CUDA's own takes some 2 us. PyTorch's own matmuls, sums and casts of a block
are replaced by the allocation of their result. Noise only ever adds, so the least round counts.
"""

from __future__ import annotations

import contextlib
import copy
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fastvit
from benchmarks.harness.columns import make
from benchmarks.harness.draw import Draw
from benchmarks.harness.provenance import commit
from benchmarks.harness.timing import Steps, least_microseconds, orders
from benchmarks.harness.workloads import Workload, workloads

PROVIDERS = ("eager", "sdpa", "fastvit")
MODES = {"inference": "forward", "training": "both passes"}
Rows = Iterator[tuple[str, ...]]
_ON_A_GPU = {"layer_norm": 20, "attention": 20, "layer_norm_mlp": 20, "block": 60, "model": 800}  # launches, at least
_ROUNDS = 60
_QUEUED = 600  # launches, about, between two waits: CUDA's queue holds about 1,000, and then the host waits
_NOT_OPS = ("block", "model", "accelerate", "memory, attention", "memory, block")
_CALLS = 10  # a round
_TOKENS, _WIDTH, _HEADS = 197, 768, 12


def _steps(workload: Workload, mode: str, draw: Draw) -> Steps:
    return {name: workload.step(name, mode, draw)[0] for name in PROVIDERS if name in workload.providers}


def small_ops(rounds: int, ops: tuple[str, ...] = ()) -> Rows:
    """Yield the microseconds of each provider on the CPU. At these sizes most of it is the host's: what an op costs
    over eager's is Python."""
    for workload in workloads("quick", ops=ops):
        for mode, title in MODES.items() if workload.op not in _NOT_OPS else ():
            measured = least_microseconds(_steps(workload, mode, Draw(torch.float32, "cpu")), rounds, _CALLS)
            cells = (f"{measured[name]:.1f}" if name in measured else "-" for name in PROVIDERS)
            yield f"{workload.op} {workload}, {title}", *cells


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
            steps = _steps(workload, mode, Draw(torch.bfloat16, device))
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
    """Yield for every kernel of a block's training step, at N and at a length that is not short, its arguments and the
    microseconds of one launch by Triton and by fastvit, in turns."""
    from benchmarks.codegen.stub_driver import stub_gpu  # here: it needs triton
    from fastvit.ops.runtime.launch import launch, launching

    calls: dict[str, Any] = {}
    with stub_gpu(records=False):
        with launching(lambda *call: calls.update({call[0].__name__: call})):
            for tokens in (_TOKENS, 1025):
                _block(tokens)["forward and backward"]()
        for name, (kernel, programs, tensors, numbers, constants) in calls.items():
            ways: Steps = {
                "triton": partial(kernel[(programs,)], *tensors, *numbers, **constants),
                "fastvit": partial(launch, kernel, programs, tensors, numbers, constants),
            }
            microseconds = least_microseconds(ways, rounds, _CALLS)
            yield name, str(len(kernel.arg_names)), *(f"{us:.1f}" for us in microseconds.values())


def block(rounds: int) -> Rows:
    """Yield the microseconds of each kind of step of a block, its kernels, and the calls of the vendor's matmuls, sums
    and casts. It is timed alone, as a model is a row of blocks."""
    from benchmarks.codegen.stub_driver import stub_gpu
    from fastvit.ops.runtime.launch import launching

    with stub_gpu(records=False), _vendor_stand_ins() as vendor:
        for name, step in _block(_TOKENS).items():
            with torch.inference_mode(name.endswith("inference")):  # entered once for all blocks of a model
                microseconds = least_microseconds({name: step}, rounds, _CALLS)[name]
                kernels: list[Any] = []
                vendor.clear()
                with launching(lambda *call, kernels=kernels: kernels.append(call)):
                    step()
            yield name, f"{microseconds:.0f}", str(len(kernels)), str(len(vendor))


def _block(tokens: int) -> dict[str, Callable[[], object]]:
    torch.manual_seed(0)
    module = fastvit.Block(_WIDTH, _HEADS, qkv_bias=True)
    narrow = copy.deepcopy(module).to(torch.bfloat16)
    x = torch.randn(1, tokens, _WIDTH).to(torch.bfloat16)
    leaf, wide = x.clone().requires_grad_(), x.float().requires_grad_()
    leaves, wides = [leaf, *narrow.parameters()], [wide, *module.parameters()]
    gradient, wide_gradient = torch.randn_like(x), torch.randn_like(wide)

    def amp() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return module(wide)

    return {
        "forward, inference": lambda: narrow(x),
        "forward and backward": lambda: torch.autograd.grad(narrow(leaf), leaves, gradient),
        "forward and backward, autocast": lambda: torch.autograd.grad(amp(), wides, wide_gradient),
    }


@contextlib.contextmanager
def _vendor_stand_ins() -> Iterator[list[str]]:
    """Make ATen's matmuls, sums and casts of CPU tensors only allocate, within the context. Yields the names of those
    called."""
    called: list[str] = []

    def mm(x: Tensor, w: Tensor) -> Tensor:
        called.append("mm")
        return x.new_empty(x.shape[0], w.shape[1])

    def addmm(bias: Tensor, x: Tensor, w: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        return mm(x, w)

    def column_sum(x: Tensor, dim: list[int], keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        called.append("sum")
        return x.new_empty(x.shape[1], dtype=dtype or x.dtype)

    def cast(x: Tensor, *, dtype: Any = None, **_: Any) -> Tensor:
        called.append("cast")
        return torch.empty_like(x, dtype=dtype)

    with torch.library._scoped_library("aten", "IMPL") as library, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of replaced kernels
        stand_ins = {"mm": mm, "addmm": addmm, "sum.dim_IntList": column_sum, "_to_copy": cast}
        for name, stand_in in stand_ins.items():
            library.impl(name, stand_in, "CPU")
        yield called


def main(rounds: int = 1000, ops: tuple[str, ...] = ()) -> int:
    where = f"torch {torch.__version__}, commit {commit()[:10]}"
    if torch.cuda.is_available():
        columns = ("us of the host, least / median", "eager", "SDPA", "fastvit")
        print(*make(columns, list(until_queued(torch.device("cuda")))), sep="\n")
        print(f"\n{torch.cuda.get_device_name()}, bfloat16, {where}")
        return 0
    torch.set_num_threads(1)
    heads = ("kernel", "arguments", "Triton's way\nus", "fastvit's\nus")
    print(*make(heads, list(launches(rounds))), "", sep="\n")
    print(*make(("ViT-B/16 block, batch 1", "us", "kernels", "vendor's\ncalls"), list(block(rounds))), "", sep="\n")
    heads = ("small ops on the CPU, float32, us", "eager", "SDPA", "fastvit")
    print(*make(heads, list(small_ops(rounds // 20 or 1, ops))), "", sep="\n")
    print(f"one thread, the least of the rounds, {where}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
