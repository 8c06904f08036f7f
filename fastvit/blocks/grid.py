"""Blocks of tokens on a grid, (B, H, W, D) -> (B, H, W, D), as SAM and ViTDet have them: attention within windows or
across the whole grid, with decomposed relative positions or without (Li et al. 2022, arXiv:2203.16527)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastvit import ops
from fastvit.blocks import run
from fastvit.blocks.recompute import DEFAULT, Recompute
from fastvit.blocks.spec import AttentionSpec, HalfSpec, MlpSpec
from fastvit.blocks.submodules import CannotFuse
from fastvit.ops import Relative, Rotary


class Positions(NamedTuple):
    """Positions in attention over a grid, of one kind or none.

    tables: relative positions of rows and of columns, (2 * gh - 1, d) and (2 * gw - 1, d); they are interpolated for a
    grid of another size. rotary: tables of rotary positions. gh and gw are those of a window, or of the whole grid."""

    tables: tuple[Tensor, Tensor] | None = None
    rotary: Rotary | None = None


class GridAttention(NamedTuple):
    """Attention over a grid. Its qkv is one packed layer."""

    attention: AttentionSpec
    positions: Positions


class GridBlock(NamedTuple):
    """A pre-norm block over a grid.

    window: rows and columns of the windows of attention; None for the whole grid. The last windows are padded with
    zeros after the norm. drops_windows: whether stochastic depth drops windows after attention, not samples."""

    attention: HalfSpec[AttentionSpec]
    positions: Positions
    mlp: HalfSpec[MlpSpec]
    window: tuple[int, int] | None = None
    drops_windows: bool = False


def describe_block(
    first: HalfSpec[Any], mlp: HalfSpec[MlpSpec], window_size: int, drops_windows: bool = False
) -> GridBlock:
    """Describe a block. first: a half with GridAttention. window_size: 0 for the whole grid."""
    attention, positions = first.branch
    window = (window_size, window_size) if window_size else None
    return GridBlock(first._replace(branch=attention), positions, mlp, window, drops_windows)


def run_block(x: Tensor, block: GridBlock, recompute: Recompute = DEFAULT) -> Tensor:
    return run_halves(x, partial(_run_attention_half, block=block), block.mlp, recompute)


def run_halves(
    x: Tensor, attention: Callable[[Tensor], Tensor], mlp: HalfSpec[MlpSpec], recompute: Recompute
) -> Tensor:
    """Run a block over a grid. attention: the function that runs its first half, (B, H, W, D) -> (B, H, W, D)."""
    x = attention(x) if recompute.attention == "none" else run.run_again(attention, x)
    return run.run_mlp_half(x.flatten(1, 2), mlp, recompute=recompute.mlp).view(x.shape)


def run_attention(x: Tensor, grid: GridAttention) -> Tensor:
    attn, positions = grid
    attended = _attend(run.project(x, attn), attn, positions, (x.shape[1], x.shape[2]))
    return ops.dropout(run.run_linear(attended, attn.proj), attn.proj_drop)


def _run_attention_half(x: Tensor, block: GridBlock) -> Tensor:
    half, window = block.attention, block.window or (x.shape[1], x.shape[2])
    attn = half.branch
    attended = attend_on_grid(x, half, window, partial(_attend, attn=attn, positions=block.positions, window=window))
    tokens, attended = x.flatten(1, 2), attended.flatten(1, 2)
    if half.drop_path and block.drops_windows and block.window:
        tokens, attended = tokens.flatten(0, 1), attended.flatten(0, 1)
        half = half._replace(drop_path=0.0, row_scale=_draw_windows(x, half, window))
    return run.run_last(attended, attn.proj, attn.proj_drop, tokens, half).view(x.shape)


def attend_on_grid(
    x: Tensor, half: HalfSpec[AttentionSpec], window: tuple[int, int], attend: Callable[[Tensor], Tensor],
    rolled: tuple[int, int] = (0, 0),
) -> Tensor:  # fmt: skip
    """Run half a block up to the projection after attention: (B, gh, gw, D) -> (B, gh, gw, H * d). Where the grid is no
    multiple of the window, it is padded with zeros after the norm, which attention sees.

    attend: function of packed q, k and v, (B, rows, columns, 3 * H * d) -> (B, rows, columns, H * d). rolled: how far
    the grid is rolled up and to the left before it is padded, and back before `attend`."""
    gh, gw = x.shape[1:3]
    down, across = -gh % window[0], -gw % window[1]
    if not (down or across):
        return attend(run.norm_and_project(x.flatten(1, 2), half).unflatten(1, (gh, gw)))
    padded = F.pad(_roll(run.run_norm(x, half.norm), rolled, -1), (0, 0, 0, across, 0, down))
    attended = attend(run.project(_roll(padded, rolled, 1), half.branch))
    return _roll(_roll(attended, rolled, -1)[:, :gh, :gw], rolled, 1)


def _roll(x: Tensor, shift: tuple[int, int], by: int) -> Tensor:
    return torch.roll(x, (by * shift[0], by * shift[1]), (1, 2)) if any(shift) else x


def _attend(qkv: Tensor, attn: AttentionSpec, positions: Positions, window: tuple[int, int]) -> Tensor:
    """Attend within windows, of which there may be one: (B, gh, gw, 3 * H * d) -> (B, gh, gw, H * d)."""
    grid, (tables, rotary) = (qkv.shape[1], qkv.shape[2]), positions
    if tables is None and grid == window:
        return run.attend_packed(qkv.flatten(1, 2), attn, rotary, None, False).unflatten(1, grid)
    qkv = qkv.unflatten(-1, (3, attn.num_heads, -1))
    if rotary is not None:
        rotary = rotary._replace(sin=_repeated(rotary.sin, grid, window), cos=_repeated(rotary.cos, grid, window))
    if attn.qk_norm is not None:
        q, k, v = qkv.flatten(1, 2).unbind(2)
        qkv = torch.stack((*run.normed_and_rotated(q, k, attn.qk_norm, rotary), v), 2).unflatten(1, grid)
    elif rotary is not None:
        qkv = ops.rotary_qkvpacked(qkv.flatten(1, 2), rotary).unflatten(1, grid)
    relative = None if tables is None else relative_positions(qkv[:, :, :, 0], *tables, window)
    out = ops.attention_windows(qkv, window, relative=relative, scale=attn.scale, dropout_p=attn.attn_drop)
    return run.join_heads(out, attn)


def _repeated(table: Tensor, grid: tuple[int, int], window: tuple[int, int]) -> Tensor:
    """Return the rows of a table (wh * ww, d) for the tokens of all windows, (gh * gw, d)."""
    (gh, gw), (wh, ww) = grid, window
    return table.view(wh, ww, -1).repeat(gh // wh, gw // ww, 1).flatten(0, 1)


def _draw_windows(x: Tensor, half: HalfSpec[AttentionSpec], window: tuple[int, int]) -> Tensor:
    """Draw stochastic depth for the windows of x (B, gh, gw, D): the factor of each token, (B * gh * gw,)."""
    B, gh, gw, _ = x.shape
    down, across = -(-gh // window[0]), -(-gw // window[1])
    drawn = run.draw_drop_path(x, half.drop_path, half.scale_by_keep, count=B * down * across)
    factors = drawn.view(B, down, across).repeat_interleave(window[0], 1)[:, :gh]
    return factors.repeat_interleave(window[1], 2)[:, :, :gw].flatten()


def relative_positions(q: Tensor, row_table: Tensor, column_table: Tensor, window: tuple[int, int]) -> Relative:
    """Return what each query adds to its scores: products of q (B, gh, gw, H, d) and the tables' vectors for the
    distances between its row or column and those of the keys in its window."""
    q = q.unflatten(2, (-1, window[1])).unflatten(1, (-1, window[0]))
    rows = torch.einsum("bYyXxhc,ykc->bYyXxhk", q, _between(row_table, window[0]))
    columns = torch.einsum("bYyXxhc,xkc->bYyXxhk", q, _between(column_table, window[1]))
    return Relative(*[t.flatten(3, 4).flatten(1, 2) for t in (rows, columns)])


def _between(table: Tensor, size: int) -> Tensor:
    """Return the table's vectors for each pair of rows, (size, size, d). table: (2 * gh - 1, d), by distance from
    1 - gh on; interpolated if gh is another size."""
    if len(table) != 2 * size - 1:
        table = F.interpolate(table.T[None], size=2 * size - 1, mode="linear")[0].T
    row = torch.arange(size, device=table.device)
    return table[row[:, None] - row + size - 1]


def check_relative_positions(attn: AttentionSpec) -> None:
    """Raise CannotFuse for what attention has that the op with relative positions does not."""
    if attn.attn_drop:
        raise CannotFuse("dropout of attention with relative positions")
