"""Dropout whose mask is drawn again in the backward pass instead of being stored: registration, gradient, function."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastvit.ops.dropout import aten
from fastvit.ops.runtime.autograd import Computed, FusedNode, inputs, needs_autograd
from fastvit.ops.runtime.backend import Route
from fastvit.ops.runtime.checks import check_dropout, check_float
from fastvit.ops.runtime.epilogue import Epilogue
from fastvit.ops.runtime.registry import register
from fastvit.ops.runtime.run import Prepared, run


def _fake(x: Tensor, seed: Tensor, p: float, *epilogue: Tensor | None) -> Tensor:
    return x.new_empty(x.shape, dtype=Epilogue(*epilogue).dtype(x))


# residual + row_scale * layer_scale * dropout(x) for x [..., D]. The mask depends on seed, p and shape only, so the op
# without an epilogue is its own gradient.
dropout_op = register(
    "dropout(Tensor x, Tensor seed, float p, Tensor? layer_scale=None, Tensor? row_scale=None, Tensor? residual=None)"
    " -> Tensor",
    aten=aten.dropout,
    fake=_fake,
    plain=aten.plain,
)


def draw_seeds(count: int, device: torch.device) -> Tensor:
    """Draw [count] int64 from the device's generator. They follow torch.manual_seed and repeat under checkpointing."""
    return torch.randint(0, 2**31 - 1, (count,), device=device)


class _Options(NamedTuple):
    op: str
    p: float


class _Dropout(FusedNode):
    Inputs = inputs("x", "seed")
    saved = ("seed",)

    @staticmethod
    def compute(t: Any) -> Computed:
        return (dropout_op(t.x, t.seed, t.options.p, route=t.route),), {}

    @staticmethod
    def gradients(s: dict[str, Any], douts: Any, o: _Options, needs_grad: Any, route: Route) -> dict[str, Any]:
        return {"x": dropout_op(*douts, s["seed"], o.p, route=route)}


def dropout(x: Tensor, p: float, *, training: bool = True) -> Tensor:
    """Zero each element with probability p and divide the rest by 1 - p (Srivastava et al. 2014).

    The backward pass needs one seed and no mask. Reproducible under torch.manual_seed and activation checkpointing.
    The masks of the Triton and the ATen route differ for equal seeds.

    Args:
        x: (...), float32, float16, bfloat16 or float64, any strides.
        p: probability of zero, in [0, 1).
        training: False returns x itself, as does p = 0.

    Returns:
        (...), contiguous, x's dtype.

    Raises:
        TypeError, ValueError: naming the argument, for dtypes and probabilities that do not fit.
    """
    check_float("x", x)
    check_dropout("p", p)
    if not training or p == 0.0 or x.numel() == 0:
        return x
    if x.dim() == 0:
        return dropout(x[None], p)[0]
    out: Tensor = run("dropout", _prepared, (x,), (p,))
    return out


def _prepared(x: Tensor, p: float) -> Prepared:
    return _Dropout, needs_autograd("dropout", x), _Options("dropout", p), (x, draw_seeds(1, x.device))
