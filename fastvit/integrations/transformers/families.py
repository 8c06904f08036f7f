"""Layers of transformers (version 5) with a call or a result of their own: BEiT and Data2Vec add relative positions to
the scores, MLCD and Llama 4 take rotary positions in another place or form, Mllama's branches have gates, and older
code returns tuples."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from fastvit.blocks import read, run
from fastvit.blocks.read import LINEAR
from fastvit.blocks.spec import AttentionSpec, BlockSpec
from fastvit.blocks.submodules import CannotFuse, submodules
from fastvit.integrations.forward import Call, ClassHandler
from fastvit.integrations.transformers import classes, hooks
from fastvit.integrations.transformers.attention import WithoutWeights, describe, read_attention_alone, run_attention
from fastvit.integrations.transformers.classes import CLIP, LLAMA, VIT, qualified
from fastvit.integrations.transformers.layers import LayerHandler, read_call, read_layer, read_rotary_call
from fastvit.ops import Rotary


def _bias(positions: Any, size: Any, resolution: Any, interpolate: bool, x: Tensor, others: Any) -> Any:
    """Return what BEiT's module of relative positions adds to the scores of an image, and `others`, if not None."""
    height, width = resolution
    own = positions((height // size, width // size), interpolate, dim_size=x.shape[1])
    return own if others is None else own + others


def read_beit_call(
    layer: Any, hidden_states: Tensor, attention_mask: Any = None, interpolate_pos_encoding: bool = False,
    resolution: Any = None, **kwargs: Any,
) -> Call:  # fmt: skip
    positions = layer.relative_position_bias
    if positions is not None:
        size = layer.patch_size
        attention_mask = _bias(positions, size, resolution, interpolate_pos_encoding, hidden_states, attention_mask)
    return read_call(layer, hidden_states, attention_mask, **kwargs)


def read_data2vec_call(
    layer: Any, hidden_states: Tensor, output_attentions: bool = False, relative_position_bias: Any = None,
    interpolate_pos_encoding: bool = False, resolution: Any = None,
) -> Call:  # fmt: skip
    """Read a call. relative_position_bias: of all layers, (1, H, N, N), in addition to the layer's own."""
    attn, bias = layer.attention.attention, relative_position_bias
    if attn.has_relative_position_bias:
        size = attn.config.patch_size
        bias = _bias(attn.relative_position_bias, size, resolution, interpolate_pos_encoding, hidden_states, bias)
    return read_call(layer, hidden_states, bias, output_attentions=output_attentions)


def read_tuple_call(
    module: Any, hidden_states: Tensor, attention_mask: Any = None, output_attentions: bool = False
) -> Call:
    return read_call(module, hidden_states, attention_mask, output_attentions=output_attentions)


def read_timesformer_call(attn: Any, hidden_states: Tensor, output_attentions: bool = False) -> Call:
    return read_call(attn, hidden_states, output_attentions=output_attentions)


def read_mlcd_call(
    module: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any = None, **kwargs: Any
) -> Call:
    return read_rotary_call(module, hidden_states, attention_mask, position_embeddings, **kwargs)


def read_llama4_call(
    layer: Any, hidden_state: Tensor, freqs_ci: Tensor, attention_mask: Any = None, output_attentions: Any = None
) -> Call:
    """Read a call. freqs_ci: e^(i * angle) of neighbouring elements, (N, 1, d / 2). The layer leaves the mask out."""
    tables = freqs_ci.to(hidden_state.device)[:, 0].repeat_interleave(2, -1)
    rotary = Rotary(tables.imag, tables.real, interleaved=True)
    _, options = read_call(layer, hidden_state, output_attentions=output_attentions)
    return hidden_state, {**options, "rotary": rotary}


def read_mllama_call(
    layer: Any, hidden_states: Any = None, attention_mask: Any = None, *, hidden_state: Any = None
) -> Call:
    """Read a call. hidden_state: the tokens, in earlier versions."""
    if attention_mask is None:
        raise CannotFuse("no mask, without which its attention is causal")
    return read_call(layer, hidden_states if hidden_state is None else hidden_state, attention_mask)


def read_without_is_causal(attn: Any, dropout: read.Dropout) -> AttentionSpec:
    """Read attention that transformers would take to be causal by its attributes, and that is not by its calls."""
    hooks.check_implementation(attn)
    (out,) = submodules(attn, o_proj=LINEAR)
    return describe(attn, out, dropout)


def read_mllama_layer(layer: Any) -> BlockSpec:
    halves = read_layer(LLAMA, layer, read_without_is_causal, classes.MLLAMA_ATTENTION)
    if not layer.is_gated:
        return halves
    first, second = (gate.tanh().expand(layer.hidden_size) for gate in (layer.gate_attn, layer.gate_ffn))
    return halves[0]._replace(layer_scale=first), halves[1]._replace(layer_scale=second)


def run_in_tuple(x: Tensor, layer: BlockSpec, **options: Any) -> tuple[Tensor]:
    return (run.run_block(x, layer, **options),)


def run_attention_in_tuple(x: Tensor, attn: WithoutWeights) -> tuple[Any]:
    return (run_attention(x, attn),)


_read_llama4 = partial(read_layer, LLAMA, attention_reader=read_without_is_causal, attentions=classes.LLAMA4_ATTENTION)
_read_mlcd = partial(read_layer, CLIP, attentions=classes.MLCD_ATTENTION)
_read_flava = partial(read_layer, VIT, attentions=classes.TUPLE_ATTENTION)
_read_data2vec = partial(_read_flava, outputs=classes.OUTPUT_ALONE)
HANDLERS: dict[type | str, ClassHandler] = {
    qualified("beit.BeitLayer"): LayerHandler(partial(read_layer, VIT), run.run_block, read_beit_call),
    qualified("data2vec.data2vec_vision.Data2VecVisionLayer"): LayerHandler(
        _read_data2vec, run_in_tuple, read_data2vec_call
    ),
    qualified("flava.FlavaLayer"): LayerHandler(_read_flava, run_in_tuple, read_tuple_call),
    qualified("mlcd.MLCDEncoderLayer"): LayerHandler(_read_mlcd, run.run_block, read_mlcd_call),
    qualified("llama4.Llama4VisionEncoderLayer"): LayerHandler(_read_llama4, run_in_tuple, read_llama4_call),
    qualified("mllama.MllamaVisionEncoderLayer"): ClassHandler(
        read_mllama_layer, run.run_block, read_mllama_call, takes_recompute=True
    ),
    **dict.fromkeys(classes.MLCD_ATTENTION, ClassHandler(read_attention_alone, run_attention, read_mlcd_call)),
    qualified("timesformer.TimeSformerAttention"): ClassHandler(
        read_attention_alone, run_attention_in_tuple, read_timesformer_call
    ),
}
