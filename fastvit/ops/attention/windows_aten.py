"""Softmax attention within the windows of a grid on PyTorch's own functions: windows that are cut and shifted alike are
the samples of one call."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fastvit.ops.attention.aten import attention_bwd, attention_bwd_with_mask, attention_fwd, empty_gradients
from fastvit.ops.attention.relative_aten import attention_relative_bwd, attention_relative_fwd
from fastvit.ops.attention.window_layout import Windows, lse_shape, relative_windows_of, windows_of
from fastvit.ops.runtime.device import is_fake
from fastvit.ops.runtime.dtypes import stat_dtype


class _Side(NamedTuple):
    """Neighbouring windows along one side of the grid that are cut and shifted alike: the first one's number, how many
    there are, how many of their rows exist, and how many of these come before those that the roll brings from the other
    end; 0 if it brings none or all."""

    first: int
    windows: int
    length: int
    split: int


@functools.lru_cache(1024)
def _sides(size: int, side: int, shift: int) -> list[_Side]:
    found: dict[tuple[int, int], list[int]] = {}
    for number, first in enumerate(range(0, size, side)):
        length, split = min(side, size - first), size - shift - first
        found.setdefault((length, split if shift and 0 < split < length else 0), []).append(number)
    return [_Side(numbers[0], len(numbers), *of) for of, numbers in found.items()]


class _Part(NamedTuple):
    """Some of the windows of a batch, cut and shifted alike.

    numbers: of the windows in their samples. places: the same among the windows of all samples. size: rows and columns
    that exist. tokens: their tokens among those of all samples, window by window; None for all in their order. same:
    (1, 1, tokens, tokens) bool, whether two tokens of a window were neighbours before the roll; None if all were."""

    numbers: Tensor
    places: Tensor
    size: tuple[int, int]
    tokens: Tensor | None
    same: Tensor | None

    def take(self, x: Tensor, H: int, count: int = 1) -> tuple[Tensor, ...]:
        """Return these windows of x (tokens of all samples, count * H * d): `count` tensors (windows, tokens, H, d),
        heads before tokens in memory, of which attention makes no further copies."""
        if self.tokens is None:
            return x.view(len(self.numbers), self.size[0] * self.size[1], count, H, -1).unbind(2)
        which = torch.arange(count, device=x.device).view(-1, 1, 1, 1)
        head = torch.arange(H, device=x.device).view(-1, 1)
        index = (self.tokens.view(len(self.numbers), 1, -1) * count + which) * H + head
        found = x.view(-1, x.shape[1] // (count * H)).index_select(0, index.flatten())
        return found.view(*index.shape, -1).transpose(2, 3).unbind(0)

    def put(self, windows: Tensor, x: Tensor) -> None:
        """Write what `take` returns for x."""
        windows = windows.reshape(-1, x.shape[1])
        if self.tokens is None:
            x.copy_(windows)
        else:
            x.index_copy_(0, self.tokens, windows)

    def masked(self, mask: Tensor | None, windows: Windows) -> Tensor | None:
        """Return what hides keys from queries, and what is added, as one mask. mask: (windows of a sample or 1, H or 1,
        n or 1, n)."""
        if mask is None:
            return self.same
        if mask.shape[0] > 1:
            mask = mask.index_select(0, self.numbers)
        mask = self._that_exist(mask, windows).flatten(-2)
        mask = mask.flatten(2, 3) if mask.dim() == 5 else mask
        if self.same is None:
            return mask
        if mask.dtype is torch.bool:
            return mask & self.same
        return torch.where(self.same, mask, mask + windows.shift_bias)

    def add_to(self, dmask: Tensor, part: Tensor, windows: Windows, samples: int) -> None:
        """Add the gradient of what `masked` returns to the mask's, which is contiguous. If each window has a mask, this
        part has all windows of its kind."""
        into, rows = self._that_exist(dmask, windows), part.shape[2] if dmask.shape[2] > 1 else 1
        if dmask.shape[0] == 1:
            into += part.sum_to_size(1, dmask.shape[1], rows, part.shape[3]).view(into.shape)
        else:
            part = part.unflatten(0, (samples, -1))
            part = part.sum_to_size(1, part.shape[1], dmask.shape[1], rows, part.shape[4])
            into[self.numbers[: part.shape[1]]] = part.view(part.shape[1], *into.shape[1:])

    def _that_exist(self, mask: Tensor, windows: Windows) -> Tensor:
        """Return a view of a mask (..., n or 1, n) with tokens as rows and columns of a window, without those that do
        not exist."""
        (h, w), several = self.size, mask.shape[2] > 1
        mask = mask.unflatten(3, windows.window)[..., :h, :w]
        return mask.unflatten(2, windows.window)[:, :, :h, :w] if several else mask

    def of_lse(self, lse: Tensor, windows: Windows) -> Tensor:
        """Return the LSE of these windows from that of all of them, (windows, ..., n)."""
        h, w = self.size
        return lse.index_select(0, self.places).unflatten(-1, windows.window)[..., :h, :w].flatten(-2)

    def put_lse(self, found: Tensor, lse: Tensor, windows: Windows) -> None:
        """Write what `of_lse` returns."""
        if self.size == windows.window:
            lse.index_copy_(0, self.places, found)
        else:
            h, w = self.size
            lse.unflatten(-1, windows.window)[self.places, ..., :h, :w] = found.unflatten(-1, self.size)


class _Kind(NamedTuple):
    """The windows of one sample that are cut and shifted alike: fields as of `_Part`, tokens (windows, tokens)."""

    numbers: Tensor
    size: tuple[int, int]
    tokens: Tensor | None
    same: Tensor | None


@functools.lru_cache(16)
def _kinds(windows: Windows, device: torch.device) -> list[_Kind]:
    (gh, gw), (wh, ww), (sh, sw), _ = windows
    across, kinds = -(-gw // ww), []
    for rows in _sides(gh, wh, sh):
        for columns in _sides(gw, ww, sw):
            y, of_rows = _rows_of(rows, wh, sh, gh, device)
            x, of_columns = _rows_of(columns, ww, sw, gw, device)
            numbers = (_range(rows, device)[:, None] * across + _range(columns, device)).flatten()
            size, same = (rows.length, columns.length), None
            if rows.split or columns.split:
                region = (of_rows[:, None] * 2 + of_columns).flatten()
                same = (region[:, None] == region)[None, None]
            tokens = (y[:, None, :, None] * gw + x[:, None]).view(len(numbers), -1)
            whole = size == (gh, gw) and not (sh or sw)
            kinds.append(_Kind(numbers, size, None if whole else tokens, same))
    return kinds


_BYTES = 1 << 22  # of q, k and v at a time on a core: copies of windows stay in the cache, calls are not too many


def _parts(qkv: Tensor, windows: Windows, whole: bool = False) -> Iterator[_Part]:
    """Cut the windows of qkv (B, gh, gw, 3, H, d) into parts. whole: no smaller ones than windows that are alike."""
    if qkv.numel() == 0:
        return
    # what is made for fake tensors is fake, and what a CUDA graph captures is made when it is replayed
    kinds = _kinds if qkv.is_cpu and not is_fake(qkv) else _kinds.__wrapped__
    of_window = windows.tokens * math.prod(qkv.shape[3:]) * qkv.element_size()
    most = max(torch.get_num_threads() * _BYTES // of_window, 1)
    whole = whole or not qkv.is_cpu
    sample = torch.arange(qkv.shape[0], device=qkv.device)[:, None]
    for number, size, tokens, same in kinds(windows, qkv.device):
        numbers, places = number.repeat(len(sample)), (sample * windows.of_sample + number).flatten()
        if tokens is None:
            yield _Part(numbers, places, size, None, None)
            continue
        tokens = (sample[..., None] * math.prod(windows.grid) + tokens).flatten(0, 1)
        step = len(places) if whole else most
        for i in range(0, len(places), step):
            some = slice(i, i + step)
            yield _Part(numbers[some], places[some], size, tokens[some].flatten(), same)


def _range(side: _Side, device: torch.device) -> Tensor:
    return torch.arange(side.first, side.first + side.windows, device=device)


def _rows_of(side: _Side, window: int, shift: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the rows of the grid in each window (windows, length), and 1 for those that the roll brings, else 0."""
    within = torch.arange(side.length, device=device)
    first = _range(side, device)[:, None] * window
    return (first + within + shift) % size, (within >= side.split).long()


