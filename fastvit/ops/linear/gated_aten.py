"""The gated linear ops on PyTorch's own functions."""

from __future__ import annotations

import torch
from torch import Tensor

from fastvit.ops.linear.aten import linear_fwd, side_by_side
from fastvit.ops.runtime.activations import activate, activate_backward_
from fastvit.ops.runtime.rows import as_rows


def gated_fwd(
    x: Tensor, gate_weight: Tensor, value_weight: Tensor, gate_bias: Tensor | None, value_bias: Tensor | None,
    activation: str,
) -> Tensor:  # fmt: skip
    h = linear_fwd(x, gate_weight, gate_bias, activation)
    return h.mul_(linear_fwd(x, value_weight, value_bias, "none"))


def gated_act_fwd(
    x: Tensor, gate_weight: Tensor, value_weight: Tensor, gate_bias: Tensor | None, value_bias: Tensor | None,
    activation: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    pre = side_by_side(x, (gate_weight, value_weight), (gate_bias, value_bias))
    return gated_act(pre, activation), pre


def gated_act(pre: Tensor, activation: str) -> Tensor:
    gate, value = pre.chunk(2, dim=-1)
    return activate(gate.contiguous(), activation).mul_(value)


def gated_dact(dy: Tensor, weight: Tensor, pre: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    dpre, dbias, h = _backward(dy @ weight, pre, activation)
    return dpre, h, dbias


def gated_act_bwd(dh: Tensor, pre: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    dpre, dbias, _ = _backward(dh, pre, activation)
    return dpre, dbias


def _backward(dh: Tensor, pre: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return dpre, dbias and h."""
    gate, value = pre.chunk(2, dim=-1)
    dpre = torch.empty_like(pre, memory_format=torch.contiguous_format)
    dgate, dvalue = dpre.chunk(2, dim=-1)
    gate = gate.contiguous()
    h = activate(gate, activation)
    torch.mul(dh, h, out=dvalue)
    dgate.copy_(activate_backward_(dh * value, gate, activation))
    return dpre, as_rows(dpre).sum(0), h.mul_(value)
