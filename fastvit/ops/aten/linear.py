"""The linear ops on PyTorch's own functions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastvit.ops._activations import activate, activate_, activate_backward, activate_backward_
from fastvit.ops._checks import as_rows
from fastvit.ops._epilogue import add_residual_

_LEAST = 8192  # elements of x: for fewer, the cost of one call more shows


def _grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear of plain tensors, outside of autograd and of traces. In float32 on the CPU a wide result is computed
    as one batched product over groups of K columns, which MKL does in 0.93 to 0.99 of the time (benchmarks/NOTES.md);
    each sum over K is made the same way."""
    (*leading, K), N = x.shape, weight.shape[0]
    if K < 128 or N <= K or N % K or x.dtype is not torch.float32 or not x.is_cpu or not weight.is_contiguous():
        return F.linear(x, weight, bias)
    groups, x = N // K, as_rows(x)
    M = x.shape[0]
    y = torch.empty(*leading, N, dtype=x.dtype)
    columns = y.view(M, groups, K).transpose(0, 1)
    matrices = weight.view(groups, K, K).transpose(1, 2)
    if bias is None:
        torch.bmm(x.expand(groups, M, K), matrices, out=columns)
    else:
        torch.baddbmm(bias.view(groups, 1, K), x.expand(groups, M, K), matrices, out=columns)
    return y


def linear_fwd(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, *epilogue: Tensor | None) -> Tensor:
    # fresh, so what follows works in place. F.linear returns a view of a matrix, and a view that an autograd.Function
    # returns may not be edited in place in training: `detach` makes the same memory a tensor of its own
    y = (F.linear(x, weight, bias) if x.numel() < _LEAST else _grouped_linear(x, weight, bias)).detach()
    if activation != "none":
        activate_(y, activation)
    return add_residual_(y, *epilogue)


def linear_act_fwd(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    pre = F.linear(x, weight, bias) if x.numel() < _LEAST else _grouped_linear(x, weight, bias)
    return activate(pre, activation), pre


def linear_dact(dy: Tensor, weight: Tensor, pre: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    dpre = activate_backward_(dy @ weight, pre, activation)
    return dpre, activate(pre, activation), as_rows(dpre).sum(0)


def act_bwd(dy: Tensor, pre: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    dpre = activate_backward(dy, pre, activation)
    return dpre, as_rows(dpre).sum(0)
