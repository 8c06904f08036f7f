"""Softmax attention of samples on PyTorch's own functions.

PyTorch's CPU flash kernel, where it takes a call, is 1.2 times (197 tokens) to 2.4 times (1,025) as fast as
`reference.ops.attention`, and 1.4 to 2.3 times if that were computed again for the backward pass. Everything else, such
as dropout and gradients of masks, is that formula by blocks of scores, which stay in the cache: dropout at 8 x 197
tokens takes 0.73 of SDPA's time and 0.3 of its memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fastvit.ops.attention.groups import Gradients, Heads, Relative, is_added, lse_shape
from fastvit.ops.runtime.device import is_fake
from fastvit.ops.runtime.dtypes import stat_dtype
from fastvit.ops.runtime.rows import unexpanded
from fastvit.ops.runtime.torch_private import (
    flash_attention,
    flash_attention_backward,
    fused_sdp_choice,
    softmax_backward,
)
from fastvit.reference.ops import relative_bias, visible_scores, visible_softmax

_FLASH = flash_attention is not None and flash_attention_backward is not None
_BYTES = 1 << 20  # size of a block of materialised scores, so that they stay in the cache
_RELATIVE_BYTES = 1 << 23  # the same with relative positions: PyTorch's kernel splits it among the cores

# PyTorch's CPU kernel compares a row's scores in SIMD vectors of up to 16 floats, and the rest in a way that drops NaN:
# with fewer keys than a vector has, a row of NaN would become zero.
_VECTOR = 16

# Its backward pass computes P from a float32 LSE, which loses the logarithm of the sum if a mask makes all scores of a
# row huge: at this size P is off by 2^-16, at 1e9 by a factor of N.
_LSE = 256.0


def _takes_shared_keys() -> bool:
    """Return whether PyTorch's CPU kernel takes k and v with fewer heads than q; 1 means that kernel."""
    q = torch.empty(1, 2, _VECTOR, 16, device="cpu")
    return fused_sdp_choice is not None and fused_sdp_choice(q, q[:, :1], q[:, :1], enable_gqa=True) == 1


_SHARED = _takes_shared_keys()


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None, scale: float, dropout_p: float,
    causal: bool = False, relative: Relative | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute attention of q (B, M, H, d), k and v. Return o and LSE as the registered op does. relative: of q, k and v
    with as many heads, without a mask, dropout and causal order."""
    has_flash = k.shape[1] >= _VECTOR and _has_flash(seed, q, k, v, mask, causal)
    if has_flash and relative is not None:
        return _forward_relative(q, k, v, relative, scale)
    if has_flash:
        added = None if mask is None else as_added(mask, stat_dtype(q))
        factor, scale = _split(scale, q)
        scaled = q if factor == 1.0 else q * factor
        qt, kt, vt = scaled.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        o, lse = flash_attention(qt, kt, vt, 0.0, causal, attn_mask=added, scale=scale)
        lse = torch.stack((lse, torch.ones_like(lse)), 2) if is_added(mask) else lse.contiguous()
        return o.transpose(1, 2).contiguous().detach(), lse  # no view, as in aten.linear
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = q.new_empty(lse_shape(o, mask, None), dtype=stat_dtype(q))
    words = None if seed is None else _dropout_words(q, k, seed)
    for at, keys, parts in _blocks(q, k):
        qb, kb, vb = _heads(q, at, q) * scale, _heads(k, keys, q), _heads(v, keys, q)
        for rows in parts:
            mask_part = None if mask is None else _part_of_mask(mask, at, rows)
            scores = _scores(qb, kb, mask_part, causal, relative, at, rows)
            p = visible_softmax(scores, empty_rows=_hides_rows(scores, mask_part))
            base, weight = _peaks(scores, p)
            of_lse = lse[(*at, ..., rows)]
            if is_added(mask):
                torch.stack((base, weight.reciprocal()), 2, out=of_lse)
            else:
                torch.sub(base, weight.log(), out=of_lse)
            if words is None:
                ob = p @ vb
            else:
                ob = (p.mul_(_kept(words, at, rows, dropout_p, p.dtype)) @ vb).mul_(1.0 / (1.0 - dropout_p))
            o[at[0], rows, at[1]] = ob.transpose(1, 2)
    return o, lse


def _forward_relative(q: Tensor, k: Tensor, v: Tensor, relative: Relative, scale: float) -> tuple[Tensor, Tensor]:
    """Call PyTorch's kernel for each block of scores, so that only the bias of one is in memory at a time."""
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = q.new_empty(lse_shape(q, None, None), dtype=stat_dtype(q))
    for at, _, parts in _blocks(q, k, _RELATIVE_BYTES):
        kb, vb = (t[at[0], :, at[1]].transpose(1, 2) for t in (k, v))
        for rows in parts:
            qb, bias = q[at[0], rows, at[1]].transpose(1, 2), _bias_of(relative, at, rows, lse.dtype)
            ob, lse[(*at, rows)] = flash_attention(qb, kb, vb, attn_mask=bias, scale=scale)
            o[at[0], rows, at[1]] = ob.transpose(1, 2)
    return o, lse


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, o: Tensor, lse: Tensor, seed: Tensor | None,
    scale: float, dropout_p: float, causal: bool = False, relative: Relative | None = None, *,
    wants_mask: bool = False, out: Heads | None = None,
) -> Gradients:  # fmt: skip
    """Compute the gradients; that of a float mask if it is wanted. out: three tensors to write those of q, k and v to,
    instead of new ones."""
    if k.shape[1] == 1 and seed is None and mask is None and relative is None:
        return Gradients(*_written(gradients_of_one_key(do, q, k, v), out))
    if relative is not None or wants_mask or not has_flash_backward(do, q, k, v, mask, seed, causal):
        gradients = out or empty_gradients(q, k, v)
        return _backward(do, q, k, v, mask, seed, scale, dropout_p, causal, relative, gradients, wants_mask)
    lse = lse[:, :, 0] + lse[:, :, 1].log() if is_added(mask) else lse
    factor, power = _split(scale, q)
    scaled = q if factor == 1.0 else q * factor
    added = None if mask is None else as_added(mask, stat_dtype(q))
    tensors = [t.transpose(1, 2) for t in (do, scaled, k, v, o)]
    found = flash_attention_backward(*tensors, lse, 0.0, causal, attn_mask=added, scale=power)
    if factor != 1.0:
        found[0].mul_(factor)
    written = _written([t.transpose(1, 2) for t in found], out)
    if mask is not None and is_added(mask):
        for i in _samples_of_huge_scores(lse):
            one = slice(i, i + 1)
            mask_part = mask[one] if mask.shape[0] > 1 else mask
            each = do[one], q[one], k[one], v[one], mask_part, None
            dq, dk, dv = written
            _backward(*each, scale, 0.0, causal, None, (dq[one], dk[one], dv[one]))
    return Gradients(*written)


