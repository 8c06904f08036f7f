"""Swin Transformer in transformers (version 5): layers over a grid, (B, gh * gw, D), with attention within shifted
windows."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from fastvit.blocks import read, run, windows
from fastvit.blocks.read import LINEAR, NORM
from fastvit.blocks.recompute import DEFAULT, Recompute
from fastvit.blocks.spec import AttentionSpec, HalfSpec, MlpSpec
from fastvit.blocks.submodules import CannotFuse, submodules
from fastvit.blocks.windows import WindowBlock
from fastvit.integrations.forward import ClassHandler
from fastvit.integrations.transformers.hooks import (
    LayerSpec,
    attention_of,
    captures_attentions,
    check_attention,
    check_no_weights,
    check_version,
    checkpoint_of,
)

_FILE = "transformers.models.swin.modeling_swin"
_SHIFT_BIAS = -100.0  # as `SwinLayer.get_attn_mask` has it
_LINEAR = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), LINEAR)


def read_attention(attn: Any, dropout: Any) -> AttentionSpec:
    check_attention(attn)
    check_no_weights(attn)
    *qkv, out = submodules(attn, _LINEAR)
    if any(layer.out_features != out.in_features for layer in qkv):
        raise CannotFuse(f"q, k and v have other widths than the {out.in_features} inputs of o_proj")
    layers, p = tuple(map(read.read_layer, qkv)), attn.attention_dropout if attn.training else 0.0
    return read.describe_attention(layers, out, attn.num_attention_heads, attn.scaling, p, dropout)


def read_mlp(mlp: Any, dropout: read.Dropout = None) -> MlpSpec:
    fc1, act, fc2 = submodules(mlp, fc1=LINEAR, activation_fn=read.ACTIVATIONS, fc2=LINEAR)
    return read.describe_mlp(fc1, act, fc2, None, dropout)


def read_layer(layer: Any) -> LayerSpec[WindowBlock]:
    check_version()
    attn = attention_of(layer, "attention", f"{_FILE}.SwinAttention")
    norm1, norm2, mlp = submodules(layer, layernorm_before=NORM, layernorm_after=NORM, mlp={f"{_FILE}.SwinMLP"})
    dropout, drop_path = submodules(layer, dropout=read.DROPOUT, drop_path={nn.Identity, f"{_FILE}.SwinDropPath"})
    (positions,) = submodules(attn, relative_position_bias={f"{_FILE}.SwinRelativePositionBias"})
    side, n = layer.window_size, positions.window_area
    if n != side * side:
        raise CannotFuse(f"a relative position bias of {n} tokens, for windows of {side} x {side}")
    bias = windows.bias_of(positions.relative_position_bias_table, positions.relative_position_index.view(n, n))
    p, _ = read.read_drop_path(drop_path)
    first: HalfSpec[AttentionSpec] = HalfSpec(read_attention(attn, dropout), read.read_norm(norm1), None, p)
    second: HalfSpec[MlpSpec] = HalfSpec(read_mlp(mlp, dropout), read.read_norm(norm2))
    shift = layer.shift_size, layer.shift_size
    return LayerSpec(WindowBlock(first, second, bias, (side, side), shift, _SHIFT_BIAS), checkpoint_of(layer))


def check_call(
    layer: Any, hidden_states: Tensor, input_dimensions: Any, always_partition: bool = False, **kwargs: Any
) -> Tensor:
    if captures_attentions():
        raise CannotFuse("attention weights are collected")
    if not always_partition:  # for good, as in the layer's own forward
        layer.set_shift_and_window_size(input_dimensions)
    return hidden_states


def grid_of(layer: Any, hidden_states: Tensor, input_dimensions: Any, *_: Any, **__: Any) -> dict[str, Any]:
    height, width = input_dimensions
    return {"grid": (height, width)}


def run_layer(
    x: Tensor, layer: LayerSpec[WindowBlock], grid: tuple[int, int], recompute: Recompute = DEFAULT
) -> tuple[Tensor, None]:
    """Run a layer. The second result stands for the weights of attention."""
    forward = partial(windows.run_block, block=layer.block, recompute=recompute)
    x = x.unflatten(1, grid)
    return (forward(x) if layer.checkpoint is None else layer.checkpoint(forward, x)).flatten(1, 2), None


HANDLERS: dict[type | str, ClassHandler] = {
    f"{_FILE}.SwinLayer": ClassHandler(read_layer, run_layer, check_call, options=grid_of, takes_recompute=True),
    f"{_FILE}.SwinMLP": ClassHandler(read_mlp, run.run_mlp, ndim=None),
}
EMBEDDINGS = {f"{_FILE}.SwinPatchEmbeddings": "projection"}
