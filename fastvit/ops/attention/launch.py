"""The Triton route of the registered ops of attention: the tensors of every layout as (B, N, H, d) to the launchers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastvit.ops.attention import mask_launch, relative_launch, softmax_launch
from fastvit.ops.attention.groups import (
    Gradients,
    Groups,
    Heads,
    LastArguments,
    Sequences,
    Windows,
    as_samples,
    groups_of,
    unpacked,
)
from fastvit.ops.runtime.rows import empty_like


def attention_fwd(
    q: Tensor, k: Tensor | None, v: Tensor | None, mask: Tensor | None, seed: Tensor | None, scale: float,
    dropout_p: float, causal: bool = False, *last: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch the forward kernel. All tensors are float32, bfloat16 or float16, and are read by stride, but grids whose
    rows do not follow each other are copied; mask is bool or float; seed int64 [1], or None without dropout.

    Return o, contiguous, and LSE, float32: the maximum of the scores and the sum of exp(scores - maximum) with a float
    mask. Raise `KernelUnsupported` for what kernels cannot take.
    """
    p = LastArguments(*last)
    q, k, v = unpacked(q, k, v)
    groups, shape = groups_of(q, p), q.shape
    several = _without_trivial_window(groups)
    q, k, v = as_samples(q, groups), as_samples(k, groups), as_samples(v, groups)
    if p.rows is None or p.columns is None:
        o, lse = softmax_launch.launch_forward(q, k, v, mask, seed, scale, dropout_p, causal, several)
    else:
        rows, columns = as_samples(p.rows, groups), as_samples(p.columns, groups)
        o, lse = relative_launch.launch_forward(q, k, v, rows, columns, scale, several)
    if groups is None:
        return o, lse
    return o.view(shape).detach(), lse.view(-1) if isinstance(groups, Sequences) else lse  # no view, as in aten.linear


def attention_bwd(
    do: Tensor, q: Tensor, k: Tensor | None, v: Tensor | None, mask: Tensor | None, o: Tensor, lse: Tensor,
    seed: Tensor | None, scale: float, dropout_p: float, causal: bool = False, wants_mask: bool = False,
    *last: Any, out: Heads | None = None,
) -> Gradients:  # fmt: skip
    """Launch the backward kernels. out: three tensors to write the gradients of q, k and v to, instead of new ones."""
    p, packed = LastArguments(*last), empty_like(q) if k is None else None
    q, k, v = unpacked(q, k, v)
    if packed is not None:
        out = unpacked(packed)
    out = out or (empty_like(q), empty_like(k), empty_like(v))
    groups = groups_of(q, p)
    do, q, k, v, o = [as_samples(t, groups) for t in (do, q, k, v, o)]
    given = [as_samples(t, groups) for t in out], _without_trivial_window(groups)
    drows = dcolumns = dmask = None
    if p.rows is not None and p.columns is not None:
        rows, columns = as_samples(p.rows, groups), as_samples(p.columns, groups)
        drows, dcolumns = relative_launch.launch_backward(do, q, k, v, rows, columns, o, lse, scale, *given)
        if groups is not None:
            drows, dcolumns = drows.view(p.rows.shape).detach(), dcolumns.view(p.columns.shape).detach()
    elif mask is not None and wants_mask:
        dmask = mask_launch.launch_backward(do, q, k, v, mask, o, lse, seed, scale, dropout_p, causal, *given)
    else:
        softmax_launch.launch_backward(do, q, k, v, mask, o, lse, seed, scale, dropout_p, causal, *given)
    dq, dk, dv = out if packed is None else (packed, None, None)
    return Gradients(dq, dk, dv, drows, dcolumns, dmask)


def _without_trivial_window(groups: Groups) -> Any:
    """One window over the whole grid is plain attention."""
    return None if isinstance(groups, Windows) and groups.window == groups.grid and not groups.hides else groups
