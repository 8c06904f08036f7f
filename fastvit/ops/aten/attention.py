"""Softmax attention on PyTorch's own functions: its CPU flash kernel, or the formula in chunks of the batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from fastvit.ops._checks import is_added, lse_shape, unexpanded
from fastvit.ops._library import stat_dtype
from fastvit.ops._private import flash_attention, flash_attention_backward

_FLASH = flash_attention is not None and flash_attention_backward is not None
_CHUNK = 1 << 24  # scores held at once where ATen materialises them

# PyTorch's CPU kernel compares a row's scores in SIMD vectors of up to 16 floats, and the rest in a way that drops NaN:
# of fewer keys than a vector a row of NaN would come out as zero.
_VECTOR = 16

# Its backward pass makes P of a float32 LSE, which loses the logarithm of the sum where a mask makes all scores of a
# row huge: at this size P is off by 2^-16, at 1e9 by a factor of N.
_LSE = 256.0


def attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None, scale: float, dropout_p: float
) -> tuple[Tensor, Tensor]:
    if k.shape != q.shape:
        k, v = _for_all_heads(k, q), _for_all_heads(v, q)
    return _forward(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, seed, scale, dropout_p)


def attention_qkvpacked_fwd(
    qkv: Tensor, mask: Tensor | None, seed: Tensor | None, scale: float, dropout_p: float
) -> tuple[Tensor, Tensor]:
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
    return _forward(q, k, v, mask, seed, scale, dropout_p)


def attention_bwd(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, o: Tensor, lse: Tensor, seed: Tensor | None,
    scale: float, dropout_p: float, *out: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """out: where the three gradients are written instead of room of their own."""
    gradients: Any = out or tuple([torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v)])
    if k.shape == q.shape:
        _backward(do, q, k, v, mask, o, lse, seed, scale, dropout_p, *gradients)
        return gradients
    dq, *of_keys = gradients
    dk, dv = torch.empty_like(q), torch.empty_like(q)
    k, v = _for_all_heads(k, q), _for_all_heads(v, q)
    _backward(do, q, k, v, mask, o, lse, seed, scale, dropout_p, dq, dk, dv)
    for out_of_keys, gradient in zip(of_keys, (dk, dv), strict=True):
        shared = gradient.unflatten(2, (out_of_keys.shape[2], -1))
        out_of_keys.copy_(shared.sum(3, dtype=stat_dtype(q)))
    return gradients


def attention_qkvpacked_bwd(do: Tensor, qkv: Tensor, *rest: Any) -> Tensor:
    dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    arguments: Any = (do, *qkv.unbind(2), *rest, *dqkv.unbind(2))
    _backward(*arguments)
    return dqkv


def attention_mask_bwd(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, o: Tensor, lse: Tensor, seed: Tensor | None,
    scale: float, dropout_p: float,
) -> Tensor:  # fmt: skip
    k, v = _for_all_heads(k, q), _for_all_heads(v, q)
    dmask = torch.zeros(mask.shape, dtype=lse.dtype, device=mask.device)
    for chunk, drop in _chunks(q, seed, dropout_p):
        p, dp, *_ = _probabilities(do, q, k, v, mask, scale, chunk)
        dp.mul_(1.0 if drop is None else drop)
        ds = dp.sub_((p * dp).sum(-1, keepdim=True)).mul_(p)
        of_mask = dmask[chunk if mask.shape[0] > 1 else slice(None)]
        of_mask += ds.sum_to_size(of_mask.shape)
    return dmask.to(mask.dtype)


def _for_all_heads(x: Tensor, q: Tensor) -> Tensor:
    """k or v (B, N, heads, d), repeated for all heads of q that share one."""
    return x if x.shape[2] == q.shape[2] else x.repeat_interleave(q.shape[2] // x.shape[2], 2)


def _has_flash(seed: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether PyTorch's CPU flash kernel takes these inputs; it reads by stride but wants unit stride within a head."""
    if seed is not None or not q.is_cpu or q.numel() == 0 or not _FLASH:
        return False
    return q.stride(3) == k.stride(3) == v.stride(3) == 1


