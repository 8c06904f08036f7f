"""Softmax attention, non-causal: registration, gradients, checks, public functions."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from fastvit.ops import _decompositions
from fastvit.ops._checks import check_dropout, check_float, check_head_dim, check_like
from fastvit.ops._library import (
    FusedFunction,
    autocast_dtype,
    differentiable_once,
    needs_autograd,
    register,
    repeats_as_views,
    stat_dtype,
)
from fastvit.ops.aten import attention as aten
from fastvit.ops.dropout import draw_seeds

# ---- registered ops: one pair for three tensors, one for the packed tensor ----
#
# Tokens come before heads, (B, N, H, d), as the QKV projection writes them. `lse` is (B, H, N), natural logarithm,
# float32 (float64 for float64 input), on both paths.


def _fwd_fake(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    B, N, H, _d = q.shape
    return q.new_empty(q.shape), q.new_empty((B, H, N), dtype=stat_dtype(q))


def _bwd_fake(do: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple([t.new_empty(t.shape) for t in inputs[:3]])


def _fwd_flops(q: Any, *_: Any, **__: Any) -> int:
    B, N, H, d = q
    return 4 * B * H * N * N * d


def _bwd_flops(do: Any, *_: Any, **__: Any) -> int:
    return _fwd_flops(do) * 5 // 2


attention_fwd = register(
    "attention_fwd(Tensor q, Tensor k, Tensor v, Tensor? seed, float scale, float dropout_p) -> (Tensor o, Tensor lse)",
    aten=aten.attention_fwd, launch="attention", fake=_fwd_fake, flops=_fwd_flops,
    decomposition=_decompositions.attention_fwd,
)  # fmt: skip
attention_bwd = register(
    "attention_bwd(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor? seed, float scale,"
    " float dropout_p) -> (Tensor dq, Tensor dk, Tensor dv)",
    aten=aten.attention_bwd, launch="attention", fake=_bwd_fake, flops=_bwd_flops,
)  # fmt: skip
attention_qkvpacked_fwd = register(
    "attention_qkvpacked_fwd(Tensor qkv, Tensor? seed, float scale, float dropout_p) -> (Tensor o, Tensor lse)",
    aten=aten.attention_qkvpacked_fwd, launch="attention", fake=lambda qkv, *_: _fwd_fake(qkv.select(2, 0)),
    flops=lambda qkv, *_, **__: _fwd_flops((*qkv[:2], *qkv[3:])),
    decomposition=_decompositions.attention_qkvpacked_fwd,
)  # fmt: skip
attention_qkvpacked_bwd = register(
    "attention_qkvpacked_bwd(Tensor do, Tensor qkv, Tensor o, Tensor lse, Tensor? seed, float scale, float dropout_p)"
    " -> Tensor",
    aten=aten.attention_qkvpacked_bwd, launch="attention", fake=lambda do, qkv, *_: qkv.new_empty(qkv.shape),
    flops=_bwd_flops,
)  # fmt: skip


# ---- gradients ----


class _Attention(FusedFunction):
    """Inputs: q, k and v, or the packed qkv; then seed, scale, dropout_p."""

    @staticmethod
    def forward(*inputs: Any) -> Any:
        return attention_fwd(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, seed, ctx.scale, ctx.dropout_p = inputs
        ctx.save_for_backward(*tensors, *output, seed)
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, *_: Any) -> tuple[Any, ...]:
        if do is None:
            return (None,) * 6
        arguments = do, *ctx.saved_tensors, ctx.scale, ctx.dropout_p
        return *differentiable_once("attention", attention_bwd, *arguments), None, None, None


class _AttentionQkvPacked(_Attention):
    @staticmethod
    def forward(*inputs: Any) -> Any:
        return attention_qkvpacked_fwd(*inputs)

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, *_: Any) -> tuple[Any, ...]:
        if do is None:
            return (None,) * 4
        arguments = do, *ctx.saved_tensors, ctx.scale, ctx.dropout_p
        return differentiable_once("attention_qkvpacked", attention_qkvpacked_bwd, *arguments), None, None, None


# ---- public functions ----


def checked_scale(head_dim: int, scale: float | None, dropout_p: float) -> float:
    """Checks the three; -> the scale."""
    if head_dim % 8 or not 16 <= head_dim <= 256:  # not `takes_head_dim`, without its call
        check_head_dim("head_dim", head_dim)
    if dropout_p != 0.0:
        check_dropout("dropout_p", dropout_p)
    if scale is None:
        return head_dim**-0.5
    if not -math.inf < scale < math.inf:  # isfinite takes no symbolic float
        raise ValueError(f"scale must be finite, got {scale}")
    return float(scale)


def attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, dropout_p: float = 0.0) -> Tensor:
    """dropout(softmax(scale * q k^T)) v per batch and head, non-causal, in O(N) memory (Dao et al. 2022).

    Args:
        q, k, v: (B, N, H, d) each, one dtype: float32, float16, bfloat16 or float64; any strides, read in place if the
            last dimension is contiguous. d is a multiple of 8 from 16 to 256.
        scale: of the scores; d^-0.5 if None.
        dropout_p: probability of dropping an attention weight, in [0, 1). The mask follows torch.manual_seed, is not
            stored, and is drawn again in the backward pass; the Triton and the ATen path draw different ones.

    Returns:
        (B, N, H, d), contiguous, q's dtype; under autocast its dtype. float64, and dropout on the CPU, need O(N^2)
        memory. A NaN in one row of q makes that row NaN and no other.

    Raises:
        TypeError, ValueError: naming the argument, for dtypes, devices, shapes and values that do not fit.
    """
    check_float("q", q)
    cast = autocast_dtype(q)
    if q.dim() != 4:
        raise ValueError(f"q must have shape (B, N, H, d), got {tuple(q.shape)}")
    for name, t in (("k", k), ("v", v)):
        check_like("q", q, (name, t, None, ""), dtype=cast is None)
        if t.shape != q.shape:
            raise ValueError(f"{name} must have q's shape {tuple(q.shape)}, got {tuple(t.shape)}")
    scale = checked_scale(q.shape[3], scale, dropout_p)
    if cast is not None:
        q, k, v = q.to(cast), k.to(cast), v.to(cast)
    seed = draw_seeds(1, q.device) if dropout_p > 0.0 else None
    if needs_autograd("attention", q, k, v):
        return _Attention.apply(*repeats_as_views(q, k, v), seed, scale, dropout_p)[0]
    return attention_fwd(q, k, v, seed, scale, dropout_p)[0]


def attention_qkvpacked(qkv: Tensor, *, scale: float | None = None, dropout_p: float = 0.0) -> Tensor:
    """`attention` of q, k, v = qkv.unbind(2), read in place; the gradient is one packed tensor.

    Args:
        qkv: (B, N, 3, H, d), as a qkv projection leaves it; dtypes, strides and d as in `attention`.
        scale, dropout_p: as in `attention`.

    Returns:
        (B, N, H, d), contiguous, as `attention`; view it as (B, N, H * d) for the output projection.

    Raises:
        TypeError, ValueError: as `attention`.
    """
    check_float("qkv", qkv)
    if qkv.dim() != 5 or qkv.shape[2] != 3:
        raise ValueError(f"qkv must have shape (B, N, 3, H, d), got {tuple(qkv.shape)}")
    scale = checked_scale(qkv.shape[4], scale, dropout_p)
    cast = autocast_dtype(qkv)
    if cast is not None:
        qkv = qkv.to(cast)
    seed = draw_seeds(1, qkv.device) if dropout_p > 0.0 else None
    if needs_autograd("attention_qkvpacked", qkv):
        return _AttentionQkvPacked.apply(qkv, seed, scale, dropout_p)[0]
    return attention_qkvpacked_fwd(qkv, seed, scale, dropout_p)[0]
