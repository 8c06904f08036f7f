"""Layouts of a tensor in memory, with NaN in the gaps. A layout that a tensor cannot have leaves it as it is."""

from collections.abc import Callable

import torch
from torch import Tensor


def poison(t: Tensor) -> Tensor:
    """Return what is around a tensor of this shape and dtype: NaN, or a number that is not among its own."""
    return torch.full_like(t, torch.nan if t.is_floating_point() else 99)


def padded(t: Tensor, dim: int, count: int | None = None) -> Tensor:
    """Put `count` elements, or as many as there are, before and after, along dim."""
    around = poison(t).narrow(dim, 0, min(t.shape[dim], count or t.shape[dim]))
    return torch.cat([around, t, around], dim).narrow(dim, around.shape[dim], t.shape[dim])


def swapped(t: Tensor, first: int, second: int) -> Tensor:
    """Swap two dimensions in memory; of a tensor with fewer, the last ones."""
    first, second = (max(min(dim, t.dim() - 1), -t.dim()) for dim in (first, second))
    return t.transpose(first, second).contiguous().transpose(first, second)


def expanded(t: Tensor, dim: int) -> Tensor:
    """Repeat the first of a dimension without memory. Not of a matrix, norms of whose equal results are rounding,
    nor of the ends of sequences."""
    if t.numel() == 0 or t.dim() in (0, 2) or t.dtype in (torch.int32, torch.int64):
        return t
    return t.narrow(min(dim, t.dim() - 1), 0, 1).expand(t.shape)


def odd_ones(t: Tensor) -> Tensor:
    """Give dimensions of one element meaningless strides."""
    return t.as_strided(t.shape, [77777 if n == 1 else s for n, s in zip(t.shape, t.stride(), strict=True)])


# Multiples of 8 elements from row to row and from address to address, where the sizes are
ALIGNED: dict[str, Callable[[Tensor], Tensor]] = {
    "last padded": lambda t: padded(t, -1),
    "heads first": lambda t: swapped(t, -2, -3),
    "second padded": lambda t: padded(t, min(1, t.dim() - 1)),
    "batch inside": lambda t: swapped(t, 0, 1),
    "first expanded": lambda t: expanded(t, 0),
    "parts of a tensor": lambda t: torch.stack([t, poison(t)], 1)[:, 0] if t.dim() > 1 else t,
}
UNALIGNED: dict[str, Callable[[Tensor], Tensor]] = {
    "gaps": lambda t: torch.stack([t, poison(t)], -1)[..., 0],
    "odd rows": lambda t: padded(t, -1, 1),
    "last inside": lambda t: swapped(t, 1, -1),
    "odd address": lambda t: torch.cat([poison(t).flatten()[:1], t.flatten()])[1:].view(t.shape),
    "second expanded": lambda t: expanded(t, 1),
    "first swapped": lambda t: swapped(t, 0, -1),
}
LAYOUTS = {"contiguous": lambda t: t, "odd ones": odd_ones, **ALIGNED, **UNALIGNED}
