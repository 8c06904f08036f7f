"""Blocks of tokens on a grid with attention within shifted windows, as Swin has them (Liu et al. 2021,
arXiv:2103.14030): (B, gh, gw, D) -> (B, gh, gw, D)."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastvit import ops
from fastvit.blocks import run
from fastvit.blocks.recompute import DEFAULT, Recompute
from fastvit.blocks.spec import AttentionSpec, HalfSpec, MlpSpec


class WindowBlock(NamedTuple):
    """A pre-norm block. bias: (H, n, n) for windows of n tokens. Where the grid is no multiple of the window, it is
    padded with zeros after the norm, which attention sees. rolls_first: whether a shift rolls the grid before it is
    padded, so that the shift's mask lies elsewhere (timm); otherwise after."""

    attention: HalfSpec[AttentionSpec]
    mlp: HalfSpec[MlpSpec]
    bias: Tensor
    window: tuple[int, int]
    shift: tuple[int, int]
    rolls_first: bool = False


def run_block(x: Tensor, block: WindowBlock, recompute: Recompute = DEFAULT) -> Tensor:
    half = partial(_run_attention_half, block=block)
    x = half(x) if recompute.attention == "none" else run.run_again(half, x)
    return run.run_mlp_half(x.flatten(1, 2), block.mlp, recompute=recompute.mlp).view(x.shape)


def _run_attention_half(x: Tensor, block: WindowBlock) -> Tensor:
    half, (gh, gw), tokens = block.attention, x.shape[1:3], x.flatten(1, 2)
    attn, (down, across) = half.branch, (-gh % block.window[0], -gw % block.window[1])
    if attn.adapted or down or across:
        padded, rolled = run.run_norm(x, half.norm), block.rolls_first and any(block.shift) and (down or across)
        if rolled:
            padded = _roll(padded, block.shift, -1)
        padded = F.pad(padded, (0, 0, 0, across, 0, down))
        if rolled:  # for the op, which rolls it again
            padded = _roll(padded, block.shift, 1)
        qkv = torch.cat([run.run_linear(padded, layer) for layer in attn.qkv], -1)
        attended = _roll(_attend(qkv, block), block.shift, -1) if rolled else _attend(qkv, block)
        attended = attended[:, :gh, :gw]
        attended = _roll(attended, block.shift, 1) if rolled else attended
    else:
        attended = _attend(run.norm_and_project(tokens, half).unflatten(1, (gh, gw)), block)
    return run.run_last(attended.flatten(1, 2), attn.proj, attn.proj_drop, tokens, half).view(x.shape)


def _attend(qkv: Tensor, block: WindowBlock) -> Tensor:
    """Attend with packed q, k and v: (B, gh, gw, 3 * H * d) -> (B, gh, gw, H * d)."""
    attn = block.attention.branch
    qkv = qkv.unflatten(-1, (3, attn.num_heads, -1))
    out = ops.attention_windows(
        qkv, block.window, shift=block.shift, attn_mask=block.bias, scale=attn.scale, dropout_p=attn.attn_drop
    )
    return out.flatten(3)


def _roll(x: Tensor, shift: tuple[int, int], by: int) -> Tensor:
    return torch.roll(x, (by * shift[0], by * shift[1]), (1, 2))


def bias_of(table: Tensor, index: Tensor) -> Tensor:
    """Return the bias of each pair of tokens, (H, n, n), from a table (positions, H) and its rows (n, n)."""
    return table[index].permute(2, 0, 1)
