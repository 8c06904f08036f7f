"""Softmax attention within the windows of a grid on PyTorch's own functions: the tokens are gathered by windows, which
are the samples of attention."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastvit.ops.attention.aten import attention_bwd, attention_bwd_with_mask, attention_fwd, empty_gradients, is_added
from fastvit.ops.attention.relative_aten import attention_relative_bwd, attention_relative_fwd
from fastvit.ops.attention.window_layout import Windows, lse_shape, relative_windows_of, windows_of
from fastvit.ops.runtime.device import is_fake
from fastvit.ops.runtime.dtypes import stat_dtype
from fastvit.ops.runtime.record import constant


class WindowPlaces(NamedTuple):
    """Where the tokens of a grid are in its windows, of n places each.

    tokens: (windows * n), the token at each place; one of the same window where none exists. places: (gh * gw), each
    token's place. exists: (windows, n) bool, None if all places do. together: (windows, 1, n, n) bool, whether two
    places hold neighbours in the grid, not only in the roll; None if all do."""

    tokens: Tensor
    places: Tensor
    exists: Tensor | None
    together: Tensor | None


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
    return WindowPlaces(tokens.flatten(), places.flatten(), exists, together)


def _in_windows(x: Tensor, window: Sequence[int]) -> Tensor:
    """Return the windows of x (rows, columns), which it is a multiple of: (windows, tokens of one)."""
    return x.unflatten(1, (-1, window[1])).unflatten(0, (-1, window[0])).transpose(1, 2).flatten(2).flatten(0, 1)


def mask_of_windows(mask: Tensor | None, at: WindowPlaces, shift_bias: float) -> Tensor | None:
    """Return one mask for the roll and the caller's mask (windows or 1, H or 1, n or 1, n)."""
    if mask is None or at.together is None:
        return at.together if mask is None else mask
    if not is_added(mask):
        return mask & at.together
    apart = mask + shift_bias
    if at.exists is not None:
        apart = torch.where(at.exists[:, None, None], apart, -torch.inf)
    return torch.where(at.together, mask, apart)


def to_windows(x: Tensor, at: WindowPlaces, n: int) -> Tensor:
    """Return x (B, gh, gw, ...) as the samples of attention: (B * windows, n, ...)."""
    tokens = x.flatten(1, 2).index_select(1, at.tokens)
    return tokens.unflatten(1, (-1, n)).flatten(0, 1)


def from_windows(x: Tensor, at: WindowPlaces, like: Tensor) -> Tensor:
    """Return x (B * windows, n, ...) as (B, gh, gw, ...), sizes of `like`."""
    B, gh, gw = like.shape[:3]
    tokens = x.unflatten(0, (B, -1)).flatten(1, 2).index_select(1, at.places)
    return tokens.unflatten(1, (gh, gw))


_remembered_places = functools.lru_cache(16)(window_places)


def _places(x: Tensor, windows: Windows) -> WindowPlaces:
    grid = windows.grid, windows.window, windows.shift, x.device
    if x.is_cpu and not is_fake(x):
        return constant(lambda: _remembered_places(*grid))
    # what is made for fake tensors is fake, and what a CUDA graph captures is made when it is replayed
    return window_places(*grid)


def _samples(qkv: Tensor, mask: Tensor | None) -> list[slice]:
    """Return the samples of each call of attention: all, or, where windows have masks of their own, one, so that the
    masks are not repeated for all samples."""
    B = qkv.shape[0]
    alone = mask is not None and mask.shape[0] > 1
    return [slice(i, i + 1) for i in range(B)] if alone else [slice(0, B)] if B else []


