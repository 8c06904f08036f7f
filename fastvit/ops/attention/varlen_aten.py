"""Softmax attention for sequences of several lengths on PyTorch's own functions: one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from fastvit.ops.attention.aten import attention_bwd, attention_fwd
from fastvit.ops.runtime.dtypes import stat_dtype


def attention_varlen_fwd(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, seed: Tensor | None, max_seqlen: int, scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = q.new_empty(q.shape[0] * q.shape[1], dtype=stat_dtype(q))
    for tensors, of_sequence, its_seed in _sequences(cu_seqlens, max_seqlen, seed, lse, q, k, v, o):
        its_q, its_k, its_v, out = tensors
        out[:], of_sequence[:] = attention_fwd(its_q, its_k, its_v, None, its_seed, scale, dropout_p)
    return o, lse


def attention_varlen_bwd(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, o: Tensor, lse: Tensor, seed: Tensor | None,
    max_seqlen: int, scale: float, dropout_p: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    gradients = tuple([torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v)])
    for tensors, of_sequence, its_seed in _sequences(cu_seqlens, max_seqlen, seed, lse, do, q, k, v, o, *gradients):
        its_do, its_q, its_k, its_v, its_o, *out = tensors
        attention_bwd(its_do, its_q, its_k, its_v, None, its_o, of_sequence, its_seed, scale, dropout_p, out=out)
    return gradients


def _sequences(
    cu_seqlens: Tensor, max_seqlen: int, seed: Tensor | None, lse: Tensor, *tensors: Tensor
) -> Iterator[tuple[list[Tensor], Tensor, Tensor | None]]:
    """Yield each sequence's parts (1, N, H, d) of the tensors (T, H, d) and (1, H, N) of lse, and a seed."""
    ends = cu_seqlens.tolist()
    T, H, _ = tensors[0].shape
    if ends[0] != 0 or ends[-1] != T or ends != sorted(ends):
        raise ValueError(f"cu_seqlens must ascend from 0 to the number of tokens {T}, got {ends}")
    if (longest := max(end - first for first, end in pairwise(ends))) > max_seqlen:
        raise ValueError(f"max_seqlen must be at least the longest sequence's length {longest}, got {max_seqlen}")
    for i, (first, end) in enumerate(pairwise(ends)):
        if first < end:
            of_sequence = lse[first * H : end * H].view(1, H, end - first)
            yield [t[None, first:end] for t in tensors], of_sequence, None if seed is None else seed + i
