"""Swin Transformer in transformers (version 5): layers over a grid, (B, gh * gw, D), with attention within shifted
windows."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastvit.blocks import windows
from fastvit.blocks.recompute import Recompute
from fastvit.blocks.submodules import CannotFuse, Classes, submodules
from fastvit.blocks.windows import WindowBlock
from fastvit.integrations.forward import Call, ClassHandler
from fastvit.integrations.transformers import hooks
from fastvit.integrations.transformers.classes import class_of
from fastvit.integrations.transformers.layers import LayerHandler, read_layer

_BIAS: dict[str, Classes] = {"relative_position_bias": {class_of("Swin", "RelativePositionBias")}}
_SHIFT_BIAS = -100.0  # as `SwinLayer.get_attn_mask` has it


def read_window_layer(layer: Any) -> WindowBlock:
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


def read_call(
    layer: Any, hidden_states: Tensor, input_dimensions: Any, always_partition: bool = False, **kwargs: Any
) -> Call:
    if hooks.captures_attentions():
        raise CannotFuse("attention weights are collected")
    if not always_partition:  # for good, as in the layer's own forward
        layer.set_shift_and_window_size(input_dimensions)
    height, width = input_dimensions
    return hidden_states, {"grid": (height, width)}


def run_layer(x: Tensor, layer: WindowBlock, grid: tuple[int, int], recompute: Recompute) -> tuple[Tensor, None]:
    """Run a layer. The second result stands for the weights of attention."""
    return windows.run_block(x.unflatten(1, grid), layer, recompute).flatten(1, 2), None


HANDLERS: dict[type | str, ClassHandler] = {
    class_of("Swin", "Layer"): LayerHandler(read_window_layer, run_layer, read_call)
}
