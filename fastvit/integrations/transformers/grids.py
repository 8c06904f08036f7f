"""Layers over a grid in transformers (version 5): SAM's encoder, SAM 3 and VitDet, (B, H, W, D); Swin Transformer, and
MaskFormer's and Donut's, (B, gh * gw, D), with attention within shifted windows."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from fastvit.blocks import grid, read, windows
from fastvit.blocks.grid import GridAttention, GridBlock, Positions
from fastvit.blocks.read import LINEAR
from fastvit.blocks.recompute import Recompute
from fastvit.blocks.submodules import CannotFuse, qualified_name, submodules
from fastvit.blocks.windows import WindowBlock
from fastvit.integrations.forward import Call, ClassHandler
from fastvit.integrations.transformers import classes, hooks
from fastvit.integrations.transformers.attention import inner_of
from fastvit.integrations.transformers.attention import read_attention as read_plain_attention
from fastvit.integrations.transformers.classes import DINO, SAM, SAM3, VIT, Parts, qualified
from fastvit.integrations.transformers.layers import LayerHandler, read_layer
from fastvit.ops import Rotary

_SHIFT_BIAS = -100.0  # as `SwinLayer.get_attn_mask` has it


def read_attention(attn: Any) -> GridAttention:
    """Read attention of SAM, VitDet or SegGPT; of these only SAM's first kind drops probabilities."""
    hooks.check_version()
    own = attn.__dict__
    drops = attn.training and qualified_name(attn) not in classes.SAM_SDPA_ATTENTION | classes.VITDET_ATTENTION
    heads, p = own.get("num_attention_heads", own.get("num_heads")), attn.dropout if drops else 0.0
    has_positions = own.get("use_rel_pos", own.get("use_relative_position_embeddings"))
    qkv, proj = submodules(attn, qkv=LINEAR, proj=LINEAR)
    attention = read.describe_attention(read.read_packed(qkv, proj), proj, heads, attn.scale, p, None)
    if not has_positions:
        return GridAttention(attention, Positions())
    grid.check_relative_positions(attention)
    return GridAttention(attention, Positions((attn.rel_pos_h, attn.rel_pos_w)))


def read_grid_layer(parts: Parts, layer: Any) -> GridBlock:
    if getattr(layer, "use_residual_block", False):
        raise CannotFuse("convolutions after its MLP")
    attentions = classes.SAM_ATTENTION if parts == SAM else classes.VITDET_ATTENTION
    halves = read_layer(parts, layer, lambda attn, dropout: read_attention(attn), attentions)
    return grid.describe_block(*halves, layer.window_size)


def read_call(module: Any, hidden_states: Any, output_attentions: Any = None, **kwargs: Any) -> Call:
    hooks.check_others({"output_attentions": output_attentions, **kwargs})
    return hidden_states, {}


def read_vitdet_call(module: Any, hidden_state: Any, output_attentions: Any = None) -> Call:
    return read_call(module, hidden_state, output_attentions)


def run_vitdet_layer(x: Tensor, layer: GridBlock, recompute: Recompute) -> tuple[Tensor]:
    """Run a layer of (B, D, H, W)."""
    return (grid.run_block(x.permute(0, 2, 3, 1), layer, recompute).permute(0, 3, 1, 2),)


def run_sdpa_attention(x: Tensor, attn: GridAttention) -> tuple[Tensor, None]:
    return grid.run_attention(x, attn), None


def run_vitdet_attention(x: Tensor, attn: GridAttention) -> tuple[Tensor]:
    return (grid.run_attention(x, attn),)


def read_sam3_layer(layer: Any) -> GridBlock:
    """Read a layer of SAM 3, whose dropout is after its MLP only."""

    def without_positions(attn: Any, dropout: Any) -> GridAttention:
        return GridAttention(read_plain_attention(attn), Positions())

    return grid.describe_block(*read_layer(SAM3, layer, without_positions, classes.SAM3_ATTENTION), layer.window_size)


def read_sam3_call(layer: Any, hidden_states: Any, **kwargs: Any) -> Call:
    """Read a call, with rotary positions in float32 whatever the layer's dtype, the same in each window."""
    hooks.check_others(kwargs)
    cos, sin = layer.rotary_emb(layer.position_ids, layer.position_ids)
    return hidden_states, {"rotary": Rotary(sin, cos, interleaved=True)}


def run_sam3_layer(x: Tensor, layer: GridBlock, rotary: Rotary, recompute: Recompute) -> Tensor:
    return grid.run_block(x, layer._replace(positions=Positions(rotary=rotary)), recompute)


