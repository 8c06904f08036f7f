"""Attention with decomposed relative positions on PyTorch's own functions, by blocks of scores. Only the biases of one
block are in memory at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastvit.ops.attention.aten import (
    _VECTOR,
    _blocks,
    _has_flash,
    _heads,
    _softmax_backward,
    empty_gradients,
    zero_without_queries,
)
from fastvit.ops.runtime.dtypes import stat_dtype
from fastvit.ops.runtime.torch_private import flash_attention

_BYTES = 1 << 23  # size of a block of scores: PyTorch's kernel splits it among the cores


def attention_relative_fwd(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    B, M, H, _ = q.shape
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = q.new_empty((B, H, M), dtype=stat_dtype(q))
    has_flash = k.shape[1] >= _VECTOR and _has_flash(None, q, k, v, None, False)
    for at, _, parts in _blocks(q, k, _BYTES):
        if has_flash:
            kb, vb = (t[at[0], :, at[1]].transpose(1, 2) for t in (k, v))
        else:
            qb, kb, vb = _heads(q, at, q) * scale, _heads(k, at, q), _heads(v, at, q)
        for part in parts:
            to = at[0], part, at[1]
            bias = _bias(rows, columns, to, lse.dtype)
            if has_flash:
                ob, lse[(*at, part)] = flash_attention(q[to].transpose(1, 2), kb, vb, attn_mask=bias, scale=scale)
            else:
                scores = _add_scores(bias, qb[:, :, part], kb)
                lse[(*at, part)] = scores.logsumexp(-1)
                ob = scores.softmax(-1) @ vb
            o[to] = ob.transpose(1, 2)
    return o, lse


def _bias(rows: Tensor, columns: Tensor, to: tuple[slice, slice, slice], dtype: torch.dtype) -> Tensor:
    """Return the bias of samples, queries and heads: (b, heads, queries, keys)."""
    of_rows, of_columns = (t[to].transpose(1, 2).to(dtype).contiguous() for t in (rows, columns))
    return (of_rows.unsqueeze(4) + of_columns.unsqueeze(3)).flatten(3)


def _add_scores(bias: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Add q k^T to the bias, in place. All of it is contiguous."""
    bias.flatten(0, 1).baddbmm_(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2))
    return bias


def attention_relative_bwd(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor, o: Tensor, lse: Tensor, scale: float,
    *, out: Sequence[Tensor] | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute the gradients of q, k, v, rows and columns from weights that are computed again. o and lse are not read.
    out: three tensors for the first three."""
    gradients = *(out or empty_gradients(q, k, v)), *empty_gradients(rows, columns)
    dq, dk, dv, drows, dcolumns = gradients
    zero_without_queries(q, dk, dv)
    for at, _, parts in _blocks(q, k, _BYTES):
        qb, kb, vb, dob = _heads(q, at, q) * scale, _heads(k, at, q), _heads(v, at, q), _heads(do, at, q)
        dkb, dvb = torch.zeros_like(kb), torch.zeros_like(vb)
        for part in parts:
            to = at[0], part, at[1]
            p = _add_scores(_bias(rows, columns, to, lse.dtype), qb[:, :, part], kb).softmax(-1)
            ds = _softmax_backward(dob[:, :, part] @ vb.transpose(2, 3), p)
            grid = ds.unflatten(3, (rows.shape[3], columns.shape[3]))
            drows[to], dcolumns[to] = grid.sum(4).transpose(1, 2), grid.sum(3).transpose(1, 2)
            dq[to] = (ds @ kb).mul_(scale).transpose(1, 2)
            dkb += ds.transpose(2, 3) @ qb[:, :, part]
            dvb += p.transpose(2, 3) @ dob[:, :, part]
        dk[at[0], :, at[1]], dv[at[0], :, at[1]] = dkb.transpose(1, 2), dvb.transpose(1, 2)
    return gradients
