"""The registered attention ops: ATen path, fakes, and the Triton launches of _attention_forward/_backward.py.

Tokens come before heads, (B, N, H, d), as the QKV projection writes them. `lse` is (B, H, N), natural logarithm,
float32 (float64 for float64 input), on both paths.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fastvit.ops import _library
from fastvit.ops._library import register, stat_dtype

if _library.HAVE_TRITON:
    from fastvit.ops._attention_backward import launch_backward
    from fastvit.ops._attention_forward import launch_forward

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

_CHUNK = 1 << 24  # scores held at once where ATen materialises them

# PyTorch's CPU kernel compares a row's scores in SIMD vectors of up to 16 floats, and the rest in a way that drops NaN:
# of fewer keys than a vector a row of NaN would come out as zero.
_VECTOR = 16


# ---- ATen ----


def _has_flash(dropout_p: float, *tensors: Tensor) -> bool:
    """Whether PyTorch's CPU flash kernel takes these inputs; it reads by stride but wants unit stride within a head."""
    return dropout_p == 0.0 and tensors[0].is_cpu and all([t.stride(3) == 1 for t in tensors])


def _fwd_aten(
    q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None, scale: float, dropout_p: float
) -> tuple[Tensor, Tensor]:
    return _fwd_heads_first(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), seed, scale, dropout_p)


def _fwd_packed_aten(qkv: Tensor, seed: Tensor | None, scale: float, dropout_p: float) -> tuple[Tensor, Tensor]:
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
    return _fwd_heads_first(q, k, v, seed, scale, dropout_p)


def _fwd_heads_first(
    q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None, scale: float, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """q, k, v (B, H, N, d) -> o (B, N, H, d), lse"""
    B, H, N, d = q.shape
    if N >= _VECTOR and q.numel() and _has_flash(dropout_p, q, k, v):
        o, lse = _flash(q, k, v, scale=scale)
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


def _bwd_aten(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    seed: Tensor | None,
    scale: float,
    dropout_p: float,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Writes dq, dk, dv (B, N, H, d), which may be views of one packed buffer."""
    if q.shape[1] == 1 and seed is None:  # softmax over one key is constant: its gradient has no rounding errors
        dq.zero_()
        dk.zero_()
        dv.copy_(do)
        return
    if q.numel() and _has_flash(dropout_p, do, q, k, v):
        gradients = _flash_backward(*(t.transpose(1, 2) for t in (do, q, k, v, o)), lse, 0.0, False, scale=scale)
        for out, gradient in zip((dq, dk, dv), gradients, strict=True):
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


# ---- registered ops: one pair for three tensors, one for the packed tensor ----


def _fwd_triton(
    q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None, scale: float, dropout_p: float
) -> tuple[Tensor, Tensor]:
    return launch_forward(q, k, v, seed, scale, dropout_p)


def _bwd_triton(*args: Any) -> None:
    launch_backward(*args)


def _separate(write: Any) -> Any:
    """The backward op for separate tensors from a function that writes into given gradients."""

    def run(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
        write(do, q, k, v, *rest, dq, dk, dv)
        return dq, dk, dv

    return run


def _packed(write: Any) -> Any:
    """The same for the packed tensor: dq, dk and dv are written into one buffer."""

    def run(do: Tensor, qkv: Tensor, *rest: Any) -> Tensor:
        dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
        write(do, *qkv.unbind(2), *rest, *dqkv.unbind(2))
        return dqkv

    return run


def _fwd_packed(forward: Any) -> Any:
    def run(qkv: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return forward(*qkv.unbind(2), *rest)

    return run


def _fwd_fake(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    B, N, H, _d = q.shape
    return q.new_empty(q.shape), q.new_empty((B, H, N), dtype=stat_dtype(q))


def _fwd_flops(q: Any, *_: Any, **__: Any) -> int:
    B, N, H, d = q
    return 4 * B * H * N * N * d


def _fwd_packed_flops(qkv: Any, *_: Any, **__: Any) -> int:
    return _fwd_flops((*qkv[:2], *qkv[3:]))


def _bwd_flops(do: Any, *_: Any, **__: Any) -> int:
    return _fwd_flops(do) * 5 // 2


attention_fwd = register(
    "attention_fwd(Tensor q, Tensor k, Tensor v, Tensor? seed, float scale, float dropout_p) -> (Tensor o, Tensor lse)",
    aten=_fwd_aten,
    triton=_fwd_triton,
    fake=_fwd_fake,
    flops=_fwd_flops,
)
attention_bwd = register(
    "attention_bwd(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor? seed, float scale,"
    " float dropout_p) -> (Tensor dq, Tensor dk, Tensor dv)",
    aten=_separate(_bwd_aten),
    triton=_separate(_bwd_triton),
    fake=_separate(lambda *_: None),
    flops=_bwd_flops,
)
attention_qkvpacked_fwd = register(
    "attention_qkvpacked_fwd(Tensor qkv, Tensor? seed, float scale, float dropout_p) -> (Tensor o, Tensor lse)",
    aten=_fwd_packed_aten,
    triton=_fwd_packed(_fwd_triton),
    fake=_fwd_packed(_fwd_fake),
    flops=_fwd_packed_flops,
)
attention_qkvpacked_bwd = register(
    "attention_qkvpacked_bwd(Tensor do, Tensor qkv, Tensor o, Tensor lse, Tensor? seed, float scale, float dropout_p)"
    " -> Tensor",
    aten=_packed(_bwd_aten),
    triton=_packed(_bwd_triton),
    fake=_packed(lambda *_: None),
    flops=_bwd_flops,
)