def read_swin_layer(layer: Any) -> WindowBlock:
    """Read a layer of Swin, whose attention is one module in newer code and two in older."""
    first, second = read_layer(VIT, layer, attentions=classes.SWIN_ATTENTION, outputs=classes.OUTPUT_ALONE)
    if first.branch.kv_heads:
        raise CannotFuse("heads that share keys, in windows")
    attn = layer._modules["attention"]
    inner = inner_of(attn)
    if inner is not None:
        positions = attn._modules[inner]
        n = positions.window_size[0] * positions.window_size[1]
    else:
        hooks.check_no_weights(attn)
        (positions,) = submodules(attn, relative_position_bias=classes.SWIN_BIAS)
        n = positions.window_area
    side = layer.window_size
    if n != side * side:
        raise CannotFuse(f"a relative position bias of {n} tokens, for windows of {side} x {side}")
    bias = windows.bias_of(positions.relative_position_bias_table, positions.relative_position_index.view(n, n))
    window, shift, second = (side, side), (layer.shift_size, layer.shift_size), second._replace(drop_path=0.0)
    return WindowBlock(first, second, bias, window, shift, _SHIFT_BIAS)


def read_swin_call(layer: Any, hidden_states: Tensor, input_dimensions: Any, *flags: Any, **kwargs: Any) -> Call:
    """Read a call. flags: always_partition, or Donut's two, which Swin's layers have before version 5.12."""
    if hooks.captures_attentions():
        raise CannotFuse("attention weights are collected")
    if len(flags) == 2:
        return read_donut_call(layer, hidden_states, input_dimensions, *flags)
    (always_partition,) = flags or (kwargs.get("always_partition", False),)
    return read_donut_call(layer, hidden_states, input_dimensions, always_partition=always_partition)


def read_donut_call(
    layer: Any, hidden_states: Tensor, input_dimensions: Any, output_attentions: Any = False,
    always_partition: bool = False,
) -> Call:  # fmt: skip
    hooks.check_others({"output_attentions": output_attentions})
    if not always_partition:  # for good, as in the layer's own forward
        layer.set_shift_and_window_size(input_dimensions)
    height, width = input_dimensions
    return hidden_states, {"size": (height, width)}


def read_maskformer_call(
    layer: Any, hidden_states: Tensor, input_dimensions: Any, output_attentions: Any = False
) -> Call:
    """Read a call of a layer that always shifts its windows, and pads small grids to one."""
    return read_donut_call(layer, hidden_states, input_dimensions, output_attentions, always_partition=True)


def run_swin_layer(x: Tensor, layer: WindowBlock, size: tuple[int, int], recompute: Recompute) -> tuple[Tensor, None]:
    """Run a layer. The second result stands for the weights of attention."""
    return windows.run_block(x.unflatten(1, size), layer, recompute).flatten(1, 2), None


def run_older_swin_layer(x: Tensor, layer: WindowBlock, **options: Any) -> tuple[Tensor]:
    return run_swin_layer(x, layer, **options)[:1]


_OLDER_SWIN = partial(ClassHandler, read_swin_layer, run_older_swin_layer, takes_recompute=True)
HANDLERS: dict[type | str, ClassHandler] = {
    qualified("sam.SamVisionLayer"): LayerHandler(partial(read_grid_layer, SAM), grid.run_block, read_call, ndim=4),
    qualified("vitdet.VitDetLayer"): LayerHandler(partial(read_grid_layer, DINO), run_vitdet_layer, read_call, ndim=4),
    qualified("sam3.Sam3ViTLayer"): LayerHandler(read_sam3_layer, run_sam3_layer, read_sam3_call, ndim=4),
    qualified("swin.SwinLayer"): LayerHandler(read_swin_layer, run_swin_layer, read_swin_call),
    qualified("donut.donut_swin.DonutSwinLayer"): _OLDER_SWIN(read_call=read_donut_call),
    qualified("maskformer.maskformer_swin.MaskFormerSwinLayer"): _OLDER_SWIN(read_call=read_maskformer_call),
    # SAM's other attention returns its weights as well
    **dict.fromkeys(
        classes.SAM_SDPA_ATTENTION, ClassHandler(read_attention, run_sdpa_attention, read_call, ndim=4)
    ),
    **dict.fromkeys(
        classes.VITDET_ATTENTION, ClassHandler(read_attention, run_vitdet_attention, read_vitdet_call, ndim=4)
    ),
}  # fmt: skip
