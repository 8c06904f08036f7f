"""Matmuls with a linear layer's weight: PyTorch's own, but on oneDNN where the CPU's BLAS would take float32.

PyTorch hands float32 linear layers to MKL, which keeps its best kernels from other makers' CPUs: on an AMD EPYC with
AVX-512, oneDNN takes 0.5 to 0.8 of MKL's time for the linear layers of a ViT (benchmarks/NOTES.md). PyTorch carries it
for Inductor, with the weight as it lies in memory. Both sum in float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

_LEAST = 1 << 22  # multiply-additions from which on oneDNN's 20 us a call are paid back
_linear_pointwise = (
    getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability().startswith("AVX")
    else None
)


def by_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether x [M, ...] times a linear layer's weight is oneDNN's."""
    return x.shape[0] * weight.numel() >= _LEAST and _fits(x, weight)


def _fits(x: Tensor, weight: Tensor) -> bool:
    """Plain tensors only, because to a tracer, a FLOP counter or a transform the operation should be the linear layer
    that everyone knows."""
    return bool(
        x.dtype is torch.float32
        and x.is_cpu
        and _linear_pointwise is not None
        and torch.backends.mkldnn.enabled
        and type(x) is Tensor
        and (type(weight) is Tensor or type(weight) is Parameter)
        and x.is_contiguous()
        and weight.is_contiguous()
        and not (is_dynamo_compiling() or _len_torch_dispatch_stack() or _are_functorch_transforms_active())
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [M, in] @ weight [out, in].T + bias [out], outside of autograd."""
    if x.shape[0] * weight.numel() < _LEAST or not _fits(x, weight):
        return F.linear(x, weight, bias)
    return _linear_pointwise(x, weight, bias, "none", [], "none")  # type: ignore[misc]


def input_gradient(dy: Tensor, weight: Tensor) -> Tensor:
    """dy [M, out] @ weight [out, in], outside of autograd."""
    if not by_onednn(dy, weight):
        return torch.mm(dy, weight)
    return _linear_pointwise(dy, weight.t(), None, "none", [], "none")  # type: ignore[misc]
