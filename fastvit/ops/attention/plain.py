"""Attention in functions that exporters know: PyTorch's `scaled_dot_product_attention`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastvit.ops.attention.groups import LastArguments, Sequences, Windows, groups_of, lse_shape, unpacked
from fastvit.ops.runtime.dtypes import stat_dtype
from fastvit.reference.ops import attention, attention_windows, visible


def attention_fwd(
    q: Tensor, k: Tensor | None, v: Tensor | None, mask: Tensor | None, seed: Tensor | None, scale: float,
    dropout_p: float, causal: bool = False, *last: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The LSE is NaN: only the backward op reads it, which no exporter takes."""
    p = LastArguments(*last)
    options: dict[str, Any] = {"scale": scale, "dropout_p": dropout_p, "sdpa": True}
    packed = q
    q, k, v = unpacked(q, k, v)
    groups = groups_of(q, p)
    lse = q.new_full(lse_shape(q, mask, groups), torch.nan, dtype=stat_dtype(q))
    relative = None if p.rows is None or p.columns is None else (p.rows, p.columns)
    if isinstance(groups, Windows):
        if packed is q:
            packed = torch.stack((q, k, v), 3)
        cut: dict[str, Any] = {"window": groups.window, "shift": groups.shift, "shift_bias": groups.shift_bias}
        return attention_windows(packed, **cut, attn_mask=mask, relative=relative, **options), lse
    if k.shape[-2] != q.shape[-2]:  # not every exporter knows shared keys
        k, v = (t.repeat_interleave(q.shape[-2] // k.shape[-2], -2) for t in (k, v))
    if groups is not None:
        mask = _mask_of_sequences(q, k, groups, mask, causal)
        return attention(q[None], k[None], v[None], attn_mask=mask, **options)[0], lse
    return attention(q, k, v, attn_mask=mask, is_causal=causal, relative=relative, **options), lse


def _mask_of_sequences(q: Tensor, k: Tensor, groups: Sequences, mask: Tensor | None, causal: bool) -> Tensor:
    """Return a mask (1, 1 or H, T, T_k) of tokens for the mask of positions (1, 1 or H, longest, longest_k)."""
    sequence, position = _sequence_and_position(q, groups.ends)
    of_key, position_of_key = sequence, position
    if groups.ends_k is not None:
        of_key, position_of_key = _sequence_and_position(k, groups.ends_k)
    seen = (sequence[:, None] == of_key)[None, None]
    if causal:
        seen = seen & (position[:, None] >= position_of_key)
    if mask is None:
        return seen
    mask = mask.expand(-1, -1, groups.longest, -1)
    return visible(mask[:, :, position][..., position_of_key], seen)


def _sequence_and_position(x: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Return each token's sequence, counted from one, and its position in it."""
    token = torch.arange(x.shape[0], device=x.device)
    sequence = torch.searchsorted(ends, token, right=True)
    return sequence, token - ends[sequence - 1]