def _by_token(x: Tensor) -> Tensor:
    """Return x (B, gh, gw, ...) as (tokens of all samples, numbers of a token), contiguous."""
    return x.reshape(math.prod(x.shape[:3]), math.prod(x.shape[3:])).contiguous()


def attention_windows_fwd(
    qkv: Tensor, mask: Tensor | None, seed: Tensor | None, window: list[int], shift: list[int], shift_bias: float,
    scale: float, dropout_p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    windows, H = windows_of(qkv, window, shift, shift_bias), qkv.shape[4]
    o = torch.empty((*qkv.shape[:3], *qkv.shape[4:]), dtype=qkv.dtype, device=qkv.device)
    lse = torch.full(lse_shape(qkv, mask, windows), torch.inf, dtype=stat_dtype(qkv), device=qkv.device)
    qkv_by_token, o_by_token = map(_by_token, (qkv, o))
    for i, part in enumerate(_parts(qkv, windows, seed is not None)):
        q, k, v = part.take(qkv_by_token, H, 3)
        its_seed = None if seed is None else seed + i
        its_o, its_lse = attention_fwd(q, k, v, part.masked(mask, windows), its_seed, scale, dropout_p)
        part.put(its_o, o_by_token)
        part.put_lse(its_lse, lse, windows)
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
    wide = mask.to(stat_dtype(qkv))  # of which each part adds to the gradient
    dmask = torch.zeros(mask.shape, dtype=wide.dtype, device=mask.device)
    windows = windows_of(qkv, window, shift, shift_bias)
    return _backward(do, qkv, wide, o, lse, seed, windows, scale, dropout_p, dmask), dmask.to(mask.dtype)


def _backward(
    do: Tensor, qkv: Tensor, mask: Tensor | None, o: Tensor, lse: Tensor, seed: Tensor | None, windows: Windows,
    scale: float, dropout_p: float, dmask: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return dqkv, and add to dmask, a contiguous tensor of the mask's shape, the mask's gradient."""
    dqkv, H = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device), qkv.shape[4]
    do, qkv_by_token, o, dqkv_by_token = map(_by_token, (do, qkv, o, dqkv))
    whole = seed is not None or (dmask is not None and dmask.shape[0] > 1)
    for i, part in enumerate(_parts(qkv, windows, whole)):
        (q, k, v), (its_do,) = part.take(qkv_by_token, H, 3), part.take(do, H)
        its_mask = part.masked(mask, windows)
        its_dqkv = torch.empty((*q.shape[:2], *qkv.shape[3:]), dtype=qkv.dtype, device=qkv.device)
        out = its_dqkv.unbind(2)
        its_seed = None if seed is None else seed + i
        if dmask is None or its_mask is None:
            (its_o,), its_lse = part.take(o, H), part.of_lse(lse, windows)
            attention_bwd(its_do, q, k, v, its_mask, its_o, its_lse, its_seed, scale, dropout_p, out=out)
        else:  # reads neither o nor lse
            *_, of_mask = attention_bwd_with_mask(
                its_do, q, k, v, its_mask, o, lse, its_seed, scale, dropout_p, out=out
            )
            part.add_to(dmask, of_mask, windows, qkv.shape[0])
        part.put(its_dqkv, dqkv_by_token)
    return dqkv


def attention_windows_relative_fwd(qkv: Tensor, rows: Tensor, columns: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    windows, H = relative_windows_of(qkv, rows, columns), qkv.shape[4]
    o = torch.empty((*qkv.shape[:3], *qkv.shape[4:]), dtype=qkv.dtype, device=qkv.device)
    lse = qkv.new_empty(lse_shape(qkv, None, windows), dtype=stat_dtype(qkv))
    qkv_by_token, rows, columns, o_by_token = map(_by_token, (qkv, rows, columns, o))
    for part in _parts(qkv, windows):
        (q, k, v), (its_rows,), (its_columns,) = (
            part.take(qkv_by_token, H, 3),
            part.take(rows, H),
            part.take(columns, H),
        )
        its_o, its_lse = attention_relative_fwd(q, k, v, its_rows, its_columns, scale)
        part.put(its_o, o_by_token)
        part.put_lse(its_lse, lse, windows)
    return o, lse


def attention_windows_relative_bwd(
    do: Tensor, qkv: Tensor, rows: Tensor, columns: Tensor, o: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = empty_gradients(qkv, rows, columns)
    windows, H = relative_windows_of(qkv, rows, columns), qkv.shape[4]
    qkv_by_token, rows, columns, do, *gradients_by_token = map(_by_token, (qkv, rows, columns, do, *gradients))
    for part in _parts(qkv, windows):
        q, k, v = part.take(qkv_by_token, H, 3)
        (its_rows,), (its_columns,), (its_do,) = (part.take(t, H) for t in (rows, columns, do))
        its_dqkv = torch.empty((*q.shape[:2], *qkv.shape[3:]), dtype=qkv.dtype, device=qkv.device)
        *_, drows, dcolumns = attention_relative_bwd(
            its_do, q, k, v, its_rows, its_columns, o, lse, scale, out=its_dqkv.unbind(2)
        )
        for found, gradient in zip((its_dqkv, drows, dcolumns), gradients_by_token, strict=True):
            part.put(found, gradient)
    dqkv, drows, dcolumns = gradients
    return dqkv, drows, dcolumns
