"""Attention with decomposed relative positions on PyTorch's own functions, by blocks of scores. Only the biases of one
block are in memory at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from fastvit.ops.attention.aten import (
    _VECTOR,
    _At,
    _blocks,
    _even,
    _has_flash,
    _heads,
    _softmax_backward,
)
from fastvit.ops.runtime.device import is_fake
from fastvit.ops.runtime.dtypes import stat_dtype
from fastvit.ops.runtime.torch_private import flash_attention

_BYTES = 1 << 24  # size of a block of biases for PyTorch's kernel, which splits it among the cores


def attention_relative_fwd(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    B, M, H, _ = q.shape
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = q.new_empty((B, H, M), dtype=stat_dtype(q))
    if k.shape[1] < _VECTOR or not _has_flash(None, q, k, v, None, False):
        for at, keys, parts in _blocks(q, k):
            qb, kb, vb = _heads(q, at, q) * scale, _heads(k, keys, q), _heads(v, keys, q)
            for part in parts:
                scores = _add_bias(qb[:, :, part] @ kb.transpose(2, 3), rows, columns, at, part)
                lse[(*at, part)] = scores.logsumexp(-1)
                o[at[0], part, at[1]] = (scores.softmax(-1) @ vb).transpose(1, 2)
        return o, lse
    most, of_query = _BYTES // stat_dtype(q).itemsize, H * k.shape[1]
    for samples in _even(B, most // (M * of_query)):
        kb, vb = k[samples].transpose(1, 2), v[samples].transpose(1, 2)
        for part in _even(M, most // of_query):
            qb = q[samples, part].transpose(1, 2)
            bias = qb.new_zeros((*qb.shape[:3], k.shape[1]), dtype=stat_dtype(q))
            _add_bias(bias, rows, columns, (samples, slice(H)), part)
            ob, lse[samples, :, part] = flash_attention(qb, kb, vb, attn_mask=bias, scale=scale)
            o[samples, part] = ob.transpose(1, 2)
            if is_fake(q):  # one block needs the memory of all
                return o, lse
    return o, lse


def _add_bias(scores: Tensor, rows: Tensor, columns: Tensor, at: _At, part: slice) -> Tensor:
    """Add the biases of a block to its scores (b, heads, queries, keys)."""
    of_rows, of_columns = (t[at[0], part, at[1]].transpose(1, 2) for t in (rows, columns))
    grid = scores.unflatten(3, (of_rows.shape[3], of_columns.shape[3]))
    grid.add_(of_rows.unsqueeze(4)).add_(of_columns.unsqueeze(3))
    return scores


def attention_relative_bwd(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor, o: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, ...]:
    """Compute the gradients of q, k, v, rows and columns from weights that are computed again."""
    gradients = tuple([torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v, rows, columns)])
    dq, dk, dv, drows, dcolumns = gradients
    for at, keys, parts in _blocks(q, k):
        qb, kb, vb, dob = _heads(q, at, q) * scale, _heads(k, keys, q), _heads(v, keys, q), _heads(do, at, q)
        dkb, dvb = torch.zeros_like(kb), torch.zeros_like(vb)
        for part in parts:
            p = _add_bias(qb[:, :, part] @ kb.transpose(2, 3), rows, columns, at, part).softmax(-1)
            ds = _softmax_backward(dob[:, :, part] @ vb.transpose(2, 3), p)
            grid, to = ds.unflatten(3, (rows.shape[3], columns.shape[3])), (at[0], part, at[1])
            drows[to], dcolumns[to] = grid.sum(4).transpose(1, 2), grid.sum(3).transpose(1, 2)
            dq[to] = (ds @ kb).mul_(scale).transpose(1, 2)
            dkb += ds.transpose(2, 3) @ qb[:, :, part]
            dvb += p.transpose(2, 3) @ dob[:, :, part]
        dk[keys[0], :, keys[1]], dv[keys[0], :, keys[1]] = dkb.transpose(1, 2), dvb.transpose(1, 2)
    return gradients
