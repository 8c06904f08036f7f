"""Softmax attention on PyTorch's own functions: its CPU flash kernel, or the formula in chunks of the batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fastvit.ops._library import stat_dtype
from fastvit.ops._private import flash_attention, flash_attention_backward

_FLASH = flash_attention is not None and flash_attention_backward is not None
_CHUNK = 1 << 24  # scores held at once where ATen materialises them

# PyTorch's CPU kernel compares a row's scores in SIMD vectors of up to 16 floats, and the rest in a way that drops NaN:
# of fewer keys than a vector a row of NaN would come out as zero.
_VECTOR = 16


def attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None, scale: float, dropout_p: float
) -> tuple[Tensor, Tensor]:
    return _forward(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), seed, scale, dropout_p)


def attention_qkvpacked_fwd(qkv: Tensor, seed: Tensor | None, scale: float, dropout_p: float) -> tuple[Tensor, Tensor]:
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
    return _forward(q, k, v, seed, scale, dropout_p)


def attention_bwd(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, seed: Tensor | None, scale: float,
    dropout_p: float, *out: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """out: where the three gradients are written instead of room of their own."""
    gradients: Any = out or tuple([torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v)])
    _backward(do, q, k, v, o, lse, seed, scale, dropout_p, *gradients)
    return gradients


def attention_qkvpacked_bwd(do: Tensor, qkv: Tensor, *rest: Any) -> Tensor:
    dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    arguments: Any = (do, *qkv.unbind(2), *rest, *dqkv.unbind(2))
    _backward(*arguments)
    return dqkv


def _has_flash(seed: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether PyTorch's CPU flash kernel takes these inputs; it reads by stride but wants unit stride within a head."""
    if seed is not None or not q.is_cpu or q.numel() == 0 or not _FLASH:
        return False
    return q.stride(3) == k.stride(3) == v.stride(3) == 1


def _forward(
    q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None, scale: float, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """q, k, v (B, H, N, d) -> o (B, N, H, d), lse"""
    B, H, N, d = q.shape
    if N >= _VECTOR and _has_flash(seed, q, k, v):
        o, lse = flash_attention(q, k, v, scale=scale)
        return o.transpose(1, 2).contiguous(), lse.contiguous()
    o = q.new_empty((B, N, H, d))
    lse = q.new_empty((B, H, N), dtype=stat_dtype(q))
    for chunk, drop in _chunks(lse, seed, dropout_p):
        qc, kc, vc = (t[chunk].to(lse.dtype) for t in (q, k, v))
        scores = (qc @ kc.transpose(2, 3)).mul_(scale)
        lse[chunk] = torch.logsumexp(scores, -1)
        p = scores.sub_(lse[chunk][..., None]).exp_()
        if drop is not None:
            p *= drop
        o[chunk] = (p @ vc).transpose(1, 2)
    return o, lse


def _backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, seed: Tensor | None, scale: float,
    dropout_p: float, dq: Tensor, dk: Tensor, dv: Tensor,
) -> None:  # fmt: skip
    """Writes dq, dk, dv (B, N, H, d), which may be views of one packed buffer."""
    if q.shape[1] == 1 and seed is None:  # softmax over one key is constant: its gradient has no rounding errors
        dq.zero_()
        dk.zero_()
        dv.copy_(do)
        return
    if _has_flash(seed, q, k, v) and do.stride(3) == 1:
        found = flash_attention_backward(*(t.transpose(1, 2) for t in (do, q, k, v, o)), lse, 0.0, False, scale=scale)
        for out, gradient in zip((dq, dk, dv), found, strict=True):
            out.copy_(gradient.transpose(1, 2))
        return
    for chunk, drop in _chunks(lse, seed, dropout_p):
        qc, kc, vc, doc, oc = (t[chunk].transpose(1, 2).to(lse.dtype) for t in (q, k, v, do, o))
        p = (qc @ kc.transpose(2, 3)).mul_(scale).sub_(lse[chunk][..., None]).exp_()
        dp = doc @ vc.transpose(2, 3)
        dropped = p
        if drop is not None:
            dp *= drop
            dropped = p * drop
        dv[chunk] = (dropped.transpose(2, 3) @ doc).transpose(1, 2)
        ds = dp.sub_((doc * oc).sum(-1, keepdim=True)).mul_(p).mul_(scale)
        dq[chunk] = (ds @ kc).transpose(1, 2)
        dk[chunk] = (ds.transpose(2, 3) @ qc).transpose(1, 2)


def _chunks(lse: Tensor, seed: Tensor | None, dropout_p: float) -> Iterator[tuple[slice, Tensor | None]]:
    """Parts of the batch of lse (B, H, N) that hold few enough scores, each with its dropout factors (b, H, N, N): 0 or
    1 / (1 - p). The same seed gives the same factors."""
    B, H, N = lse.shape
    step = max(_CHUNK // max(H * N * N, 1), 1)
    generator = None if seed is None else torch.Generator(lse.device).manual_seed(int(seed))
    for start in range(0, B, step):
        stop = min(start + step, B)
        drop = None
        if generator is not None:
            drop = torch.empty(stop - start, H, N, N, dtype=lse.dtype, device=lse.device)
            drop.bernoulli_(1.0 - dropout_p, generator=generator).div_(1.0 - dropout_p)
        yield slice(start, stop), drop
