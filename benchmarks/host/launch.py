"""Measure the host's time to queue kernels: one launch, by Triton and by fastvit, and a ViT-B/16 block.

No GPU is needed: a driver stands in for it that loads and launches nothing (benchmarks/codegen/stub_driver.py), so that
what is left is Python's part; CUDA's own takes some 2 us a launch on top. PyTorch's own matmuls, sums and casts of a
block are replaced by the allocation of their result. Both ways of a launch are timed in turns, a block alone, as a
model is a row of blocks; over a few calls a round. Noise only ever adds, so the least round counts.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import Mock

import torch
from torch import Tensor

import fastvit
from benchmarks.harness.timing import least_microseconds

B, N, D, HEADS = 1, 197, 768, 12
_CALLS = 10  # a round

Work = Callable[[], object]


def single_launches(rounds: int) -> dict[str, dict[str, float]]:
    """Return by kernel its arguments and the microseconds of one launch: every kernel of a block's training step, at N
    and at a length that is not short."""
    from benchmarks.codegen.stub_driver import stub_gpu  # here: both need triton, a table of results does not
    from fastvit.ops.runtime.launch import launch, launching

    measured = {}
    with stub_gpu(records=False):
        calls: dict[str, Any] = {}
        with launching(lambda *call: calls.update({call[0].__name__: call})):
            for tokens in (N, 1025):
                _block(tokens)["forward and backward"]()
        for name, (kernel, programs, tensors, numbers, constants) in calls.items():
            works: dict[str, Work] = {
                "triton": partial(kernel[(programs,)], *tensors, *numbers, **constants),
                "direct": partial(launch, kernel, programs, tensors, numbers, constants),
            }
            measured[name] = {"arguments": len(kernel.arg_names), **least_microseconds(works, rounds, _CALLS)}
    return measured


def block(rounds: int) -> dict[str, dict[str, float]]:
    """Return by step the microseconds, kernels of fastvit, calls of the vendor's matmuls, sums and casts, and
    microseconds of a stand-in."""
    from benchmarks.codegen.stub_driver import stub_gpu
    from fastvit.ops.runtime.launch import launching

    measured = {}
    with stub_gpu(records=False), _vendor_stand_ins() as vendor:
        a = torch.empty(N, D, dtype=torch.bfloat16)
        steps = _block(N)
        stand_in = least_microseconds({"": lambda: torch.mm(a, a.t())}, rounds, _CALLS)[""]
        for name, step in steps.items():
            with torch.inference_mode(name.endswith("inference")):  # entered once for all blocks of a model
                microseconds = least_microseconds({name: step}, rounds, _CALLS)[name]
                vendor.clear()
                with launching(kernels := Mock()):
                    step()
            calls = {"kernels": kernels.call_count, "vendor": len(vendor)}
            measured[name] = {"us": microseconds, **calls, "stand_in": stand_in}
    return measured


def _block(tokens: int) -> dict[str, Work]:
    torch.manual_seed(0)
    module = fastvit.Block(D, HEADS, qkv_bias=True)
    narrow = copy.deepcopy(module).to(torch.bfloat16)
    x = torch.randn(B, tokens, D).to(torch.bfloat16)

    def amp() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return module(wide)

    leaf, wide = x.clone().requires_grad_(), x.float().requires_grad_()
    leaves, wides = [leaf, *narrow.parameters()], [wide, *module.parameters()]
    gradient, wide_gradient = torch.randn_like(x), torch.randn_like(wide)
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
        called.append("addmm")
        return x.new_empty(x.shape[0], w.shape[1])

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
