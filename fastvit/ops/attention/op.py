"""Softmax attention, non-causal: registration, gradients, checks, public functions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fastvit.ops.attention import aten
from fastvit.ops.dropout.op import draw_seeds
from fastvit.ops.runtime import decompositions
from fastvit.ops.runtime.autograd import (
    FusedFunction,
    autocast_dtype,
    differentiable_once,
    needs_autograd,
    repeats_as_views,
    unshared,
)
from fastvit.ops.runtime.checks import check_dropout, check_float, check_head_dim, check_like, lse_shape
from fastvit.ops.runtime.devices import stat_dtype
from fastvit.ops.runtime.registry import register

# ---- registered ops: one pair for three tensors, one for the packed tensor ----
#
# Tokens come before heads, (B, N, H, d), as the QKV projection writes them; k and v may have fewer heads. `mask` is
# (B or 1, H or 1, N or 1, N). `lse` is (B, H, N), natural logarithm, float32 (float64 for float64 input), on both
# paths; for a query that sees no key, a number for which exp(-inf - lse) is 0. With a float mask it is (B, H, 2, N),
# numbers a and b of P = exp(S - a) / b: at an LSE of -1e9, as padding has, one number would lose log(b).


def _fwd_fake(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(lse_shape(q, mask), dtype=stat_dtype(q))


def _bwd_fake(do: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple([t.new_empty(t.shape) for t in inputs[:3]])


def _fwd_flops(q: Any, *_: Any, **__: Any) -> int:
    B, N, H, d = q
    return 4 * B * H * N * N * d


def _bwd_flops(do: Any, *_: Any, **__: Any) -> int:
    return _fwd_flops(do) * 5 // 2


attention_fwd = register(
    "attention_fwd(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? seed, float scale, float dropout_p)"
    " -> (Tensor o, Tensor lse)",
    aten=aten.attention_fwd, launch="attention.launch", planned=True, fake=_fwd_fake, flops=_fwd_flops,
    decomposition=decompositions.attention_fwd,
)  # fmt: skip
attention_bwd = register(
    "attention_bwd(Tensor do, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor o, Tensor lse, Tensor? seed,"
    " float scale, float dropout_p) -> (Tensor dq, Tensor dk, Tensor dv)",
    aten=aten.attention_bwd, launch="attention.launch", planned=True, fake=_bwd_fake, flops=_bwd_flops,
)  # fmt: skip
attention_qkvpacked_fwd = register(
    "attention_qkvpacked_fwd(Tensor qkv, Tensor? mask, Tensor? seed, float scale, float dropout_p)"
    " -> (Tensor o, Tensor lse)",
    aten=aten.attention_qkvpacked_fwd,
    launch="attention.launch",
    planned=True,
    fake=lambda qkv, *rest: _fwd_fake(*qkv.unbind(2), *rest),
    flops=lambda qkv, *_, **__: _fwd_flops((*qkv[:2], *qkv[3:])),
    decomposition=decompositions.attention_qkvpacked_fwd,
)
attention_qkvpacked_bwd = register(
    "attention_qkvpacked_bwd(Tensor do, Tensor qkv, Tensor? mask, Tensor o, Tensor lse, Tensor? seed, float scale,"
    " float dropout_p) -> Tensor",
    aten=aten.attention_qkvpacked_bwd,
    launch="attention.launch",
    planned=True,
    fake=lambda do, qkv, *_: qkv.new_empty(qkv.shape),
    flops=_bwd_flops,
)
# Backward with the gradient of a float mask: one kernel computes the statistics that the others read, and ATen computes
# the weights once for all four.
attention_bwd_with_mask = register(
    "attention_bwd_with_mask(Tensor do, Tensor q, Tensor k, Tensor v, Tensor mask, Tensor o, Tensor lse, Tensor? seed,"
    " float scale, float dropout_p) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dmask)",
    aten=aten.attention_bwd_with_mask,
    launch="attention.mask_launch",
    planned=True,
    fake=lambda do, q, k, v, mask, *_: (*_bwd_fake(do, q, k, v), mask.new_empty(mask.shape)),
    flops=_bwd_flops,
)
attention_qkvpacked_bwd_with_mask = register(
    "attention_qkvpacked_bwd_with_mask(Tensor do, Tensor qkv, Tensor mask, Tensor o, Tensor lse, Tensor? seed,"
    " float scale, float dropout_p) -> (Tensor dqkv, Tensor dmask)",
    aten=aten.attention_qkvpacked_bwd_with_mask,
    launch="attention.mask_launch",
    planned=True,
    fake=lambda do, qkv, mask, *_: (qkv.new_empty(qkv.shape), mask.new_empty(mask.shape)),
    flops=_bwd_flops,
)


# ---- gradients ----


class _Attention(FusedFunction):
    """Inputs: q, k and v, or the packed qkv; then mask, seed, scale, dropout_p."""

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
            return (None,) * 7
        arguments = do, *ctx.saved_tensors, ctx.scale, ctx.dropout_p
        if not ctx.needs_input_grad[3]:
            return *differentiable_once("attention", attention_bwd, *arguments), None, None, None, None
        return *differentiable_once("attention", attention_bwd_with_mask, *arguments), None, None, None


class _AttentionQkvPacked(_Attention):
    @staticmethod
    def forward(*inputs: Any) -> Any:
        return attention_qkvpacked_fwd(*inputs)

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, *_: Any) -> tuple[Any, ...]:
        if do is None:
            return (None,) * 5
        arguments = do, *ctx.saved_tensors, ctx.scale, ctx.dropout_p
        name = "attention_qkvpacked"
        if not ctx.needs_input_grad[1]:
            return differentiable_once(name, attention_qkvpacked_bwd, *arguments), None, None, None, None
        return *differentiable_once(name, attention_qkvpacked_bwd_with_mask, *arguments), None, None, None


# ---- public functions ----


def checked_scale(head_dim: int, scale: float | None, dropout_p: float) -> float:
    """Check the three; return the scale."""
    if head_dim % 8 or not 16 <= head_dim <= 256:  # `takes_head_dim` inline, for speed
        check_head_dim("head_dim", head_dim)
    if dropout_p != 0.0:
        check_dropout("dropout_p", dropout_p)
    if scale is None:
        return head_dim**-0.5
    if not -math.inf < scale < math.inf:  # isfinite takes no symbolic float
        raise ValueError(f"scale must be finite, got {scale}")
    return float(scale)


def _check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check the shapes of k and v when they have fewer heads than q."""
    B, N, H, d = q.shape
    heads = k.shape[2] if k.dim() == 4 else 0
    if k.shape != (B, N, heads, d) or heads == 0 or H % heads:
        raise ValueError(f"k must have q's shape {tuple(q.shape)}, or a divisor of its heads, got {tuple(k.shape)}")
    if v.shape != k.shape:
        raise ValueError(f"v must have k's shape {tuple(k.shape)}, got {tuple(v.shape)}")


