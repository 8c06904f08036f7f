"""Blocks of tokens on a grid with attention within shifted windows, as Swin has them (Liu et al. 2021,
arXiv:2103.14030): (B, gh, gw, D) -> (B, gh, gw, D)."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from torch import Tensor

from fastvit import ops
from fastvit.blocks import run
from fastvit.blocks.grid import attend_on_grid, run_halves
from fastvit.blocks.recompute import DEFAULT, Recompute
from fastvit.blocks.spec import AttentionSpec, HalfSpec, MlpSpec


class WindowBlock(NamedTuple):
    """A pre-norm block. bias: (H, n, n) for windows of n tokens. Where the grid is no multiple of the window, it is
    padded with zeros after the norm, which attention sees. rolls_first: whether a shift rolls the grid before it is
    padded, so that the shift's mask lies elsewhere (timm); otherwise after. shift_bias: what the model adds to the
    scores of tokens that only the shift has made neighbours."""

    attention: HalfSpec[AttentionSpec]
    mlp: HalfSpec[MlpSpec]
    bias: Tensor
    window: tuple[int, int]
    shift: tuple[int, int]
    shift_bias: float
    rolls_first: bool = False


def run_block(x: Tensor, block: WindowBlock, recompute: Recompute = DEFAULT) -> Tensor:
    return run_halves(x, partial(_run_attention_half, block=block), block.mlp, recompute)


def _run_attention_half(x: Tensor, block: WindowBlock) -> Tensor:
    half = block.attention
    rolled = block.shift if block.rolls_first else (0, 0)
    attended = attend_on_grid(x, half, block.window, partial(_attend, block=block), rolled).flatten(1, 2)
    return run.run_last(attended, half.branch.proj, half.branch.proj_drop, x.flatten(1, 2), half).view(x.shape)


def _attend(qkv: Tensor, block: WindowBlock) -> Tensor:
    """Attend with packed q, k and v: (B, gh, gw, 3 * H * d) -> (B, gh, gw, H * d)."""
    attn = block.attention.branch
    qkv = qkv.unflatten(-1, (3, attn.num_heads, -1))
    out = ops.attention_windows(
        qkv,
        block.window,
        shift=block.shift,
        shift_bias=block.shift_bias,
        attn_mask=block.bias,
        scale=attn.scale,
        dropout_p=attn.attn_drop,
    )
    return out.flatten(3)


def bias_of(table: Tensor, index: Tensor) -> Tensor:
    """Return the bias of each pair of tokens, (H, n, n), from a table (positions, H) and its rows (n, n)."""
    return table[index].permute(2, 0, 1)
