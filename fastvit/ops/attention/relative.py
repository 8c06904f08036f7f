"""Softmax attention with decomposed relative positions: registration, gradient, checks."""

# No `annotations` from __future__: pdoc cannot resolve string annotations of a NamedTuple re-exported elsewhere

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastvit.ops.attention import relative_aten as aten
from fastvit.ops.runtime import decompositions
from fastvit.ops.runtime.autograd import Computed, FusedNode, inputs
from fastvit.ops.runtime.backend import Path
from fastvit.ops.runtime.checks import check_like
from fastvit.ops.runtime.dtypes import stat_dtype
from fastvit.ops.runtime.registry import register


class Relative(NamedTuple):
    """Decomposed relative positions (Li et al. 2022, arXiv:2112.01526) of keys on a grid of kh rows and kw columns, one
    row after another: the score of a key in row r and column c gets rows[..., r] + columns[..., c].

    rows, columns: (B, M, H, kh) and (B, M, H, kw) for M queries, read by stride. kh * kw is the number of keys. In
    `attention_windows` they are (B, gh, gw, H, wh) and (B, gh, gw, H, ww): the queries are the tokens of the grid, the
    keys those of the query's window. In SAM and ViTDet they are products of the queries and two learnt tables, so both
    get gradients.
    """

    rows: Tensor
    columns: Tensor


def _fwd_fake(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    B, M, H, _d = q.shape
    return q.new_empty(q.shape), q.new_empty((B, H, M), dtype=stat_dtype(q))


def fwd_flops(q: Any, k: Any, *_: Any, **__: Any) -> int:
    """Count causal attention in full, as PyTorch does."""
    B, M, H, d = q
    return 4 * B * H * M * k[1] * d


# q (B, M, H, d), k and v (B, N, H, d); `lse` (B, H, M) as attention's without a mask
attention_relative_fwd = register(
    "attention_relative_fwd(Tensor q, Tensor k, Tensor v, Tensor rows, Tensor columns, float scale)"
    " -> (Tensor o, Tensor lse)",
    aten=aten.attention_relative_fwd,
    launch="attention.relative_launch",
    fake=_fwd_fake,
    flops=fwd_flops,
    decomposition=decompositions.attention_relative_fwd,
)
attention_relative_bwd = register(
    "attention_relative_bwd(Tensor do, Tensor q, Tensor k, Tensor v, Tensor rows, Tensor columns, Tensor o, Tensor lse,"
    " float scale) -> (Tensor dq, Tensor dk, Tensor dv, Tensor drows, Tensor dcolumns)",
    aten=aten.attention_relative_bwd,
    launch="attention.relative_launch",
    fake=lambda do, *inputs: tuple([t.new_empty(t.shape) for t in inputs[:5]]),
    flops=lambda do, *shapes, **_: fwd_flops(*shapes) * 5 // 2,
)


class RelativeOptions(NamedTuple):
    op: str
    scale: float
    cast: torch.dtype | None  # autocast's dtype


_NAMES = "q", "k", "v", "rows", "columns"
RelativeInputs = inputs(*_NAMES)


class AttentionRelative(FusedNode):
    Inputs = RelativeInputs
    casts = _NAMES
    keeps = ("lse",)
    saves = (*_NAMES, "result", "lse")

    @staticmethod
    def compute(t: Any) -> Computed:
        o, path, *tensors = t
        out, lse = attention_relative_fwd(*tensors, o.scale, path=path)
        return (out,), {"lse": lse}

    @staticmethod
    def gradients(s: dict[str, Any], douts: Any, o: RelativeOptions, wants: Any, path: Path) -> dict[str, Any]:
        return dict(zip(_NAMES, attention_relative_bwd(*douts, *s.values(), o.scale, path=path), strict=True))


def check_relative(relative: Any, q: Tensor, k: Tensor, *, dtype: bool) -> None:
    """Check relative positions for q (B, M, H, d) and k (B, N, H, d). dtype: whether they must have q's."""
    B, M, H, _ = q.shape
    check_tensors(relative, "q", q, {name: ((B, M, H, None), f"(B, M, H, {name})") for name in Relative._fields}, dtype)
    (rows, columns), keys = (t.shape[3] for t in relative), k.shape[1]
    if rows * columns != keys:
        raise ValueError(
            f"relative must have as many rows times columns as k has tokens, {keys}, got {rows} * {columns}"
        )
    if k.shape[2] != q.shape[2]:
        raise ValueError(f"k must have q's {q.shape[2]} heads with relative, got {k.shape[2]}")


def check_tensors(
    relative: Any, x_name: str, x: Tensor, shapes: Mapping[str, tuple[tuple[int | None, ...], str]], dtype: bool
) -> None:
    """Check relative positions for x. shapes: those of the tensors by name, None for any size; and what they mean."""
    if not isinstance(relative, Relative):
        raise TypeError(f"relative must be an ops.Relative or None, got {type(relative).__name__}")
    for name, t in zip(Relative._fields, relative, strict=True):
        check_like(x_name, x, (f"relative.{name}", t, None, ""), dtype=dtype)
        shape, meaning = shapes[name]
        if t.dim() != len(shape) or any(want not in (None, have) for want, have in zip(shape, t.shape, strict=True)):
            sizes = ", ".join(name if size is None else str(size) for size in shape)
            raise ValueError(f"relative.{name} must have shape {meaning} = ({sizes}), got {tuple(t.shape)}")


_ALONE = {"attn_mask": None, "is_causal": False, "shift": (0, 0), "dropout_p": 0.0, "layout": "bnhd"}


def check_alone(**options: Any) -> None:
    """Check that a call has no option that relative positions do not go with."""
    for name, value in options.items():
        allowed = _ALONE[name]
        if value is not allowed and (name == "attn_mask" or value != allowed):
            got = type(value).__name__ if name == "attn_mask" else repr(value)
            raise ValueError(f"{name} must be {allowed!r} with relative, got {got}")
