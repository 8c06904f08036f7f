"""Rotary positions on PyTorch's own functions."""

from __future__ import annotations

import torch
from torch import Tensor

from fastvit.ops._checks import promoted_dtype


def pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of what is rotated together, (..., d / 2) each: even and odd elements, or the two halves."""
    if interleaved:
        return x[..., ::2], x[..., 1::2]
    first, second = x.chunk(2, dim=-1)
    return first, second


def by_token(table: Tensor) -> Tensor:
    """(B, H, T, d) -> (B, T, 1, H, d), beside tokens with their heads in groups of H."""
    return table.transpose(1, 2).unsqueeze(2)


def rotated_part(x: Tensor, table: Tensor, rotated: int) -> Tensor:
    """The tokens and heads of x (B, N, heads, d) that are rotated, (B, T, groups, H, d), H being the table's."""
    return x[:, x.shape[1] - table.shape[2] :, :rotated].unflatten(2, (-1, table.shape[1]))


def rotary(
    x: Tensor, sin: Tensor, cos: Tensor, rotated: int, interleaved: bool, transposed: bool, out: Tensor | None = None
) -> Tensor:
    """out: x itself, for a result in its place."""
    out = x.clone(memory_format=torch.contiguous_format) if out is None else out
    if x.numel() == 0:
        return out
    wide = torch.promote_types(promoted_dtype(x, sin, cos), torch.float32)
    first, second = pairs(rotated_part(out, sin, rotated), interleaved)
    (sin1, sin2), (cos1, cos2) = (pairs(by_token(table).to(wide), interleaved) for table in (sin, cos))
    if transposed:
        sin1, sin2 = -sin2, -sin1
    x1, x2 = first.to(wide), second.to(wide)
    turned = torch.addcmul(x1 * cos1, x2, sin1, value=-1), torch.addcmul(x2 * cos2, x1, sin2)
    first.copy_(turned[0])
    second.copy_(turned[1])
    return out
