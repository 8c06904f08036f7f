"""Layers over a grid in transformers (version 5): SAM's encoder, those with the same code, and VitDet, (B, H, W, D);
Swin Transformer from version 5.12 on, (B, gh * gw, D), with attention within shifted windows."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from fastvit.blocks import grid, read, windows
from fastvit.blocks.grid import GridAttention, GridBlock, Positions
from fastvit.blocks.read import LINEAR
from fastvit.blocks.recompute import Recompute
from fastvit.blocks.submodules import CannotFuse, Classes, submodules
from fastvit.blocks.windows import WindowBlock
from fastvit.integrations.forward import Call, ClassHandler
from fastvit.integrations.transformers import hooks
from fastvit.integrations.transformers.classes import SAM, class_of
from fastvit.integrations.transformers.layers import LayerHandler, read_layer

_BIAS: dict[str, Classes] = {"relative_position_bias": {class_of("Swin", "RelativePositionBias")}}
_SHIFT_BIAS = -100.0  # as `SwinLayer.get_attn_mask` has it


def read_attention(attn: Any) -> GridAttention:
    """Read attention of SAM, or of VitDet, which has other names and drops no probabilities."""
    hooks.check_version()
    if "use_rel_pos" in attn.__dict__:
        drops = attn.training and "Sdpa" not in type(attn).__name__  # SDPA's drops none
        heads, p, has_positions = attn.num_attention_heads, attn.dropout if drops else 0.0, attn.use_rel_pos
    else:
        heads, p, has_positions = attn.num_heads, 0.0, attn.use_relative_position_embeddings
    qkv, proj = submodules(attn, qkv=LINEAR, proj=LINEAR)
    attention = read.describe_attention(read.read_packed(qkv, proj), proj, heads, attn.scale, p, None)
    if not has_positions:
        return GridAttention(attention, Positions())
    grid.check_relative_positions(attention)
    return GridAttention(attention, Positions((attn.rel_pos_h, attn.rel_pos_w)))


def read_grid_layer(prefix: str, layer: Any) -> GridBlock:
    if prefix == "VitDet" and layer.use_residual_block:
        raise CannotFuse("convolutions after its MLP")
    halves = read_layer(prefix, layer, lambda _, attn, dropout: read_attention(attn))
    return grid.describe_block(*halves, layer.window_size)


def read_call(module: Any, hidden_states: Any, output_attentions: Any = None) -> Call:
    if output_attentions:
        raise CannotFuse("the argument output_attentions")
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


def read_swin_layer(layer: Any) -> WindowBlock:
    first, second = read_layer("Swin", layer)
    if first.branch.kv_heads:
        raise CannotFuse("heads that share keys, in windows")
    attn = layer._modules["attention"]
    hooks.check_no_weights(attn)
    (positions,) = submodules(attn, _BIAS)
    side, n = layer.window_size, positions.window_area
    if n != side * side:
        raise CannotFuse(f"a relative position bias of {n} tokens, for windows of {side} x {side}")
    bias = windows.bias_of(positions.relative_position_bias_table, positions.relative_position_index.view(n, n))
    window, shift, second = (side, side), (layer.shift_size, layer.shift_size), second._replace(drop_path=0.0)
    return WindowBlock(first, second, bias, window, shift, _SHIFT_BIAS)


def read_swin_call(
    layer: Any, hidden_states: Tensor, input_dimensions: Any, always_partition: bool = False, **kwargs: Any
) -> Call:
    if hooks.captures_attentions():
        raise CannotFuse("attention weights are collected")
    if not always_partition:  # for good, as in the layer's own forward
        layer.set_shift_and_window_size(input_dimensions)
    height, width = input_dimensions
    return hidden_states, {"size": (height, width)}


def run_swin_layer(x: Tensor, layer: WindowBlock, size: tuple[int, int], recompute: Recompute) -> tuple[Tensor, None]:
    """Run a layer. The second result stands for the weights of attention."""
    return windows.run_block(x.unflatten(1, size), layer, recompute).flatten(1, 2), None


HANDLERS: dict[type | str, ClassHandler] = {
    class_of("VitDet", "Layer"): LayerHandler(partial(read_grid_layer, "VitDet"), run_vitdet_layer, read_call, ndim=4),
    class_of("Swin", "Layer"): LayerHandler(read_swin_layer, run_swin_layer, read_swin_call),
    class_of("VitDet", "Attention"): ClassHandler(read_attention, run_vitdet_attention, read_vitdet_call, ndim=4),
}
for _prefix in SAM:
    HANDLERS[class_of(_prefix, "VisionLayer")] = LayerHandler(
        partial(read_grid_layer, _prefix), grid.run_block, read_call, ndim=4
    )
    # the other attention returns its weights as well
    HANDLERS[class_of(_prefix, "VisionSdpaAttention")] = ClassHandler(
        read_attention, run_sdpa_attention, read_call, ndim=4
    )
