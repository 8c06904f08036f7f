"""Rotary positions of q and k: the tables, registration, gradient, checks, public functions."""

# No `annotations` from __future__: pdoc cannot resolve string annotations of a NamedTuple re-exported elsewhere

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastvit.ops.rotary import aten
from fastvit.ops.runtime.autograd import Computed, FusedNode, inputs, needs_autograd, unviewed
from fastvit.ops.runtime.backend import Route
from fastvit.ops.runtime.checks import check_dimensions, check_float, check_head_dim, check_like
from fastvit.ops.runtime.registry import register
from fastvit.ops.runtime.run import Prepared, run
from fastvit.reference.ops import signed, swapped


class Rotary(NamedTuple):
    """Rotary positions (Su et al. 2021, arXiv:2104.09864): a head x of a patch becomes x * cos + turned(x) * sin.

    Attributes:
        sin, cos: (N - P, d), or broadcastable to (B, H, N - P, d), for tables of a sample or a head; any float dtype.
        num_prefix_tokens: P, the first tokens, which stay as they are.
        interleaved: True as in EVA and Perception Encoder: turned(x) is (-x1, x0, -x3, x2, ...). False as in DINOv3:
            turned(x) is (-second half, first half).
    """

    sin: Tensor
    cos: Tensor
    num_prefix_tokens: int = 0
    interleaved: bool = False


# x [B, N, heads, d], of which the first `rotated` heads are, by tables [B or 1, H or 1, T, d] that repeat for every H
# heads; the first N - T tokens and the other heads are copied. transposed: the gradient. out=x makes the op write over
# x, which is contiguous and owned by the caller.
rotary_op = register(
    "rotary(Tensor x, Tensor sin, Tensor cos, int rotated, bool interleaved, bool transposed) -> Tensor",
    aten=aten.rotary,
    fake=lambda x, *_: x,
    plain=aten.plain,
)


class _Options(NamedTuple):
    op: str
    rotated: int
    interleaved: bool


class _Rotary(FusedNode):
    Inputs = inputs("x", "sin", "cos")
    saved = ("x", "sin", "cos")

    @staticmethod
    def compute(t: Any) -> Computed:
        _, rotated, interleaved = t.options
        y = rotary_op(_heads(t.x), t.sin, t.cos, rotated, interleaved, False, route=t.route)
        return (y if t.x.dim() == 4 else unviewed(y.view(t.x.shape)),), {}

    @staticmethod
    def needed(t: Any, intermediates: dict[str, Any], needs_grad: Any) -> dict[str, bool]:
        return {"x": needs_grad.sin or needs_grad.cos}

    @staticmethod
    def gradients(s: dict[str, Any], douts: Any, o: _Options, needs_grad: Any, route: Route) -> dict[str, Any]:
        (dy,), x, sin, cos = douts, s["x"], s["sin"], s["cos"]
        dx = None
        if needs_grad.x:
            dx = rotary_op(_heads(dy), sin, cos, o.rotated, o.interleaved, True, route=route).view(dy.shape)
        if x is None:
            return {"x": dx}
        g, x = (
            aten.rotated_part(_heads(t), sin, o.rotated).to(torch.promote_types(t.dtype, torch.float32))
            for t in (dy, x)
        )
        products = (signed(g * swapped(x, o.interleaved), o.interleaved), sin), (g * x, cos)
        dsin, dcos = (t.sum(2).transpose(1, 2).sum_to_size(table.shape).to(table.dtype) for t, table in products)
        return {"x": dx, "sin": dsin if needs_grad.sin else None, "cos": dcos if needs_grad.cos else None}


def _heads(x: Tensor) -> Tensor:
    """Return x (B, N, heads, d), or a packed qkv (B, N, 3, H, d) with 3 H heads."""
    return x if x.dim() == 4 else x.flatten(2, 3)


def broadcast_tables(rotary: Rotary) -> tuple[Tensor, Tensor]:
    """Return the tables, broadcastable to (B, H, N - P, d)."""
    sin, cos, *_ = rotary
    if sin.dim() < 4:
        sin, cos = (table[(None,) * (4 - table.dim())] for table in (sin, cos))
    return sin, cos


def check_tables(rotary: Rotary, name: str, x: Tensor, shape: tuple[int, ...], instead: str | None = None) -> None:
    """Check `rotary` for q and k of a shape (B, N, H, d), on the device of x, which has that name. instead: the op that
    differentiates tables, if the caller's does not."""
    if not isinstance(rotary, Rotary):
        raise TypeError(f"rotary must be an ops.Rotary, got {type(rotary).__name__}")
    sin, cos, prefix, _ = rotary
    B, N, H, d = shape
    wanted = B, H, N - prefix, d
    for of, table in (("rotary.sin", sin), ("rotary.cos", cos)):
        check_like(name, x, (of, table, None, ""), dtype=False)
        check_float(of, table)
        got = (1,) * (4 - table.dim()) + tuple(table.shape)
        if not 2 <= table.dim() <= 4 or got[2:] != wanted[2:] or got[0] not in (1, B) or got[1] not in (1, H):
            raise ValueError(
                f"{of} must broadcast to (B, H, N - P, d) = {wanted} in B and H, with P = num_prefix_tokens = "
                f"{prefix}, got {tuple(table.shape)}"
            )
    if sin.shape != cos.shape:
        raise ValueError(f"rotary.cos must have the shape of rotary.sin {tuple(sin.shape)}, got {tuple(cos.shape)}")
    if instead is not None and torch.is_grad_enabled() and (sin.requires_grad or cos.requires_grad):
        raise ValueError(f"rotary must not require a gradient: it is not differentiated here; see {instead}")


def rotary(x: Tensor, rotary: Rotary) -> Tensor:
    """Compute x * cos + turned(x) * sin for the tokens after the prefix, rounded once, for q or k of rotary attention.

    Args:
        x: (B, N, H, d), float32, float16, bfloat16 or float64, any strides. d is a multiple of 8 from 16 to 256.
        rotary: the tables, differentiated like x; their dtype may differ from x's.

    Returns:
        (B, N, H, d), contiguous, x's dtype.

    Raises:
        TypeError, ValueError: naming the argument, for dtypes, devices and shapes that do not fit.
    """
    op = "rotary"
    out: Tensor = run(op, _prepared, (x, rotary), (op,))
    return out


def rotary_qkvpacked(qkv: Tensor, rotary: Rotary) -> Tensor:
    """Apply `rotary` to q and k of a packed qkv, in one pass; copy v.

    Args:
        qkv: (B, N, 3, H, d), as a qkv projection leaves it; dtypes, strides and d as in `rotary`.
        rotary: the tables, as in `rotary`.

    Returns:
        (B, N, 3, H, d), contiguous, qkv's dtype, for `attention_qkvpacked`.

    Raises:
        TypeError, ValueError: as `rotary`.
    """
    op = "rotary_qkvpacked"
    out: Tensor = run(op, _prepared, (qkv, rotary), (op,))
    return out


def _prepared(x: Tensor, rotary: Rotary, op: str) -> Prepared:
    name, shape, packed = ("x", "B, N, H, d", False) if op == "rotary" else ("qkv", "B, N, 3, H, d", True)
    check_dimensions(name, x, shape)
    B, N, *_, H, d = x.shape
    check_head_dim("head_dim", d)
    check_tables(rotary, name, x, (B, N, H, d))
    autograd = needs_autograd(op, x, rotary.sin, rotary.cos)
    return _Rotary, autograd, _Options(op, 2 * H if packed else H, rotary.interleaved), (x, *broadcast_tables(rotary))
