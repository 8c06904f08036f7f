"""Softmax attention: registration, gradients, checks, public functions."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastvit.ops.attention import aten
from fastvit.ops.attention.aten import lse_shape
from fastvit.ops.attention.relative import (
    AttentionRelative,
    Relative,
    RelativeOptions,
    check_alone,
    check_relative,
    fwd_flops,
)
from fastvit.ops.dropout.op import draw_seeds
from fastvit.ops.runtime import decompositions
from fastvit.ops.runtime.autograd import Computed, FusedNode, inputs, needs_autograd
from fastvit.ops.runtime.backend import Path
from fastvit.ops.runtime.checks import check_dropout, check_float, check_head_dim, check_like
from fastvit.ops.runtime.dtypes import autocast_dtype, stat_dtype
from fastvit.ops.runtime.registry import register
from fastvit.ops.runtime.run import Prepared, run

# ---- registered ops: one pair for three tensors, one for the packed tensor ----
#
# Tokens come before heads, as the QKV projection writes them: q is (B, M, H, d), k and v are (B, N, H or fewer, d).
# `mask` is (B or 1, H or 1, M or 1, N). `causal`: query i sees keys 0 to i only. `lse` is (B, H, M), natural logarithm,
# float32 (float64 for float64 input), on both paths; for a query that sees no key, a number for which exp(-inf - lse)
# is 0. With a float mask it is (B, H, 2, M), numbers a and b of P = exp(S - a) / b: at an LSE of -1e9, as padding has,
# one number would lose log(b).


def _fwd_fake(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(lse_shape(q, mask), dtype=stat_dtype(q))


def _bwd_fake(do: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple([t.new_empty(t.shape) for t in inputs[:3]])


def _bwd_flops(do: Any, q: Any, k: Any, *_: Any, **__: Any) -> int:
    return fwd_flops(q, k) * 5 // 2


def _packed_bwd_flops(do: Any, *_: Any, **__: Any) -> int:
    return fwd_flops(do, do) * 5 // 2


attention_fwd = register(
    "attention_fwd(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? seed, float scale, float dropout_p,"
    " bool causal=False) -> (Tensor o, Tensor lse)",
    aten=aten.attention_fwd, launch="attention.launch", fake=_fwd_fake, flops=fwd_flops,
    decomposition=decompositions.attention_fwd,
)  # fmt: skip
attention_bwd = register(
    "attention_bwd(Tensor do, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor o, Tensor lse, Tensor? seed,"
    " float scale, float dropout_p, bool causal=False) -> (Tensor dq, Tensor dk, Tensor dv)",
    aten=aten.attention_bwd, launch="attention.launch", fake=_bwd_fake, flops=_bwd_flops,
)  # fmt: skip
attention_qkvpacked_fwd = register(
    "attention_qkvpacked_fwd(Tensor qkv, Tensor? mask, Tensor? seed, float scale, float dropout_p, bool causal=False)"
    " -> (Tensor o, Tensor lse)",
    aten=aten.attention_qkvpacked_fwd,
    launch="attention.launch",
    fake=lambda qkv, *rest: _fwd_fake(*qkv.unbind(2), *rest),
    flops=lambda qkv, *_, **__: fwd_flops((*qkv[:2], *qkv[3:]), qkv),
    decomposition=decompositions.attention_qkvpacked_fwd,
)
attention_qkvpacked_bwd = register(
    "attention_qkvpacked_bwd(Tensor do, Tensor qkv, Tensor? mask, Tensor o, Tensor lse, Tensor? seed, float scale,"
    " float dropout_p, bool causal=False) -> Tensor",
    aten=aten.attention_qkvpacked_bwd,
    launch="attention.launch",
    fake=lambda do, qkv, *_: qkv.new_empty(qkv.shape),
    flops=_packed_bwd_flops,
)
# Backward with the gradient of a float mask: one kernel computes the statistics that the others read, and ATen computes
# the weights once for all four.
attention_bwd_with_mask = register(
    "attention_bwd_with_mask(Tensor do, Tensor q, Tensor k, Tensor v, Tensor mask, Tensor o, Tensor lse, Tensor? seed,"
    " float scale, float dropout_p, bool causal=False) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dmask)",
    aten=aten.attention_bwd_with_mask,
    launch="attention.mask_launch",
    fake=lambda do, q, k, v, mask, *_: (*_bwd_fake(do, q, k, v), mask.new_empty(mask.shape)),
    flops=_bwd_flops,
)
attention_qkvpacked_bwd_with_mask = register(
    "attention_qkvpacked_bwd_with_mask(Tensor do, Tensor qkv, Tensor mask, Tensor o, Tensor lse, Tensor? seed,"
    " float scale, float dropout_p, bool causal=False) -> (Tensor dqkv, Tensor dmask)",
    aten=aten.attention_qkvpacked_bwd_with_mask,
    launch="attention.mask_launch",
    fake=lambda do, qkv, mask, *_: (qkv.new_empty(qkv.shape), mask.new_empty(mask.shape)),
    flops=_packed_bwd_flops,
)


# ---- gradients ----


class AttentionOptions(NamedTuple):
    op: str
    scale: float
    dropout_p: float
    causal: bool
    cast: torch.dtype | None  # autocast's dtype


_Inputs = inputs("q", "k", "v", "mask", "seed")


class _Attention(FusedNode):
    Inputs = _Inputs
    casts = ("q", "k", "v")
    keeps = ("lse",)
    saves = ("q", "k", "v", "mask", "seed", "result", "lse")

    @staticmethod
    def compute(t: Any) -> Computed:
        o, path, *tensors = t
        out, lse = attention_fwd(*tensors, o.scale, o.dropout_p, o.causal, path=path)
        return (out,), {"lse": lse}

    @staticmethod
    def gradients(s: dict[str, Any], douts: Any, o: AttentionOptions, wants: Any, path: Path) -> dict[str, Any]:
        q, k, v, mask, seed, out, lse = s.values()
        arguments = *douts, q, k, v, mask, out, lse, seed, o.scale, o.dropout_p, o.causal
        if wants.mask:
            dq, dk, dv, dmask = attention_bwd_with_mask(*arguments, path=path)
            return {"q": dq, "k": dk, "v": dv, "mask": dmask}
        dq, dk, dv = attention_bwd(*arguments, path=path)
        return {"q": dq, "k": dk, "v": dv}


_PackedInputs = inputs("qkv", "mask", "seed")


class _AttentionQkvPacked(FusedNode):
    Inputs = _PackedInputs
    casts = ("qkv",)
    keeps = ("lse",)
    saves = ("qkv", "mask", "seed", "result", "lse")

    @staticmethod
    def compute(t: Any) -> Computed:
        o = t.options
        out, lse = attention_qkvpacked_fwd(t.qkv, t.mask, t.seed, o.scale, o.dropout_p, o.causal, path=t.path)
        return (out,), {"lse": lse}

    @staticmethod
    def gradients(s: dict[str, Any], douts: Any, o: AttentionOptions, wants: Any, path: Path) -> dict[str, Any]:
        qkv, mask, seed, out, lse = s.values()
        arguments = *douts, qkv, mask, out, lse, seed, o.scale, o.dropout_p, o.causal
        if wants.mask:
            dqkv, dmask = attention_qkvpacked_bwd_with_mask(*arguments, path=path)
            return {"qkv": dqkv, "mask": dmask}
        return {"qkv": attention_qkvpacked_bwd(*arguments, path=path)}


# ---- public functions ----


def checked_scale(head_dim: int, scale: float | None, dropout_p: float) -> float:
    """Check the three; return the scale."""
    check_head_dim("head_dim", head_dim)
    if dropout_p != 0.0:
        check_dropout("dropout_p", dropout_p)
    if scale is None:
        return head_dim**-0.5
    if not -math.inf < scale < math.inf:  # isfinite takes no symbolic float
        raise ValueError(f"scale must be finite, got {scale}")
    return float(scale)


def _check_keys(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check the shapes of k and v when they differ from q's."""
    B, M, H, d = q.shape
    N, heads = k.shape[1:3] if k.dim() == 4 else (0, 0)
    if k.shape != (B, N, heads, d) or heads == 0 or H % heads:
        raise ValueError(
            f"k must have shape (B, N, H, d) with q's B, d, and H or a divisor of it, got {tuple(k.shape)} for q's "
            f"{tuple(q.shape)}"
        )
    if N == 0 and M > 0:
        raise ValueError(f"k must have a token for q's {M} to attend to, got {tuple(k.shape)}")
    if v.shape != k.shape:
        raise ValueError(f"v must have k's shape {tuple(k.shape)}, got {tuple(v.shape)}")