def attention_windows_fwd(
    qkv: Tensor, mask: Tensor | None, seed: Tensor | None, window: list[int], shift: list[int], shift_bias: float,
    scale: float, dropout_p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    windows = windows_of(qkv, window, shift, shift_bias)
    o = torch.empty((*qkv.shape[:3], *qkv.shape[4:]), dtype=qkv.dtype, device=qkv.device)
    lse = qkv.new_empty(lse_shape(qkv, mask, windows), dtype=stat_dtype(qkv))
    if qkv.numel() == 0:
        return o, lse
    at = _places(qkv, windows)
    mask = mask_of_windows(mask, at, shift_bias)
    for i, some in enumerate(_samples(qkv, mask)):
        q, k, v = to_windows(qkv[some], at, windows.tokens).unbind(2)
        o_in_windows, lse_of_some = attention_fwd(q, k, v, mask, None if seed is None else seed + i, scale, dropout_p)
        o[some] = from_windows(o_in_windows, at, o[some])
        lse.unflatten(0, (qkv.shape[0], -1))[some] = lse_of_some.unflatten(0, (-1, windows.per_sample))
    return o, lse


def attention_windows_bwd(
    do: Tensor, qkv: Tensor, mask: Tensor | None, o: Tensor, lse: Tensor, seed: Tensor | None, window: list[int],
    shift: list[int], shift_bias: float, scale: float, dropout_p: float,
) -> Tensor:  # fmt: skip
    windows = windows_of(qkv, window, shift, shift_bias)
    return _backward(do, qkv, mask, o, lse, seed, windows, scale, dropout_p, None)


def attention_windows_bwd_with_mask(
    do: Tensor, qkv: Tensor, mask: Tensor, o: Tensor, lse: Tensor, seed: Tensor | None, window: list[int],
    shift: list[int], shift_bias: float, scale: float, dropout_p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    wide = mask.to(stat_dtype(qkv))  # of which each sample adds to the gradient
    dmask = torch.zeros(mask.shape, dtype=wide.dtype, device=mask.device)
    windows = windows_of(qkv, window, shift, shift_bias)
    return _backward(do, qkv, wide, o, lse, seed, windows, scale, dropout_p, dmask), dmask.to(mask.dtype)


def _backward(
    do: Tensor, qkv: Tensor, mask: Tensor | None, o: Tensor, lse: Tensor, seed: Tensor | None, windows: Windows,
    scale: float, dropout_p: float, dmask: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return dqkv, and add the mask's gradient to dmask."""
    dqkv, n = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device), windows.tokens
    if qkv.numel() == 0:
        return dqkv
    at = _places(qkv, windows)
    mask = mask_of_windows(mask, at, windows.shift_bias)
    lse = lse.unflatten(0, (qkv.shape[0], -1))
    for i, some in enumerate(_samples(qkv, mask)):
        q, k, v = to_windows(qkv[some], at, n).unbind(2)
        do_in_windows = to_windows(do[some], at, n)
        if at.exists is not None:
            nowhere = ~at.exists.repeat(len(do_in_windows) // windows.per_sample, 1)
            do_in_windows.masked_fill_(nowhere[:, :, None, None], 0.0)
        seed_of_some = None if seed is None else seed + i
        gradient = torch.empty((*q.shape[:2], *qkv.shape[3:]), dtype=qkv.dtype, device=qkv.device)
        out = gradient.unbind(2)
        if dmask is None or mask is None:
            saved = to_windows(o[some], at, n), lse[some].flatten(0, 1)
            attention_bwd(do_in_windows, q, k, v, mask, *saved, seed_of_some, scale, dropout_p, out=out)
        else:  # reads neither o nor lse
            *_, of_mask = attention_bwd_with_mask(
                do_in_windows, q, k, v, mask, o, lse, seed_of_some, scale, dropout_p, out=out
            )
            dmask += of_mask.sum_to_size(dmask.shape)
        dqkv[some] = from_windows(gradient, at, dqkv[some])
    return dqkv


def attention_windows_relative_fwd(qkv: Tensor, rows: Tensor, columns: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    windows = relative_windows_of(qkv, rows, columns)
    if qkv.numel() == 0:
        lse = qkv.new_empty(lse_shape(qkv, None, windows), dtype=stat_dtype(qkv))
        return qkv.new_empty((*qkv.shape[:3], *qkv.shape[4:])), lse
    at = _places(qkv, windows)
    qkv_in_windows, rows, columns = (to_windows(t, at, windows.tokens) for t in (qkv, rows, columns))
    q, k, v = qkv_in_windows.unbind(2)
    o, lse = attention_relative_fwd(q, k, v, rows, columns, scale)
    return from_windows(o, at, qkv).detach(), lse  # no view, as in aten.linear


def attention_windows_relative_bwd(
    do: Tensor, qkv: Tensor, rows: Tensor, columns: Tensor, o: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, ...]:
    if qkv.numel() == 0:
        return empty_gradients(qkv, rows, columns)
    windows = relative_windows_of(qkv, rows, columns)
    at = _places(qkv, windows)
    qkv_in_windows, rows_in_windows, columns_in_windows, do_in_windows = (
        to_windows(t, at, windows.tokens) for t in (qkv, rows, columns, do)
    )
    q, k, v = qkv_in_windows.unbind(2)
    dqkv = torch.empty_like(qkv_in_windows)
    *_, drows, dcolumns = attention_relative_bwd(
        do_in_windows, q, k, v, rows_in_windows, columns_in_windows, o, lse, scale, out=dqkv.unbind(2)
    )
    return tuple([from_windows(gradient, at, qkv).detach() for gradient in (dqkv, drows, dcolumns)])
