"""Blocks of tokens on a grid, (B, H, W, D) -> (B, H, W, D), as SAM and ViTDet have them: attention within windows or
across the whole grid, with decomposed relative positions or without (Li et al. 2022, arXiv:2203.16527)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

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
    grid of another size. rotary: tables of rotary positions."""

    tables: tuple[Tensor, Tensor] | None = None
    rotary: Rotary | None = None


class GridAttention(NamedTuple):
    """Attention over a grid. Its qkv is one packed layer."""

    attention: AttentionSpec
    positions: Positions


class GridBlock(NamedTuple):
    """A pre-norm block over a grid.

    window: the side of the windows of attention, 0 for the whole grid. The last windows are padded with zeros after the
    norm. drops_windows: whether stochastic depth drops windows after attention, not samples."""

    attention: HalfSpec[AttentionSpec]
    positions: Positions
    mlp: HalfSpec[MlpSpec]
    window: int = 0
    drops_windows: bool = False


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
    attended = _attend(run.project(x.flatten(1, 2), attn), attn, positions, *x.shape[1:3])
    return ops.dropout(run.run_linear(attended, attn.proj), attn.proj_drop).view(x.shape)


def _run_attention_half(x: Tensor, block: GridBlock) -> Tensor:
    half, window, (_, height, width, _) = block.attention, block.window, x.shape
    attn = half.branch
    if not window:
        tokens = x.flatten(1, 2)
        attended = _attend(run.norm_and_project(tokens, half), attn, block.positions, height, width)
        return run.run_last(attended, attn.proj, attn.proj_drop, tokens, half).view(x.shape)
    windows = _partition(run.run_norm(x, half.norm), window)
    attended = _attend(run.project(windows, attn), attn, block.positions, window, window)
    if half.drop_path and block.drops_windows:
        branch = run.run_last(attended, attn.proj, attn.proj_drop, attended.new_zeros(windows.shape), half)
        return x + _join(branch, window, height, width)
    # joined before the projection, which then adds the residual and leaves out the padding
    attended = _join(attended, window, height, width).flatten(1, 2)
    return run.run_last(attended, attn.proj, attn.proj_drop, x.flatten(1, 2), half).view(x.shape)


def _attend(qkv: Tensor, attn: AttentionSpec, positions: Positions, height: int, width: int) -> Tensor:
    """Attend with packed q, k and v: (B, height * width, 3 * H * d) -> (B, height * width, H * d)."""
    if positions.tables is None:
        return run.attend_packed(qkv, attn, positions.rotary, None, False)
    q, k, v = qkv.unflatten(-1, (3, attn.num_heads, -1)).unbind(2)
    q, k = run.placed(q, k, attn.qk_norm, None)
    relative = relative_positions(q, *positions.tables, height, width)
    return ops.attention(q, k, v, relative=relative, scale=attn.scale).flatten(2)


def relative_positions(q: Tensor, of_rows: Tensor, of_columns: Tensor, height: int, width: int) -> Relative:
    """Return what each query adds to its scores: products of q (B, height * width, H, d) and the tables' vectors for
    the distances between its row or column and the keys'."""
    q = q.unflatten(1, (height, width))
    rows = torch.einsum("byxhc,ykc->byxhk", q, _between(of_rows, height))
    columns = torch.einsum("byxhc,xkc->byxhk", q, _between(of_columns, width))
    return Relative(rows.flatten(1, 2), columns.flatten(1, 2))


def _between(table: Tensor, size: int) -> Tensor:
    """Return the table's vectors for each pair of rows, (size, size, d). table: (2 * gh - 1, d), by distance from
    1 - gh on; interpolated if gh is another size."""
    if len(table) != 2 * size - 1:
        table = F.interpolate(table.T[None], size=2 * size - 1, mode="linear")[0].T
    place = torch.arange(size, device=table.device)
    return table[place[:, None] - place + size - 1]


def _partition(x: Tensor, window: int) -> Tensor:
    """Return the windows of x (B, H, W, D), padded with zeros: (B * windows, window * window, D)."""
    _, height, width, _ = x.shape
    x = F.pad(x, (0, 0, 0, -width % window, 0, -height % window))
    x = x.unflatten(2, (-1, window)).unflatten(1, (-1, window))
    return x.transpose(2, 3).flatten(3, 4).flatten(0, 2)


def _join(windows: Tensor, window: int, height: int, width: int) -> Tensor:
    """Undo `_partition`: (B * windows, window * window, D) -> (B, height, width, D)."""
    down, across = -(-height // window), -(-width // window)
    x = windows.unflatten(1, (window, window)).unflatten(0, (-1, down, across))
    return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, :height, :width]


def with_relative_positions(attn: AttentionSpec) -> AttentionSpec:
    """Return the attention as it runs with relative positions. Raises CannotFuse if no op has it."""
    if attn.attn_drop:
        raise CannotFuse("dropout of attention with relative positions")
    return attn._replace(in_steps=True)