def check_causal(is_causal: Any) -> None:
    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal must be a bool, got {is_causal!r}")


def check_unmasked(attn_mask: Tensor | None = None, is_causal: bool = False, *, of: str) -> None:
    """Check that there is no mask in a call with several sequences."""
    if attn_mask is not None or is_causal:
        raise ValueError(f"attn_mask must be None and is_causal False with {of}")


def check_mask(
    mask: Any, x_name: str, x: Tensor, batch: int, tokens: int, heads: int, keys: int | None = None,
    batch_name: str = "B",
) -> None:  # fmt: skip
    """Check a mask for x. keys: how many there are, or None for as many as x has tokens. batch_name: what the first
    dimension is called in an error."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"attn_mask must be a tensor or None, got {type(mask).__name__}")
    if mask.dtype is not torch.bool:
        check_float("attn_mask", mask)
    if mask.device != x.device:
        raise ValueError(f"attn_mask must be on {x_name}'s device {x.device}, got {mask.device}")
    full = batch, heads, tokens, tokens if keys is None else keys
    shape = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    if len(shape) != 4 or any(have not in (1, want) for have, want in zip(shape, full, strict=True)):
        sides = "N, N" if keys is None else "M, N"
        raise ValueError(
            f"attn_mask must be broadcastable to ({batch_name}, H, {sides}) = {full}, got {tuple(mask.shape)}"
        )


def broadcast_mask(mask: Tensor, keys: int) -> Tensor:
    """Return a mask as (B or 1, H or 1, M or 1, N), N the number of keys."""
    return mask[(None,) * (4 - mask.dim())].expand(-1, -1, -1, keys)


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, is_causal: bool = False,
    relative: Relative | None = None, scale: float | None = None, dropout_p: float = 0.0, layout: str = "bnhd",
) -> Tensor:  # fmt: skip
    """Compute dropout(softmax(scale * q k^T + attn_mask)) v for q (B, M, H, d), k and v (B, N, H, d): tokens before
    heads. PyTorch's `scaled_dot_product_attention` takes heads before tokens: that is layout="bhnd". Takes O(M + N)
    memory in addition to the mask (Dao et al. 2022).

    Args:
        q: (B, M, H, d); float32, float16, bfloat16 or float64; any strides, read in place if the last dimension is
            contiguous. d is a multiple of 8 from 16 to 256.
        k, v: (B, N, H, d), as q, or with fewer heads; each then serves H / heads neighbouring heads of q (Ainslie et
            al. 2023, arXiv:2305.13245). N may differ from M: cross-attention (Vaswani et al. 2017, section 3.2.3).
        attn_mask: broadcastable to (B, H, M, N), or None. bool: True where a query sees a key. Any floating dtype:
            added to the scaled scores; it may require a gradient. The mask is read in place and never expanded. The
            output of a query that sees no key is zero. Only False and minus infinity hide a key: if all keys of a row
            have finite numbers, however low, the weights are the softmax of the float32 sums.
        is_causal: query i sees keys 0 to i only, of those that attn_mask lets it see. Needs no mask in memory.
        relative: relative positions of keys on a grid, or None. Their sums, the size of the scores, are never in memory
            at once. Takes none of the other options but scale, and k and v with as many heads as q.
        scale: factor of the scores; d^-0.5 if None.
        dropout_p: probability of dropping an attention weight, in [0, 1). The dropout mask follows torch.manual_seed;
            it is not stored but drawn again in the backward pass. The Triton and the ATen path draw different masks.
        layout: "bnhd" for the shapes above, or "bhnd" for q (B, H, M, d), k, v (B, H, N, d) and a result like q, read
            and written by stride; attn_mask stays as it is.

    Returns:
        (B, M, H, d), contiguous, q's dtype; under autocast autocast's. A NaN in one row of q makes that row NaN and no
        other.

    Raises:
        TypeError, ValueError: naming the argument, for dtypes, devices, shapes and values that do not fit.
    """
    if relative is not None:
        check_alone(attn_mask=attn_mask, is_causal=is_causal, dropout_p=dropout_p, layout=layout)
        found: Tensor = run("attention", _prepared_relative, (q, k, v, relative), (scale,))
        return found
    if layout != "bnhd":
        return _heads_first(layout, q, k, v, attn_mask, is_causal, scale, dropout_p)
    out: Tensor = run("attention", _prepared, (q, k, v, attn_mask), (is_causal, scale, dropout_p))
    return out


def _heads_first(
    layout: str, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None,
    dropout_p: float,
) -> Tensor:  # fmt: skip
    if layout != "bhnd":
        raise ValueError(f"layout must be 'bnhd' or 'bhnd', got {layout!r}")
    for name, t in (("q", q), ("k", k), ("v", v)):
        check_float(name, t)
        if t.dim() != 4:
            raise ValueError(f"{name} must have shape (B, H, N, d), got {tuple(t.shape)}")
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale, dropout_p=dropout_p)
    return out.transpose(1, 2)


def _checked(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None, dropout_p: float
) -> AttentionOptions:
    """Check a call; return its options."""
    check_float("q", q)
    cast = autocast_dtype(q)
    if q.dim() != 4:
        raise ValueError(f"q must have shape (B, M, H, d), got {tuple(q.shape)}")
    check_like("q", q, ("k", k, None, ""), ("v", v, None, ""), dtype=cast is None)
    if k.shape != q.shape or v.shape != q.shape:
        _check_keys(q, k, v)
    scale = checked_scale(q.shape[3], scale, dropout_p)
    check_causal(is_causal)
    if attn_mask is not None:
        check_mask(attn_mask, "q", q, q.shape[0], q.shape[1], q.shape[2], k.shape[1])
    return AttentionOptions("attention", scale, dropout_p, is_causal, cast)


def _prepared(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None, dropout_p: float
) -> Prepared:
    options = _checked(q, k, v, attn_mask, is_causal, scale, dropout_p)
    autograd = needs_autograd("attention", q, k, v, attn_mask)
    return _Attention, autograd, options, (q, k, v, *_mask_and_seed(attn_mask, dropout_p, k, k.shape[1]))


def _mask_and_seed(
    attn_mask: Tensor | None, dropout_p: float, x: Tensor, keys: int
) -> tuple[Tensor | None, Tensor | None]:
    """Return the mask as the ops take it, and a seed on x's device if there is dropout."""
    mask = None if attn_mask is None else broadcast_mask(attn_mask, keys)
    return mask, draw_seeds(1, x.device) if dropout_p > 0.0 else None


