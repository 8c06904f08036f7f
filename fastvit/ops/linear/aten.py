"""The linear ops on PyTorch's own functions. A GPU takes them, too, where no Triton kernel is faster than cuBLAS.

Computed again from `reference.ops.linear`, the backward pass would repeat the matmul: both passes would take a CPU 1.3
times as long."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fastvit.ops.runtime.activations import activate, activate_, activate_backward, activate_backward_
from fastvit.ops.runtime.epilogue import add_residual_
from fastvit.ops.runtime.rows import as_rows
from fastvit.reference import ops as reference


def linear_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, layer_scale: Tensor | None = None,
    row_scale: Tensor | None = None, residual: Tensor | None = None, value_weight: Tensor | None = None,
    value_bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    # new, so what follows works in place. F.linear returns a view of a matrix, and a view that an autograd.Function
    # returns may not be edited in place in training: `detach` returns one that is no view
    y = F.linear(x, weight, bias).detach()
    if activation != "none":
        activate_(y, activation)
    if value_weight is not None:
        y.mul_(F.linear(x, value_weight, value_bias))
    return add_residual_(y, layer_scale, row_scale, residual)


def linear_act_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, value_weight: Tensor | None = None,
    value_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if value_weight is None:
        pre = F.linear(x, weight, bias)
        return activate(pre, activation), pre
    pre = side_by_side(x, (weight, value_weight), (bias, value_bias))
    return gated_act(pre, activation), pre


def gated_act(pre: Tensor, activation: str) -> Tensor:
    gate, value = pre.chunk(2, dim=-1)
    return activate(gate.contiguous(), activation).mul_(value)


def linear_dact(dy: Tensor, weight: Tensor, pre: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    dh = dy @ weight
    if dh.shape[-1] != pre.shape[-1]:
        dpre, h = _gated_act_bwd(dh, pre, activation)
    else:
        dpre, h = activate_backward_(dh, pre, activation), activate(pre, activation)
    return dpre, h, as_rows(dpre).sum(0)


def act_bwd(dh: Tensor, pre: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    if dh.shape[-1] != pre.shape[-1]:
        dpre, _ = _gated_act_bwd(dh, pre, activation)
    else:
        dpre = activate_backward(dh, pre, activation)
    return dpre, as_rows(dpre).sum(0)


def _gated_act_bwd(dh: Tensor, pre: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Return dpre and h."""
    gate, value = pre.chunk(2, dim=-1)
    dpre = torch.empty_like(pre, memory_format=torch.contiguous_format)
    dgate, dvalue = dpre.chunk(2, dim=-1)
    gate = gate.contiguous()
    h = activate(gate, activation)
    torch.mul(dh, h, out=dvalue)
    dgate.copy_(activate_backward_(dh * value, gate, activation))
    return dpre, h.mul_(value)


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


# ---- for exporters: nothing is computed in place ----


def plain(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, layer_scale: Tensor | None = None,
    row_scale: Tensor | None = None, residual: Tensor | None = None, value_weight: Tensor | None = None,
    value_bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    h, _ = plain_act(x, weight, bias, activation, value_weight, value_bias)
    return reference.add_branch(h, layer_scale, row_scale, residual)


def plain_act(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, value_weight: Tensor | None = None,
    value_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    pre = F.linear(x, weight, bias)
    h = pre if activation == "none" else reference.ACTIVATIONS[activation](pre)
    if value_weight is None:
        return h, pre
    value = F.linear(x, value_weight, value_bias)
    return h * value, torch.cat((pre, value), dim=-1)