def gradients_of_one_key(do: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv. The softmax over one key is constant: no gradient, not even one of rounding errors."""
    of_head = do.unflatten(2, (v.shape[2], do.shape[2] // max(v.shape[2], 1)))
    dv = of_head.sum((1, 3), dtype=stat_dtype(q)).to(v.dtype)[:, None]
    return q.new_zeros(q.shape), k.new_zeros(k.shape), dv


def empty_gradients(*tensors: Tensor) -> Any:
    """Return a contiguous tensor for each."""
    return tuple([torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in tensors])


def zero_without_queries(q: Tensor, *gradients: Tensor) -> None:
    """Fill the gradients of keys and values with zeros if there is no query, so that nothing else computes them."""
    if q.numel() == 0:
        for gradient in gradients:
            gradient.zero_()


def _written(found: Sequence[Tensor], out: Sequence[Tensor] | None) -> Sequence[Tensor]:
    """Return the gradients contiguous, or copied into `out` if that is given."""
    if out is None:
        return tuple([t.contiguous().detach() for t in found])
    for to, t in zip(out, found, strict=True):
        to.copy_(t)
    return out


def _has_flash(seed: Tensor | None, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> bool:
    """Return whether PyTorch's CPU flash kernel takes these inputs. It reads by stride but wants unit stride in a
    head; of a mask and causal attention it takes one."""
    if not _FLASH or seed is not None or not q.is_cpu or (causal and mask is not None):
        return False
    if q.numel() == 0 or k.numel() == 0:
        return False
    return q.stride(3) == k.stride(3) == v.stride(3) == 1 and (_SHARED or k.shape[2] == q.shape[2])


def has_flash_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None, causal: bool
) -> bool:
    return _has_flash(seed, q, k, v, mask, causal) and do.stride(3) == 1


def _split(scale: float, q: Tensor) -> tuple[float, float]:
    """Split the scale into a factor for q and a power of two. PyTorch's kernel applies the scale after the product in
    its forward pass, and within it in its backward pass. Unless it is a power of two, the two differ by roundings of
    the score: in float32 up to 9 times the error of softmax and its gradient, negligible in 16 bits."""
    factor, exponent = math.frexp(scale)
    if abs(factor) in (0.0, 0.5) or q.dtype in (torch.bfloat16, torch.float16):
        return 1.0, scale
    return factor, math.ldexp(1.0, exponent)


def as_added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what a mask adds to the scores."""
    mask = unexpanded(mask)
    if mask.dtype is not torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def _samples_of_huge_scores(lse: Tensor) -> list[int]:
    huge = ((lse.abs() > _LSE) & lse.isfinite()).flatten(1).any(1)
    return huge.nonzero().flatten().tolist()


# ---- the formula, by blocks: some samples, or some heads of one, or some queries of the heads that share keys ----

_At = tuple[slice, slice]  # samples and heads


def _blocks(q: Tensor, k: Tensor, size: int | None = None) -> Iterator[tuple[_At, _At, list[slice]]]:
    """Yield samples and heads of q, samples and heads of k, and parts of the queries with few enough scores for `size`
    bytes."""
    if q.numel() == 0:
        return
    B, M, H, _ = q.shape
    N = max(k.shape[1], 1)
    shared = H // k.shape[2]
    scores = (size or _BYTES) // stat_dtype(q).itemsize
    parts = _even(M, scores // (shared * N))
    for samples in _even(B, scores // (H * M * N)):
        for heads in _even(k.shape[2], scores // (shared * M * N)):
            yield (samples, slice(heads.start * shared, heads.stop * shared)), (samples, heads), parts
            if is_fake(q):  # one block needs the memory of all
                return


def _even(count: int, most: int) -> list[slice]:
    step = math.ceil(count / math.ceil(count / max(most, 1)))
    return [slice(i, min(i + step, count)) for i in range(0, count, step)]


def _heads(x: Tensor, at: _At, q: Tensor) -> Tensor:
    """Return a block of x (B, N, heads, d) as (b, heads of q, N, d). It is contiguous where matmuls would copy it each
    time: they read several samples, or several heads, by stride, but not both."""
    part = x[at[0], :, at[1]].transpose(1, 2).to(stat_dtype(q))
    if x.shape[2] != q.shape[2]:
        return part.repeat_interleave(q.shape[2] // x.shape[2], 1)
    return part if 1 in part.shape[:2] else part.contiguous()


def _part_of_mask(mask: Tensor, at: _At, rows: slice) -> Tensor:
    return mask[tuple([part if n > 1 else slice(None) for part, n in zip((*at, rows), mask.shape, strict=False)])]


def _bias_of(relative: Relative, at: _At, rows: slice, dtype: torch.dtype) -> Tensor:
    """Return what relative positions add to the scores of samples, heads and queries: (b, heads, queries, keys)."""
    return relative_bias(*[t[at[0], rows, at[1]].to(dtype) for t in relative])


def _scores(
    q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, relative: Relative | None, at: _At, rows: slice
) -> Tensor:
    """Return what softmax gets, (b, heads, queries, keys), for some queries of scaled q."""
    scores = q[:, :, rows] @ k.transpose(2, 3)
    if relative is not None:
        mask = _bias_of(relative, at, rows, q.dtype)
    if causal:
        query, key = (torch.arange(n, device=q.device) for n in (q.shape[2], k.shape[2]))
        scores = visible_scores(scores, key <= query[rows, None])
    return visible_scores(scores, mask)


def _hides_rows(scores: Tensor, mask: Tensor | None) -> bool:
    """Return whether a mask hides all keys of a row. The mask often has fewer elements than the scores, so asking it
    first is cheap, and filling rows costs as much as softmax."""
    if mask is None or scores.shape[-1] == 0:
        return False
    if is_fake(scores):  # which have no values; filling needs the most memory
        return True
    may_hide = mask.dtype is torch.bool or bool((mask <= torch.finfo(scores.dtype).min / 2).any())
    return may_hide and bool((scores.amax(-1) == -torch.inf).any())


def _peaks(scores: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's largest score and its weight, (b, H, rows): zeros for a row whose keys are all hidden."""
    if scores.shape[-1] == 0:
        nothing = scores.new_zeros(scores.shape[:-1])
        return nothing, nothing
    score = scores.amax(-1)
    return score.masked_fill(score == -torch.inf, 0.0), p.amax(-1)


def _backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None, scale: float,
    dropout_p: float, causal: bool, relative: Relative | None, gradients: Heads, wants_mask: bool = False,
) -> Gradients:  # fmt: skip
    """Write dq, dk and dv; return all gradients."""
    zero_without_queries(q, *gradients[1:])
    dmask = None
    if mask is not None and wants_mask:
        alone = mask.shape[:3] == (q.shape[0], q.shape[2], q.shape[1])
        dmask = torch.zeros(mask.shape, dtype=mask.dtype if alone else stat_dtype(q), device=mask.device)
    words, of_relative = None if seed is None else _dropout_words(q, k, seed), empty_gradients(*relative or ())
    for at, keys, parts in _blocks(q, k, None if relative is None else _RELATIVE_BYTES):
        qb, kb, vb, dob = _heads(q, at, q) * scale, _heads(k, keys, q), _heads(v, keys, q), _heads(do, at, q)
        if words is not None:
            dob = dob * (1.0 / (1.0 - dropout_p))
        of_keys: tuple[Tensor, ...] = ()
        for rows in parts:
            kept = None if words is None else _kept(words, at, rows, dropout_p, qb.dtype)
            mask_part = None if mask is None else _part_of_mask(mask, at, rows)
            scores = _scores(qb, kb, mask_part, causal, relative, at, rows)
            p = visible_softmax(scores, empty_rows=_hides_rows(scores, mask_part))
            del scores
            dp = dob[:, :, rows] @ vb.transpose(2, 3)
            dropped = p
            if kept is not None:
                dp.mul_(kept)
                dropped = kept.mul_(p)
            ds = _softmax_backward(dp, p)
            if dmask is not None:
                dmask_part = _part_of_mask(dmask, at, rows)
                dmask_part += ds.sum_to_size(dmask_part.shape)
            for i, of_positions in enumerate(of_relative):  # sums over columns, then over rows
                grid = ds.unflatten(3, (of_relative[0].shape[3], of_relative[1].shape[3]))
                of_positions[at[0], rows, at[1]] = grid.sum(4 - i).transpose(1, 2)
            gradients[0][at[0], rows, at[1]] = (ds @ kb).mul_(scale).transpose(1, 2)
            terms = ds.transpose(2, 3) @ qb[:, :, rows], dropped.transpose(2, 3) @ dob[:, :, rows]
            of_keys = (of_keys[0].add_(terms[0]), of_keys[1].add_(terms[1])) if of_keys else terms
        for out, total in zip(gradients[1:], of_keys, strict=True):
            if k.shape[2] != q.shape[2]:
                total = total.unflatten(1, (-1, q.shape[2] // k.shape[2])).sum(2, dtype=stat_dtype(q))
            out[keys[0], :, keys[1]] = total.transpose(1, 2)
    found = Gradients(*gradients, *of_relative)
    return found if dmask is None or mask is None else found._replace(mask=dmask.to(mask.dtype))


def _softmax_backward(dp: Tensor, p: Tensor) -> Tensor:
    """Return p * (dp - rowsum(p * dp)), written over dp."""
    if softmax_backward is None:
        return dp.sub_((p * dp).sum(-1, keepdim=True)).mul_(p)
    softmax_backward(dp, p, -1, p.dtype, grad_input=dp)
    return dp


# ---- dropout: a number for each weight from its indices alone, so that it does not depend on the blocks ----


def _dropout_words(q: Tensor, k: Tensor, seed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Draw random int32 numbers (B, H, M) twice for each query, and (B, H, N) for each key."""
    B, M, H, _ = q.shape
    generator = torch.Generator(q.device).manual_seed(int(seed))
    words = torch.empty(B, H, 2 * M + k.shape[1], dtype=torch.int32, device=q.device)
    query, again, key = words.random_(-(2**31), 2**31, generator=generator).split((M, M, k.shape[1]), 2)
    return query, again, key


def _kept(words: tuple[Tensor, Tensor, Tensor], at: _At, rows: slice, dropout_p: float, dtype: torch.dtype) -> Tensor:
    """Return 1 where a weight is kept, else 0. Two rounds of xor-shift and multiply, as in the kernels, take a CPU a
    fifth of bernoulli_'s time, and run in parallel."""
    query, again, key = (w[at].unsqueeze(-1) for w in words)
    x = query[:, :, rows] ^ key.transpose(2, 3)
    x.bitwise_xor_(x >> 16).mul_(0x7FEB352D)
    x.bitwise_xor_(x >> 15).bitwise_xor_(again[:, :, rows]).mul_(0x846CA68B - 2**32)
    kept = torch.empty(x.shape, dtype=dtype, device=x.device)
    return torch.ge(x, min(round(dropout_p * 2**32), 2**32 - 1) - 2**31, out=kept)
