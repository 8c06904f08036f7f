"""timm's SAM encoder: blocks over a grid, with relative or rotary positions."""

from __future__ import annotations

from typing import Any

from fastvit.blocks import grid, read_timm
from fastvit.blocks.grid import GridAttention, GridBlock, Positions
from fastvit.blocks.read import DROP_PATH, LAYER_SCALE, NORM
from fastvit.blocks.submodules import Classes, submodules
from fastvit.integrations.forward import ClassHandler
from fastvit.ops import Rotary

_FILE = "timm.models.vision_transformer_sam"
ATTENTION: Classes = {f"{_FILE}.Attention"}
_HALF: dict[str, Classes] = {"attn": ATTENTION, "norm1": NORM, "ls1": LAYER_SCALE, "drop_path1": DROP_PATH}


def read_attention(attn: Any) -> GridAttention:
    attention = read_timm.read_attention(attn)
    positions = Positions()
    if attn.use_rel_pos:
        grid.check_relative_positions(attention)
        positions = Positions((attn.rel_pos_h, attn.rel_pos_w))
    elif attn.rope is not None:
        (rope,) = submodules(attn, rope={"timm.layers.pos_embed_sincos.RotaryEmbeddingCat"})
        sin, cos = rope.get_embed().chunk(2, dim=-1)
        positions = Positions(rotary=Rotary(sin, cos, interleaved=True))
    return GridAttention(attention, positions)


def read_block(block: Any) -> GridBlock:
    attention_half = read_timm.read_half(read_attention, _HALF, block)
    attention, positions = attention_half.branch
    half = attention_half._replace(branch=attention)
    window = (block.window_size, block.window_size) if block.window_size else None
    return GridBlock(half, positions, read_timm.read_mlp_half(block), window, drops_windows=True)


HANDLERS = {
    f"{_FILE}.Block": ClassHandler(read_block, grid.run_block, ndim=4, takes_recompute=True),
    **dict.fromkeys(ATTENTION, ClassHandler(read_attention, grid.run_attention, ndim=4)),
}
EMBEDDINGS: dict[str, str] = {}
