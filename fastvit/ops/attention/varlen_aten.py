"""Softmax attention for sequences of several lengths on PyTorch's own functions: one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from fastvit.ops.attention.aten import attention_bwd, attention_fwd
from fastvit.ops.runtime.device import is_fake
from fastvit.ops.runtime.dtypes import stat_dtype


def attention_varlen_fwd(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, cu_seqlens_k: Tensor | None, seed: Tensor | None,
    max_seqlen: int, max_seqlen_k: int, scale: float, dropout_p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = q.new_empty(q.shape[0] * q.shape[1], dtype=stat_dtype(q))
    sequences = _sequences(cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k, seed, lse, (q, o), (k, v))
    for (its_q, out), (its_k, its_v), of_sequence, its_seed in sequences:
        out[:], of_sequence[:] = attention_fwd(its_q, its_k, its_v, None, its_seed, scale, dropout_p)
    return o, lse


def attention_varlen_bwd(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, cu_seqlens_k: Tensor | None, o: Tensor,
    lse: Tensor, seed: Tensor | None, max_seqlen: int, max_seqlen_k: int, scale: float, dropout_p: float, *,
    out: Sequence[Tensor] | None = None,
) -> Sequence[Tensor]:  # fmt: skip
    dq, dk, dv = out or [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v)]
    of_q, of_k = (do, q, o, dq), (k, v, dk, dv)
    sequences = _sequences(cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k, seed, lse, of_q, of_k)
    for (its_do, its_q, its_o, to_q), (its_k, its_v, *to_k), of_sequence, its_seed in sequences:
        tensors = its_do, its_q, its_k, its_v, None, its_o, of_sequence, its_seed
        attention_bwd(*tensors, scale, dropout_p, out=(to_q, *to_k))
    return dq, dk, dv


def attention_varlen_qkvpacked_fwd(
    qkv: Tensor, cu_seqlens: Tensor, seed: Tensor | None, max_seqlen: int, scale: float, dropout_p: float
) -> tuple[Tensor, Tensor]:
    q, k, v = qkv.unbind(1)
    return attention_varlen_fwd(q, k, v, cu_seqlens, None, seed, max_seqlen, max_seqlen, scale, dropout_p)


def attention_varlen_qkvpacked_bwd(
    do: Tensor, qkv: Tensor, cu_seqlens: Tensor, o: Tensor, lse: Tensor, seed: Tensor | None, max_seqlen: int,
    scale: float, dropout_p: float,
) -> Tensor:  # fmt: skip
    dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    (q, k, v), out = qkv.unbind(1), dqkv.unbind(1)
    lengths = max_seqlen, max_seqlen
    attention_varlen_bwd(do, q, k, v, cu_seqlens, None, o, lse, seed, *lengths, scale, dropout_p, out=out)
    return dqkv


def _sequences(
    cu_seqlens: Tensor, cu_seqlens_k: Tensor | None, max_seqlen: int, max_seqlen_k: int, seed: Tensor | None,
    lse: Tensor, of_q: Sequence[Tensor], of_k: Sequence[Tensor],
) -> Iterator[tuple[list[Tensor], list[Tensor], Tensor, Tensor | None]]:  # fmt: skip
    """Yield each sequence's parts (1, N, H, d) of q's tensors (T, H, d), of those of k, and (1, H, N) of lse, and a
    seed."""
    T, H, _ = of_q[0].shape
    if is_fake(cu_seqlens):  # the longest sequence needs the memory of all
        N, keys = min(max_seqlen, T), min(max_seqlen_k, of_k[0].shape[0])
        yield [t[None, :N] for t in of_q], [t[None, :keys] for t in of_k], lse[: N * H].view(1, H, N), seed
        return
    ends = ends_k = checked_ends("", cu_seqlens, max_seqlen, T)
    if cu_seqlens_k is not None:
        ends_k = checked_ends("_k", cu_seqlens_k, max_seqlen_k, of_k[0].shape[0])
    for i, ((first, end), (first_k, end_k)) in enumerate(zip(pairwise(ends), pairwise(ends_k), strict=True)):
        if first < end or first_k < end_k:
            of_sequence = lse[first * H : end * H].view(1, H, end - first)
            parts = [t[None, first:end] for t in of_q], [t[None, first_k:end_k] for t in of_k]
            yield *parts, of_sequence, None if seed is None else seed + i


def checked_ends(which: str, cu_seqlens: Tensor, max_seqlen: int, T: int) -> list[int]:
    """Check the values of cu_seqlens; return them. which: "_k" for those of k."""
    ends: list[int] = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] != T or ends != sorted(ends):
        raise ValueError(f"cu_seqlens{which} must ascend from 0 to the number of tokens {T}, got {ends}")
    if (longest := max(end - first for first, end in pairwise(ends))) > max_seqlen:
        raise ValueError(
            f"max_seqlen{which} must be at least the longest sequence's length {longest}, got {max_seqlen}"
        )
    return ends
