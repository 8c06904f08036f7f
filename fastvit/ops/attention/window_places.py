"""Where the tokens of a grid are in its windows, as tensors: to gather them, and to mask what the roll has made
neighbours."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastvit.ops.attention.within import Windows, is_added
from fastvit.ops.runtime.device import is_fake
from fastvit.ops.runtime.record import constant


class WindowPlaces(NamedTuple):
    """Where the tokens of a grid are in its windows, of n places each.

    tokens: (windows * n), the token at each place; one of the same window where none exists. places: (gh * gw), each
    token's place. exists: (windows, n) bool, None if all places do. together: (windows, 1, n, n) bool, whether two
    places hold neighbours in the grid, not only in the roll; None if all do. n: places of a window."""

    tokens: Tensor
    places: Tensor
    exists: Tensor | None
    together: Tensor | None
    n: int


def window_places(grid: Sequence[int], window: Sequence[int], shift: Sequence[int], device: Any) -> WindowPlaces:
    """Roll a grid up and to the left by `shift`, less than the grid, and cut it into windows from the top left on."""
    (gh, gw), (wh, ww), (sh, sw) = grid, window, shift
    down, across = -(-gh // wh), -(-gw // ww)
    y, x = torch.arange(down * wh, device=device)[:, None], torch.arange(across * ww, device=device)
    tokens = _in_windows((y.clamp(max=gh - 1) + sh) % gh * gw + (x.clamp(max=gw - 1) + sw) % gw, window)
    exists = together = None
    if gh % wh or gw % ww:
        exists = _in_windows((y < gh) & (x < gw), window)
    if exists is not None or sh or sw:
        region = _in_windows(((y >= gh - sh).long() + (y >= gh)) * 3 + (x >= gw - sw).long() + (x >= gw), window)
        together = (region[:, :, None] == region[:, None])[:, None]
    y, x = (torch.arange(gh, device=device)[:, None] - sh) % gh, (torch.arange(gw, device=device) - sw) % gw
    places = (y // wh * across + x // ww) * (wh * ww) + y % wh * ww + x % ww
    return WindowPlaces(tokens.flatten(), places.flatten(), exists, together, wh * ww)


def _in_windows(x: Tensor, window: Sequence[int]) -> Tensor:
    """Return the windows of x (rows, columns), which it is a multiple of: (windows, tokens of one)."""
    return x.unflatten(1, (-1, window[1])).unflatten(0, (-1, window[0])).transpose(1, 2).flatten(2).flatten(0, 1)


_remembered = functools.lru_cache(16)(window_places)


def of(x: Tensor, windows: Windows) -> WindowPlaces:
    """Return the places of the windows, on x's device."""
    grid = windows.grid, windows.window, windows.shift, x.device
    if x.is_cpu and not is_fake(x):
        return constant(lambda: _remembered(*grid))
    # what is made for fake tensors is fake, and what a CUDA graph captures is made when it is replayed
    return window_places(*grid)


def mask_of_windows(mask: Tensor | None, at: WindowPlaces, shift_bias: float, dtype: torch.dtype) -> Tensor | None:
    """Return one mask for the roll and the caller's mask (windows or 1, H or 1, n or 1, n). dtype: of the scores, in
    which `shift_bias` is added."""
    if mask is None or at.together is None:
        return at.together if mask is None else mask
    if not is_added(mask):
        return mask & at.together
    mask = mask.to(torch.promote_types(mask.dtype, dtype))
    apart = mask + shift_bias
    if at.exists is not None:
        apart = torch.where(at.exists[:, None, None], apart, -torch.inf)
    return torch.where(at.together, mask, apart)


def to_windows(x: Tensor, at: WindowPlaces) -> Tensor:
    """Return x (B, gh, gw, ...) as the samples of attention: (B * windows, n, ...)."""
    tokens = x.flatten(1, 2).index_select(1, at.tokens)
    return tokens.unflatten(1, (-1, at.n)).flatten(0, 1)


def from_windows(x: Tensor, at: WindowPlaces, like: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return x (B * windows, n, ...) as (B, gh, gw, ...), sizes of `like`. out: a contiguous tensor to write it to."""
    tokens, into = x.unflatten(0, (like.shape[0], -1)).flatten(1, 2), None if out is None else out.flatten(1, 2)
    return torch.index_select(tokens, 1, at.places, out=into).unflatten(1, like.shape[1:3])