def checked_mask(mask: Any, x_name: str, x: Tensor, batch: int, tokens: int, heads: int) -> Tensor:
    """Check a mask; return it as (B or 1, H or 1, N or 1, N)."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"attn_mask must be a tensor or None, got {type(mask).__name__}")
    if mask.dtype is not torch.bool:
        check_float("attn_mask", mask)
    if mask.device != x.device:
        raise ValueError(f"attn_mask must be on {x_name}'s device {x.device}, got {mask.device}")
    full = batch, heads, tokens, tokens
    shape = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    if len(shape) != 4 or any(have not in (1, want) for have, want in zip(shape, full, strict=True)):
        raise ValueError(f"attn_mask must be broadcastable to (B, H, N, N) = {full}, got {tuple(mask.shape)}")
    return mask[(None,) * (4 - mask.dim())].expand(-1, -1, -1, tokens)


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, scale: float | None = None,
    dropout_p: float = 0.0,
) -> Tensor:  # fmt: skip
    """Compute dropout(softmax(scale * q k^T + attn_mask)) v for each sample and head, non-causal, in O(N) memory in
    addition to the mask (Dao et al. 2022).

    Args:
        q: (B, N, H, d); float32, float16, bfloat16 or float64; any strides, read in place if the last dimension is
            contiguous. d is a multiple of 8 from 16 to 256.
        k, v: (B, N, H, d), as q, or with fewer heads; each then serves H / heads neighbouring heads of q (Ainslie et
            al. 2023, arXiv:2305.13245).
        attn_mask: broadcastable to (B, H, N, N), or None. bool: True where a query sees a key. Any floating dtype:
        added
            to the scaled scores; it may require a gradient. The mask is read in place and never expanded. The output of
            a query that sees no key is zero. Only False and minus infinity hide a key: if all keys of a row have finite
            numbers, however low, the weights are the softmax of the float32 sums.
        scale: factor of the scores; d^-0.5 if None.
        dropout_p: probability of dropping an attention weight, in [0, 1). The dropout mask follows torch.manual_seed;
            it is not stored but drawn again in the backward pass. The Triton and the ATen path draw different masks.

    Returns:
        (B, N, H, d), contiguous, q's dtype; under autocast autocast's. A NaN in one row of q makes that row NaN and no
        other.

    Raises:
        TypeError, ValueError: naming the argument, for dtypes, devices, shapes and values that do not fit.
    """
    check_float("q", q)
    cast = autocast_dtype(q)
    if q.dim() != 4:
        raise ValueError(f"q must have shape (B, N, H, d), got {tuple(q.shape)}")
    for name, t in (("k", k), ("v", v)):
        check_like("q", q, (name, t, None, ""), dtype=cast is None)
    if k.shape != q.shape or v.shape != q.shape:
        _check_heads(q, k, v)
    scale = checked_scale(q.shape[3], scale, dropout_p)
    if attn_mask is not None:
        attn_mask = checked_mask(attn_mask, "q", q, q.shape[0], q.shape[1], q.shape[2])
    if cast is not None:
        q, k, v = q.to(cast), k.to(cast), v.to(cast)
    seed = draw_seeds(1, q.device) if dropout_p > 0.0 else None
    if needs_autograd("attention", q, k, v, attn_mask):
        return unshared(_Attention.apply(*repeats_as_views(q, k, v), attn_mask, seed, scale, dropout_p)[0])
    return attention_fwd(q, k, v, attn_mask, seed, scale, dropout_p)[0]


def attention_qkvpacked(
    qkv: Tensor, *, attn_mask: Tensor | None = None, scale: float | None = None, dropout_p: float = 0.0
) -> Tensor:
    """Compute `attention` of q, k, v = qkv.unbind(2), read in place. The gradient is one packed tensor.

    Args:
        qkv: (B, N, 3, H, d), as a qkv projection leaves it; dtypes, strides and d as in `attention`.
        attn_mask, scale, dropout_p: as in `attention`.

    Returns:
        (B, N, H, d), contiguous, as from `attention`; view it as (B, N, H * d) for the output projection.

    Raises:
        TypeError, ValueError: as `attention`.
    """
    check_float("qkv", qkv)
    if qkv.dim() != 5 or qkv.shape[2] != 3:
        raise ValueError(f"qkv must have shape (B, N, 3, H, d), got {tuple(qkv.shape)}")
    scale = checked_scale(qkv.shape[4], scale, dropout_p)
    if attn_mask is not None:
        attn_mask = checked_mask(attn_mask, "qkv", qkv, qkv.shape[0], qkv.shape[1], qkv.shape[3])
    cast = autocast_dtype(qkv)
    if cast is not None:
        qkv = qkv.to(cast)
    seed = draw_seeds(1, qkv.device) if dropout_p > 0.0 else None
    if needs_autograd("attention_qkvpacked", qkv, attn_mask):
        return unshared(_AttentionQkvPacked.apply(qkv, attn_mask, seed, scale, dropout_p)[0])
    return attention_qkvpacked_fwd(qkv, attn_mask, seed, scale, dropout_p)[0]
