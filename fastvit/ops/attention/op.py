"""The registered ops of softmax attention and their autograd node. The public functions are in functions.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastvit.ops.attention import aten, plain
from fastvit.ops.attention.groups import LastArguments, flops, groups_of, lse_shape, unpacked
from fastvit.ops.runtime.autograd import Computed, FusedNode, inputs
from fastvit.ops.runtime.backend import Route
from fastvit.ops.runtime.dtypes import stat_dtype
from fastvit.ops.runtime.registry import register

# Tokens come before heads, as the QKV projection writes them. q is (B, M, H, d); of sequences (T, H, d), of a grid
# (B, gh, gw, H, d). k and v are alike, with N tokens, and H heads or fewer. If they are None, q holds all three:
# (..., 3, H, d). `mask` is (B or 1, H or 1, M or 1, N). Of windows, which are counted row by row in the rolled grid, B
# is how many a sample has; of sequences it is 1, and M and N are the longest ones'. `causal`: query i sees keys 0 to i
# only. The last arguments are `LastArguments`.
#
# o is like q. `lse` is the natural logarithm, float32 (float64 for float64 input), on both routes; for a query that
# sees no key, a number for which exp(-inf - lse) is 0. With a float mask it is two numbers a and b of
# P = exp(S - a) / b: at an LSE of -1e9, as padding has, one number would lose log(b). Where a window lies outside of
# the grid, it is that of zeros, or inf.
#
# Gradients of k and v are None if q holds all three; those of rows and columns if there are none; that of a float mask
# unless it is wanted. out= are three tensors to write those of q, k and v to.
_LAST_ARGUMENTS = (
    "Tensor? rows=None, Tensor? columns=None, Tensor? ends=None, Tensor? ends_k=None, SymInt max_seqlen=0,"
    " SymInt max_seqlen_k=0, SymInt[] window=[], SymInt[] shift=[], float shift_bias=0.0"
)


def _fwd_fake(
    q: Tensor, k: Tensor | None, v: Tensor | None, mask: Tensor | None, seed: Tensor | None, scale: float,
    dropout_p: float, causal: bool = False, *last: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q, *_ = unpacked(q, k, v)
    shape = lse_shape(q, mask, groups_of(q, LastArguments(*last)))
    return q.new_empty(q.shape), q.new_empty(shape, dtype=stat_dtype(q))


def _bwd_fake(
    do: Tensor, q: Tensor, k: Tensor | None, v: Tensor | None, mask: Tensor | None, o: Tensor, lse: Tensor,
    seed: Tensor | None, scale: float, dropout_p: float, causal: bool = False, wants_mask: bool = False,
    rows: Tensor | None = None, columns: Tensor | None = None, *_: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    return q, k, v, rows, columns, mask if wants_mask else None


def _bwd_flops(
    do: Any, q: Any, k: Any, v: Any, mask: Any, o: Any, lse: Any, seed: Any, scale: float, dropout_p: float,
    causal: bool = False, wants_mask: bool = False, *last: Any, **__: Any,
) -> int:  # fmt: skip
    return flops(q, k, v, mask, seed, scale, dropout_p, causal, *last) * 5 // 2


attention_fwd = register(
    "attention_fwd(Tensor q, Tensor? k, Tensor? v, Tensor? mask, Tensor? seed, float scale, float dropout_p,"
    f" bool causal=False, {_LAST_ARGUMENTS}) -> (Tensor o, Tensor lse)",
    aten=aten.attention_fwd, fake=_fwd_fake, flops=flops,
    plain=plain.attention_fwd,
)  # fmt: skip
attention_bwd = register(
    "attention_bwd(Tensor do, Tensor q, Tensor? k, Tensor? v, Tensor? mask, Tensor o, Tensor lse, Tensor? seed,"
    f" float scale, float dropout_p, bool causal=False, bool wants_mask=False, {_LAST_ARGUMENTS})"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor drows, Tensor dcolumns, Tensor dmask)",
    aten=aten.attention_bwd, fake=_bwd_fake, flops=_bwd_flops,
)  # fmt: skip


class Options(NamedTuple):
    op: str
    cast: torch.dtype | None  # autocast's dtype
    scale: float
    dropout_p: float
    causal: bool
    max_seqlen: int = 0  # this and the rest as in `LastArguments`
    max_seqlen_k: int = 0
    window: tuple[int, ...] = ()
    shift: tuple[int, ...] = ()
    shift_bias: float = 0.0


_TENSORS = "q", "k", "v", "mask", "seed", "rows", "columns", "ends", "ends_k"
_Inputs = inputs(*_TENSORS)


class Attention(FusedNode):
    Inputs = _Inputs
    casts = ("q", "k", "v", "rows", "columns")
    intermediates = ("lse",)
    saved = (*_TENSORS, "result", "lse")

    @staticmethod
    def compute(t: Any) -> Computed:
        o = t.options
        given = t.q, t.k, t.v, t.mask, t.seed, o.scale, o.dropout_p, o.causal
        out, lse = attention_fwd(*given, *_last_arguments(t, o), route=t.route)
        return (out,), {"lse": lse}

    @staticmethod
    def gradients(s: dict[str, Any], douts: Any, o: Options, needs_grad: Any, route: Route) -> dict[str, Any]:
        *tensors, out, lse = s.values()
        t = _Inputs(o, route, *tensors)
        saved = t.q, t.k, t.v, t.mask, out, lse, t.seed
        numbers = o.scale, o.dropout_p, o.causal, needs_grad.mask
        found = attention_bwd(*douts, *saved, *numbers, *_last_arguments(t, o), route=route)
        of = "q", "k", "v", "rows", "columns", "mask"
        return {name: gradient for name, gradient in zip(of, found, strict=True) if getattr(needs_grad, name)}


def _last_arguments(t: Any, o: Options) -> tuple[Any, ...]:
    """Return what follows the other arguments: nothing for samples without relative positions."""
    if t.ends is None and t.rows is None and not o.window:
        return ()
    return LastArguments(
        t.rows, t.columns, t.ends, t.ends_k, o.max_seqlen, o.max_seqlen_k, o.window, o.shift, o.shift_bias
    )
