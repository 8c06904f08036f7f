"""The registered ops of gated linear layers, for gated MLPs. They take [..., D] of any strides; results are contiguous.
`activation` is the gate's. `pre` is gate and value before the activation, next to each other: (..., 2 * hidden)."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from fastvit.ops.linear import gated_aten as aten
from fastvit.ops.linear.op import act_bwd_fake, dact_flops
from fastvit.ops.runtime import decompositions
from fastvit.ops.runtime.registry import register


def _fwd_fake(x: Tensor, gate_weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], gate_weight.shape[0])


def _act_fwd_fake(x: Tensor, gate_weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _fwd_fake(x, gate_weight), x.new_empty(*x.shape[:-1], 2 * gate_weight.shape[0])


def _act_fake(pre: Tensor, activation: str) -> Tensor:
    return pre.new_empty(*pre.shape[:-1], pre.shape[-1] // 2)


def _dact_fake(dy: Tensor, weight: Tensor, pre: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    dpre, dbias = act_bwd_fake(dy, pre, activation)
    return dpre, _act_fake(pre, activation), dbias


def _fwd_flops(x: Any, gate_weight: Any, *_: Any, **__: Any) -> int:
    return int(4 * math.prod(x) * gate_weight[0])


_LAYERS = "Tensor x, Tensor gate_weight, Tensor value_weight, Tensor? gate_bias, Tensor? value_bias, str activation"

gated_fwd = register(
    f"gated_fwd({_LAYERS}) -> Tensor",
    aten=aten.gated_fwd, launch="linear.gated_launch", fake=_fwd_fake, flops=_fwd_flops,
    decomposition=decompositions.gated_fwd,
)  # fmt: skip
gated_act_fwd = register(
    f"gated_act_fwd({_LAYERS}) -> (Tensor h, Tensor pre)",
    aten=aten.gated_act_fwd, launch="linear.gated_launch", fake=_act_fwd_fake, flops=_fwd_flops,
    decomposition=decompositions.gated_act_fwd,
)  # fmt: skip
gated_act = register(
    "gated_act(Tensor pre, str activation) -> Tensor",
    aten=aten.gated_act,
    launch="linear.gated_launch",
    fake=_act_fake,
)
gated_act_bwd = register(
    "gated_act_bwd(Tensor dh, Tensor pre, str activation) -> (Tensor dpre, Tensor dbias)",
    aten=aten.gated_act_bwd,
    launch="linear.gated_launch",
    fake=act_bwd_fake,
)
gated_dact = register(
    "gated_dact(Tensor dy, Tensor weight, Tensor pre, str activation) -> (Tensor dpre, Tensor h, Tensor dbias)",
    aten=aten.gated_dact, launch="linear.gated_launch", fake=_dact_fake, flops=dact_flops,
)  # fmt: skip