def _split(scale: float, q: Tensor) -> tuple[float, float]:
    """A factor for q and the power of two that is left of the scale. PyTorch's kernel scales scores after their product
    in its forward pass, and within it in its backward pass: but for powers of two these differ by roundings of the
    score, in float32 up to 9 times the error of softmax and its gradient. Next to 16 bits that does not show."""
    factor, exponent = math.frexp(scale)
    if abs(factor) in (0.0, 0.5) or q.dtype in (torch.bfloat16, torch.float16):
        return 1.0, scale
    return factor, math.ldexp(1.0, exponent)


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What a mask adds to the scores."""
    mask = unexpanded(mask)
    if mask.dtype is not torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None, scale: float, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """q, k, v (B, H, N, d) -> o (B, N, H, d), lse"""
    B, H, N, d = q.shape
    if N >= _VECTOR and _has_flash(seed, q, k, v):
        added = None if mask is None else _added(mask, stat_dtype(q))
        factor, scale = _split(scale, q)
        o, lse = flash_attention(q if factor == 1.0 else q * factor, k, v, attn_mask=added, scale=scale)
        lse = torch.stack((lse, torch.ones_like(lse)), 2) if is_added(mask) else lse.contiguous()
        return o.transpose(1, 2).contiguous().detach(), lse  # no view, as in aten.linear
    o = q.new_empty((B, N, H, d))
    lse = q.new_empty(lse_shape(o, mask), dtype=stat_dtype(q))
    for chunk, drop in _chunks(o, seed, dropout_p):
        qc, kc, vc = (t[chunk].to(lse.dtype) for t in (q, k, v))
        p, top, total = _softmax(_scores(qc, kc, mask, scale, chunk), mask)
        if mask is not None:  # where a query may look at no key: exp(scores - inf) = 0
            total.masked_fill_(total == 0.0, torch.inf)
        lse[chunk] = torch.stack((top, total), 2) if is_added(mask) else top + total.log()
        if drop is not None:
            p *= drop
        o[chunk] = (p @ vc).transpose(1, 2)
    return o, lse


def _softmax(scores: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """softmax(scores), in place, the maxima, and the sums of exp(scores - maximum); zeros in rows all of minus
    infinity, which only a mask makes."""
    top = scores.amax(-1)
    if mask is not None:
        top.masked_fill_(top == -torch.inf, 0.0)
    p = scores.sub_(top[..., None]).exp_()
    total = p.sum(-1)
    divisor = total if mask is None else total.masked_fill(total == 0.0, 1.0)
    return p.div_(divisor[..., None]), top, total


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, scale: float, chunk: slice) -> Tensor:
    scores = (q @ k.transpose(2, 3)).mul_(scale)
    if mask is None:
        return scores
    mask = mask[chunk] if mask.shape[0] > 1 else mask
    return scores.masked_fill_(~mask, -torch.inf) if mask.dtype is torch.bool else scores.add_(mask)


def _backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, o: Tensor, lse: Tensor, seed: Tensor | None,
    scale: float, dropout_p: float, dq: Tensor, dk: Tensor, dv: Tensor,
) -> None:  # fmt: skip
    """Writes dq, dk, dv (B, N, H, d), which may be views of one packed buffer."""
    if q.shape[1] == 1 and seed is None and mask is None:
        # softmax over one key is constant: its gradient has no rounding errors
        dq.zero_()
        dk.zero_()
        dv.copy_(do)
        return
    chunks: Iterable[tuple[slice, Tensor | None]]
    if _has_flash(seed, q, k, v) and do.stride(3) == 1:
        lse = lse[:, :, 0] + lse[:, :, 1].log() if is_added(mask) else lse
        factor, power = _split(scale, q)
        scaled = q if factor == 1.0 else q * factor
        tensors = (t.transpose(1, 2) for t in (do, scaled, k, v, o))
        added = None if mask is None else _added(mask, stat_dtype(q))
        found = flash_attention_backward(*tensors, lse, 0.0, False, attn_mask=added, scale=power)
        if factor != 1.0:
            found[0].mul_(factor)
        for out, gradient in zip((dq, dk, dv), found, strict=True):
            out.copy_(gradient.transpose(1, 2))
        chunks = _samples_of_huge_scores(lse) if is_added(mask) else ()
    else:
        chunks = _chunks(o, seed, dropout_p)
    for chunk, drop in chunks:
        p, dp, doc, qc, kc = _probabilities(do, q, k, v, mask, scale, chunk)
        dropped = p
        if drop is not None:
            dp *= drop
            dropped = p * drop
        dv[chunk] = (dropped.transpose(2, 3) @ doc).transpose(1, 2)
        ds = dp.sub_(_delta(do, o, chunk)).mul_(p).mul_(scale)
        dq[chunk] = (ds @ kc).transpose(1, 2)
        dk[chunk] = (ds.transpose(2, 3) @ qc).transpose(1, 2)


def _samples_of_huge_scores(lse: Tensor) -> list[tuple[slice, None]]:
    huge = ((lse.abs() > _LSE) & lse.isfinite()).flatten(1).any(1)
    return [(slice(i, i + 1), None) for i in huge.nonzero().flatten().tolist()]


def _probabilities(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, chunk: slice
) -> tuple[Tensor, ...]:
    """P and dO V^T of a part of the batch, (b, H, N, N); its dO, q and k, (b, H, N, d)."""
    qc, kc, vc, doc = (t[chunk].transpose(1, 2).to(stat_dtype(q)) for t in (q, k, v, do))
    p, *_ = _softmax(_scores(qc, kc, mask, scale, chunk), mask)
    return p, doc @ vc.transpose(2, 3), doc, qc, kc


def _delta(do: Tensor, o: Tensor, chunk: slice) -> Tensor:
    """rowsum(dO * O) (b, H, N, 1) of a part of the batch."""
    doc, oc = (t[chunk].transpose(1, 2).to(stat_dtype(o)) for t in (do, o))
    return (doc * oc).sum(-1, keepdim=True)


def _chunks(x: Tensor, seed: Tensor | None, dropout_p: float) -> Iterator[tuple[slice, Tensor | None]]:
    """Parts of the batch of x (B, N, H, d) that hold few enough scores, each with its dropout factors (b, H, N, N): 0
    or 1 / (1 - p). The same seed gives the same factors."""
    if x.numel() == 0:
        return
    B, N, H, _ = x.shape
    step = max(_CHUNK // max(H * N * N, 1), 1)
    generator = None if seed is None else torch.Generator(x.device).manual_seed(int(seed))
    for start in range(0, B, step):
        stop = min(start + step, B)
        drop = None
        if generator is not None:
            drop = torch.empty(stop - start, H, N, N, dtype=stat_dtype(x), device=x.device)
            drop.bernoulli_(1.0 - dropout_p, generator=generator).div_(1.0 - dropout_p)
        yield slice(start, stop), drop
