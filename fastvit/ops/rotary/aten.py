"""Rotary positions on PyTorch's own functions. A rotation's gradient is a rotation, too: `reference.ops.rotary`
computed again would take a CPU 1.6 times as long in both passes, and cannot write over x."""

from __future__ import annotations

import torch
from torch import Tensor

from fastvit.ops.runtime.dtypes import promoted_dtype
from fastvit.reference import ops as reference


def rotary(
    x: Tensor, sin: Tensor, cos: Tensor, rotated: int, interleaved: bool, transposed: bool, out: Tensor | None = None
) -> Tensor:
    """Rotate x. out: x itself, to write over it."""
    out = x.clone(memory_format=torch.contiguous_format) if out is None else out
    if x.numel() == 0:
        return out
    x = rotated_part(out, sin, rotated)
    wide = _wide(out, sin, cos)
    cos, sin = _by_token(cos.to(wide)), _by_token(reference.signed(sin.to(wide), interleaved))
    if transposed:
        sin = reference.swapped(sin, interleaved)
    turned = x.to(wide)  # one dtype, since ATen's functions copy mixed ones; x itself if it is wide
    partners = reference.swapped(turned, interleaved)
    turned.mul_(cos).addcmul_(partners, sin)
    if turned is not x:
        x.copy_(turned)
    return out


def plain(x: Tensor, sin: Tensor, cos: Tensor, rotated: int, interleaved: bool, transposed: bool) -> Tensor:
    """Rotate x, and change nothing in place."""
    if transposed:
        sin = -reference.swapped(sin, interleaved)
    H = sin.shape[1] if sin.shape[1] > 1 else rotated  # heads that the tables are for
    tables = sin, cos, x.shape[1] - sin.shape[2], interleaved
    parts = x[:, :, :rotated].to(_wide(x, sin, cos)).split(H, 2)
    return torch.cat([*(reference.rotary(part, tables).to(x.dtype) for part in parts), x[:, :, rotated:]], 2)


def rotated_part(x: Tensor, table: Tensor, rotated: int) -> Tensor:
    """View the tokens and heads of x (B, N, heads, d) that are rotated as (B, T, groups, H, d), with the table's H."""
    return x[:, x.shape[1] - table.shape[2] :, :rotated].unflatten(2, (-1, table.shape[1]))


def _by_token(table: Tensor) -> Tensor:
    """View (B, H, T, d) as (B, T, 1, H, d), to broadcast to tokens with their heads in groups of H."""
    return table.transpose(1, 2).unsqueeze(2)


def _wide(*tensors: Tensor) -> torch.dtype:
    return torch.promote_types(promoted_dtype(*tensors), torch.float32)