def _prepared_relative(q: Tensor, k: Tensor, v: Tensor, relative: Relative, scale: float | None) -> Prepared:
    _, scale, *_, cast = _checked(q, k, v, None, False, scale, 0.0)
    check_relative(relative, q, k, dtype=cast is None)
    autograd = needs_autograd("attention", q, k, v, *relative)
    return AttentionRelative, autograd, RelativeOptions("attention", scale, cast), (q, k, v, *relative)


def attention_qkvpacked(
    qkv: Tensor, *, attn_mask: Tensor | None = None, is_causal: bool = False, scale: float | None = None,
    dropout_p: float = 0.0,
) -> Tensor:  # fmt: skip
    """Compute `attention` of q, k, v = qkv.unbind(2), read in place. The gradient is one packed tensor.

    Args:
        qkv: (B, N, 3, H, d), as a qkv projection leaves it; dtypes, strides and d as in `attention`.
        attn_mask, is_causal, scale, dropout_p: as in `attention`.

    Returns:
        (B, N, H, d), contiguous, as from `attention`; view it as (B, N, H * d) for the output projection.

    Raises:
        TypeError, ValueError: as `attention`.
    """
    out: Tensor = run("attention_qkvpacked", _prepared_packed, (qkv, attn_mask), (is_causal, scale, dropout_p))
    return out


def _prepared_packed(
    qkv: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None, dropout_p: float
) -> Prepared:
    check_float("qkv", qkv)
    if qkv.dim() != 5 or qkv.shape[2] != 3:
        raise ValueError(f"qkv must have shape (B, N, 3, H, d), got {tuple(qkv.shape)}")
    scale = checked_scale(qkv.shape[4], scale, dropout_p)
    check_causal(is_causal)
    if attn_mask is not None:
        check_mask(attn_mask, "qkv", qkv, qkv.shape[0], qkv.shape[1], qkv.shape[3])
    options = AttentionOptions("attention_qkvpacked", scale, dropout_p, is_causal, autocast_dtype(qkv))
    autograd = needs_autograd("attention_qkvpacked", qkv, attn_mask)
    return _AttentionQkvPacked, autograd, options, (qkv, *_mask_and_seed(attn_mask, dropout_p, qkv, qkv.shape[1]))
