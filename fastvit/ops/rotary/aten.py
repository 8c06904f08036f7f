"""Rotary positions on PyTorch's own functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastvit.ops.runtime.dtypes import promoted_dtype


def _join(first: Tensor, second: Tensor, interleaved: bool) -> Tensor:
    return torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)


def _pairs(x: Tensor, interleaved: bool) -> Any:
    """Return views of the two partners: even and odd elements, or the two halves."""
    return (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)


def swapped(x: Tensor, interleaved: bool) -> Tensor:
    """Return x with partners swapped."""
    first, second = _pairs(x, interleaved)
    return _join(second, first, interleaved)


def signed(sin: Tensor, interleaved: bool, transposed: bool = False) -> Tensor:
    """Return the factors of the swapped partners: (-sin1, sin2), or for the gradient (sin2, -sin1)."""
    first, second = _pairs(sin, interleaved)
    return _join(second, -first, interleaved) if transposed else _join(-first, second, interleaved)


def by_token(table: Tensor) -> Tensor:
    """View (B, H, T, d) as (B, T, 1, H, d), to broadcast to tokens with their heads in groups of H."""
    return table.transpose(1, 2).unsqueeze(2)


def rotated_part(x: Tensor, table: Tensor, rotated: int) -> Tensor:
    """View the tokens and heads of x (B, N, heads, d) that are rotated as (B, T, groups, H, d), with the table's H."""
    return x[:, x.shape[1] - table.shape[2] :, :rotated].unflatten(2, (-1, table.shape[1]))


def rotary(
    x: Tensor, sin: Tensor, cos: Tensor, rotated: int, interleaved: bool, transposed: bool, out: Tensor | None = None
) -> Tensor:
    """Rotate x. out: x itself, to write over it."""
    out = x.clone(memory_format=torch.contiguous_format) if out is None else out
    if x.numel() == 0:
        return out
    x = rotated_part(out, sin, rotated)
    wide = torch.promote_types(promoted_dtype(out, sin, cos), torch.float32)
    cos, sin = by_token(cos.to(wide)), by_token(signed(sin.to(wide), interleaved, transposed))
    turned = x.to(wide)  # one dtype, since ATen's functions copy mixed ones; x itself if it is wide
    partners = swapped(turned, interleaved)
    turned.mul_(cos).addcmul_(partners, sin)
    if turned is not x:
        x.copy_(turned)
    return out
