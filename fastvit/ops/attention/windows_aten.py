"""Softmax attention within the windows of a grid on PyTorch's own functions: windows that are cut and shifted alike are
the samples of one call."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastvit.ops.attention.aten import attention_bwd, attention_bwd_with_mask, attention_fwd, is_added
from fastvit.ops.attention.relative_aten import attention_relative_bwd, attention_relative_fwd
from fastvit.ops.runtime.dtypes import stat_dtype


class Windows(NamedTuple):
    """How grids of tokens are cut into windows: rows and columns of the grid and of a window, and how far the grid is
    rolled up and to the left before, less than the grid's size."""

    grid: tuple[int, int]
    window: tuple[int, int]
    shift: tuple[int, int]

    @property
    def tokens(self) -> int:
        return self.window[0] * self.window[1]

    @property
    def of_sample(self) -> int:
        """Return how many windows a grid has; the last ones may reach beyond it."""
        down, across = (-(-size // side) for size, side in zip(self.grid, self.window, strict=True))
        return down * across

    @property
    def hides(self) -> bool:
        """Return whether a token may not see all places of its window."""
        return any(self.shift) or any(size % side for size, side in zip(self.grid, self.window, strict=True))


def windows_of(x: Tensor, window: Sequence[int], shift: Sequence[int] = (0, 0)) -> Windows:
    """Return the windows of x (B, gh, gw, ...)."""
    gh, gw = x.shape[1:3]
    return Windows((gh, gw), (window[0], window[1]), (shift[0] % max(gh, 1), shift[1] % max(gw, 1)))


def lse_shape(qkv: Tensor, mask: Tensor | None, windows: Windows) -> tuple[int, ...]:
    """Return the shape of the LSE of qkv (B, gh, gw, 3, H, d): that of attention with windows for samples."""
    samples, heads = qkv.shape[0] * windows.of_sample, qkv.shape[4]
    return (samples, heads, 2, windows.tokens) if is_added(mask) else (samples, heads, windows.tokens)


class _Side(NamedTuple):
    """Windows along one side of the grid that are cut and shifted alike: their numbers, how many of their rows exist,
    and how many of these come before those that the roll brings from the other end; 0 if it brings none or all."""

    numbers: tuple[int, ...]
    length: int
    split: int


@functools.lru_cache(1024)
def _sides(size: int, side: int, shift: int) -> list[_Side]:
    found: dict[tuple[int, int], list[int]] = {}
    for number, first in enumerate(range(0, size, side)):
        length, split = min(side, size - first), size - shift - first
        found.setdefault((length, split if shift and 0 < split < length else 0), []).append(number)
    return [_Side(tuple(numbers), *of) for of, numbers in found.items()]


class _Group(NamedTuple):
    """Windows that are cut and shifted alike.

    numbers: of the windows in a sample. size: rows and columns that exist. tokens: their tokens of the grid, window by
    window; None for all in their order. same: (1, 1, tokens, tokens) bool, whether two tokens of a window were
    neighbours before the roll; None if all were."""

    numbers: Tensor
    size: tuple[int, int]
    tokens: Tensor | None
    same: Tensor | None

    def take(self, x: Tensor) -> Tensor:
        """Return the windows of x (B, gh * gw, ...): (B * windows, tokens, ...)."""
        found = x if self.tokens is None else x.index_select(1, self.tokens)
        return found.reshape(-1, self.size[0] * self.size[1], *x.shape[2:])

    def put(self, windows: Tensor, x: Tensor) -> None:
        """Write what `take` returns for x."""
        windows = windows.reshape(x.shape[0], -1, *x.shape[2:])
        if self.tokens is None:
            x.copy_(windows)
        else:
            x.index_copy_(1, self.tokens, windows)

    def of_mask(self, mask: Tensor, windows: Windows, batch: int) -> Tensor:
        """Return the part of a mask (windows or 1, H or 1, n or 1, n) that the windows of a batch see."""
        if mask.shape[0] > 1:
            mask = mask[self.numbers].repeat(batch, 1, 1, 1)
        if self.size != windows.window:
            h, w = self.size
            mask = mask.unflatten(3, windows.window)[..., :h, :w].flatten(3)
            if mask.shape[2] > 1:
                mask = mask.unflatten(2, windows.window)[:, :, :h, :w].flatten(2, 3)
        return mask

    def masked(self, mask: Tensor | None, windows: Windows, batch: int) -> Tensor | None:
        """Return what hides keys from queries, and what is added, as one mask."""
        if mask is None:
            return self.same
        mask = self.of_mask(mask, windows, batch)
        if self.same is None:
            return mask
        return mask & self.same if mask.dtype is torch.bool else torch.where(self.same, mask, -torch.inf)

    def add_to(self, dmask: Tensor, part: Tensor, windows: Windows) -> None:
        """Add the gradient of what `masked` returns to the mask's, which is contiguous."""
        h, w = self.size
        into = dmask.unflatten(3, windows.window)[..., :h, :w]
        rows = 1
        if dmask.shape[2] > 1:
            into, rows = into.unflatten(2, windows.window)[:, :, :h, :w], h * w
        each = len(self.numbers) if dmask.shape[0] > 1 else 1
        part = part.unflatten(0, (-1, each)).sum_to_size(1, each, dmask.shape[1], rows, h * w)
        if each == dmask.shape[0]:
            into += part.view(into.shape)
        else:  # no other group has these windows
            into[self.numbers] = part.view(each, *into.shape[1:])

    def of_lse(self, lse: Tensor) -> Tensor:
        """Return the LSE of these windows from that of all of them, (B, windows, ..., wh, ww)."""
        h, w = self.size
        return lse[:, self.numbers, ..., :h, :w].flatten(-2).flatten(0, 1)

    def put_lse(self, of_group: Tensor, lse: Tensor) -> None:
        """Write what `of_lse` returns."""
        h, w = self.size
        lse[:, self.numbers, ..., :h, :w] = of_group.unflatten(0, (lse.shape[0], -1)).unflatten(-1, (h, w))


def _groups(windows: Windows, device: torch.device) -> Iterator[_Group]:
    (gh, gw), (wh, ww), (sh, sw) = windows
    across = -(-gw // ww)
    for rows in _sides(gh, wh, sh):
        for columns in _sides(gw, ww, sw):
            y, of_rows = _rows_of(rows, wh, sh, gh, device)
            x, of_columns = _rows_of(columns, ww, sw, gw, device)
            numbers = torch.tensor(rows.numbers, device=device)[:, None] * across
            numbers = (numbers + torch.tensor(columns.numbers, device=device)).flatten()
            size = rows.length, columns.length
            whole = size == (gh, gw) and not (sh or sw)
            tokens = None if whole else (y[:, None, :, None] * gw + x[:, None]).flatten()
            same = None
            if rows.split or columns.split:
                region = (of_rows[:, None] * 2 + of_columns).flatten()
                same = (region[:, None] == region)[None, None]
            yield _Group(numbers, size, tokens, same)


def _rows_of(side: _Side, window: int, shift: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the rows of the grid in each window (windows, length), and 1 for those that the roll brings, else 0."""
    within = torch.arange(side.length, device=device)
    first = torch.tensor(side.numbers, device=device)[:, None] * window
    return (first + within + shift) % size, (within >= side.split).long()


def attention_windows_fwd(
    qkv: Tensor, mask: Tensor | None, seed: Tensor | None, window: list[int], shift: list[int], scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    windows, of_tokens = windows_of(qkv, window, shift), qkv.flatten(1, 2)
    o = torch.empty((*qkv.shape[:3], *qkv.shape[4:]), dtype=qkv.dtype, device=qkv.device)
    lse = torch.full(lse_shape(qkv, mask, windows), torch.inf, dtype=stat_dtype(qkv), device=qkv.device)
    if qkv.numel() == 0:
        return o, lse
    of_windows = lse.unflatten(0, (qkv.shape[0], -1)).unflatten(-1, windows.window)
    for i, group in enumerate(_groups(windows, qkv.device)):
        q, k, v = group.take(of_tokens).unbind(2)
        its_seed = None if seed is None else seed + i
        its_mask = group.masked(mask, windows, qkv.shape[0])
        its_o, its_lse = attention_fwd(q, k, v, its_mask, its_seed, scale, dropout_p)
        group.put(its_o, o.flatten(1, 2))
        group.put_lse(its_lse, of_windows)
    return o, lse


def attention_windows_bwd(
    do: Tensor, qkv: Tensor, mask: Tensor | None, o: Tensor, lse: Tensor, seed: Tensor | None, window: list[int],
    shift: list[int], scale: float, dropout_p: float,
) -> Tensor:  # fmt: skip
    return _backward(do, qkv, mask, o, lse, seed, windows_of(qkv, window, shift), scale, dropout_p, None)


def attention_windows_bwd_with_mask(
    do: Tensor, qkv: Tensor, mask: Tensor, o: Tensor, lse: Tensor, seed: Tensor | None, window: list[int],
    shift: list[int], scale: float, dropout_p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    wide = mask.to(stat_dtype(qkv))  # of which each group adds a part of the gradient
    dmask = torch.zeros(mask.shape, dtype=wide.dtype, device=mask.device)
    windows = windows_of(qkv, window, shift)
    return _backward(do, qkv, wide, o, lse, seed, windows, scale, dropout_p, dmask), dmask.to(mask.dtype)


def _backward(
    do: Tensor, qkv: Tensor, mask: Tensor | None, o: Tensor, lse: Tensor, seed: Tensor | None, windows: Windows,
    scale: float, dropout_p: float, dmask: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return dqkv, and add to dmask, a contiguous tensor of the mask's shape, the mask's gradient."""
    dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    if qkv.numel() == 0:
        return dqkv
    do, of_tokens, o = (t.flatten(1, 2) for t in (do, qkv, o))
    of_windows = lse.unflatten(0, (qkv.shape[0], -1)).unflatten(-1, windows.window)
    for i, group in enumerate(_groups(windows, qkv.device)):
        its_qkv, its_mask = group.take(of_tokens), group.masked(mask, windows, qkv.shape[0])
        its_dqkv = torch.empty(its_qkv.shape, dtype=qkv.dtype, device=qkv.device)
        out = its_dqkv.unbind(2)
        its_do, (q, k, v), its_seed = group.take(do), its_qkv.unbind(2), None if seed is None else seed + i
        if dmask is None or its_mask is None:
            its_o, its_lse = group.take(o), group.of_lse(of_windows)
            attention_bwd(its_do, q, k, v, its_mask, its_o, its_lse, its_seed, scale, dropout_p, out=out)
        else:  # reads neither o nor lse
            *_, of_mask = attention_bwd_with_mask(
                its_do, q, k, v, its_mask, o, lse, its_seed, scale, dropout_p, out=out
            )
            group.add_to(dmask, of_mask, windows)
        group.put(its_dqkv, dqkv.flatten(1, 2))
    return dqkv


def attention_windows_relative_fwd(
    qkv: Tensor, rows: Tensor, columns: Tensor, window: list[int], scale: float
) -> tuple[Tensor, Tensor]:
    o = torch.empty((*qkv.shape[:3], *qkv.shape[4:]), dtype=qkv.dtype, device=qkv.device)
    windows = windows_of(qkv, window)
    lse = qkv.new_empty(lse_shape(qkv, None, windows), dtype=stat_dtype(qkv))
    for group in _groups(windows, qkv.device) if qkv.numel() else ():  # one
        of_tokens, its_rows, its_columns = (group.take(t.flatten(1, 2)) for t in (qkv, rows, columns))
        q, k, v = of_tokens.unbind(2)
        its_o, lse = attention_relative_fwd(q, k, v, its_rows, its_columns, scale)
        group.put(its_o, o.flatten(1, 2))
    return o, lse


def attention_windows_relative_bwd(
    do: Tensor, qkv: Tensor, rows: Tensor, columns: Tensor, o: Tensor, lse: Tensor, window: list[int], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = tuple([torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (qkv, rows, columns)])
    for group in _groups(windows_of(qkv, window), qkv.device) if qkv.numel() else ():
        of_tokens, *others = (group.take(t.flatten(1, 2)) for t in (qkv, do, rows, columns))
        its_do, its_rows, its_columns = others
        its_dqkv = torch.empty(of_tokens.shape, dtype=qkv.dtype, device=qkv.device)
        q, k, v = of_tokens.unbind(2)
        *_, drows, dcolumns = attention_relative_bwd(
            its_do, q, k, v, its_rows, its_columns, o, lse, scale, out=its_dqkv.unbind(2)
        )
        for found, gradient in zip((its_dqkv, drows, dcolumns), gradients, strict=True):
            group.put(found, gradient.flatten(1, 2))
    dqkv, drows, dcolumns = gradients
    return dqkv, drows, dcolumns
