"""The windows of a grid of tokens, as Swin cuts them (Liu et al. 2021, arXiv:2103.14030): roll the grid up and to the
left, pad it to a multiple of the window, and cut it from the top left on.

Shapes: grid (gh, gw), window (wh, ww) of n = wh * ww tokens, shift (sh, sw) less than the grid.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Size = tuple[int, int]


def to_windows(x: Tensor, window: Size, shift: Size) -> Tensor:
    """(B, gh, gw, ...) -> (B * windows, n, ...). What is padded is zero."""
    (gh, gw), (wh, ww), (sh, sw) = x.shape[1:3], window, shift
    if sh or sw:
        x = torch.roll(x, (-sh, -sw), (1, 2))
    if gh % wh or gw % ww:
        x = F.pad(x, (0, 0) * (x.dim() - 3) + (0, -gw % ww, 0, -gh % wh))
    return x.unflatten(2, (-1, ww)).unflatten(1, (-1, wh)).transpose(2, 3).flatten(3, 4).flatten(0, 2)


def from_windows(x: Tensor, grid: Size, window: Size, shift: Size) -> Tensor:
    """(B * windows, n, ...) -> (B, gh, gw, ...): the transpose of `to_windows`, and for its results the inverse."""
    (gh, gw), (wh, ww) = grid, window
    x = x.unflatten(1, (wh, ww)).unflatten(0, (-1, -(-gh // wh), -(-gw // ww))).transpose(2, 3)
    x = x.flatten(3, 4).flatten(1, 2)[:, :gh, :gw]
    return torch.roll(x, shift, (1, 2)) if any(shift) else x


def apart_in_windows(grid: Size, window: Size, shift: Size, device: Any) -> tuple[Tensor, Tensor] | None:
    """Find which tokens of a window do not belong together: only the roll has made them neighbours, or one is padded.

    Returns:
        (windows, 1, n, n) bool, and (windows, 1, 1, n) bool for the padded tokens; None if all belong together.
    """
    (gh, gw), (wh, ww), (sh, sw) = grid, window, shift
    if not (sh or sw or gh % wh or gw % ww):
        return None
    y = torch.arange(-(-gh // wh) * wh, device=device)[:, None]
    x = torch.arange(-(-gw // ww) * ww, device=device)
    region = ((y >= gh - sh).long() + (y >= gh)) * 3 + (x >= gw - sw).long() + (x >= gw)
    region, padded = (to_windows(t[None], window, (0, 0)) for t in (region, (y >= gh) | (x >= gw)))
    return (region[:, :, None] != region[:, None])[:, None], padded[:, None, None]


def mask_of_windows(
    attn_mask: Tensor | None, grid: Size, window: Size, shift: Size, shift_bias: float, scores: Tensor,
    apart: tuple[Tensor, Tensor] | None = None,
) -> Tensor | None:  # fmt: skip
    """Return one mask for the caller's (windows or 1, H or 1, n or 1, n) and the cut, or None.

    Args:
        shift_bias: what is added to the scores of tokens that the roll has made neighbours; padded ones are hidden.
        scores: has the scores' dtype, in which it is added, and the device.
        apart: `apart_in_windows`, where it is known.
    """
    apart = apart or apart_in_windows(grid, window, shift, scores.device)
    if apart is None:
        return attn_mask
    separate, padded = apart
    if shift_bias == -torch.inf and (attn_mask is None or attn_mask.dtype is torch.bool):
        return ~separate if attn_mask is None else attn_mask & ~separate
    added = torch.zeros_like(separate, dtype=scores.dtype).masked_fill(separate, shift_bias)
    added = added.masked_fill(separate & padded, -torch.inf)
    if attn_mask is None:
        return added
    return torch.where(attn_mask, added, -torch.inf) if attn_mask.dtype is torch.bool else attn_mask + added
