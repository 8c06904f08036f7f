"""The linear ops on PyTorch's own functions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fastvit.ops.runtime.activations import activate, activate_, activate_backward, activate_backward_
from fastvit.ops.runtime.epilogue import add_residual_
from fastvit.ops.runtime.rows import as_rows


def linear_fwd(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, *epilogue: Tensor | None) -> Tensor:
    # new, so what follows works in place. F.linear returns a view of a matrix, and a view that an autograd.Function
    # returns may not be edited in place in training: `detach` returns one that is no view
    y = F.linear(x, weight, bias).detach()
    if activation != "none":
        activate_(y, activation)
    return add_residual_(y, *epilogue)


def linear_act_fwd(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    pre = F.linear(x, weight, bias)
    return activate(pre, activation), pre


def linear_dact(dy: Tensor, weight: Tensor, pre: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    dpre = activate_backward_(dy @ weight, pre, activation)
    return dpre, activate(pre, activation), as_rows(dpre).sum(0)


def act_bwd(dy: Tensor, pre: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    dpre = activate_backward(dy, pre, activation)
    return dpre, as_rows(dpre).sum(0)


def side_by_side(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
    """Apply several layers to x [..., in]; return their outputs next to each other, [..., out]."""
    widths, rows = [len(weight) for weight in weights], as_rows(x)
    out = x.new_empty(*x.shape[:-1], sum(widths))
    for columns, weight, bias in zip(as_rows(out).split(widths, dim=1), weights, biases, strict=True):
        if bias is None:
            torch.mm(rows, weight.t(), out=columns)
        else:
            torch.addmm(bias, rows, weight.t(), out=columns)
    return out
