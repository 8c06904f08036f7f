"""Layers, RMSNorms and MLPs of Hugging Face transformers, versions 5.0 to 5.24, with and without a mask or rotary
positions; and an attention implementation for other models: `register_attention`. Other files of this folder have
layers with a call of their own (families.py), over a grid (grids.py), and of several images in a row (varlen.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fastvit import ops
from fastvit.blocks import read, run
from fastvit.blocks.read import LINEAR
from fastvit.blocks.read_mlp import describe_mlp
from fastvit.blocks.recompute import Recompute
from fastvit.blocks.spec import BlockSpec, HalfSpec, MlpSpec
from fastvit.blocks.submodules import CannotFuse, Classes, submodules
from fastvit.integrations.forward import Call, ClassHandler, checked_mask
from fastvit.integrations.mlp_names import read_mlp
from fastvit.integrations.transformers import classes, hooks, vjepa2
from fastvit.integrations.transformers.attention import read_attention, read_attention_alone, read_norm, run_attention
from fastvit.integrations.transformers.classes import Parts, qualified
from fastvit.ops import Norm, Rotary
from fastvit.ops.runtime.checks import takes_head_dim

__all__ = ["register_attention"]


def read_nested_mlp(layer: Any, outputs: Classes) -> MlpSpec:
    """Read an MLP of two modules: the first has fc1, the second fc2 and dropout. outputs: the second's classes."""
    first, last = submodules(layer, intermediate=classes.INTERMEDIATE, output=outputs)
    fc1, act = submodules(first, dense=LINEAR, intermediate_act_fn=read.ACTIVATIONS)
    fc2, dropout = submodules(last, dense=LINEAR, dropout=read.DROPOUT)
    return describe_mlp(fc1, act, fc2, None, dropout)


def run_rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """Run T5's RMSNorm, which rounds to x's dtype and then multiplies by the weight in the weight's dtype."""
    return run.run_norm(x, norm).to(torch.promote_types(x.dtype, norm.weight.dtype))


def read_layer(
    parts: Parts, layer: Any, attention_reader: Callable[[Any, Any], Any] = read_attention,
    attentions: Classes | None = None, outputs: Classes = classes.OUTPUT,
) -> BlockSpec:  # fmt: skip
    """Read both halves of a layer. attention_reader: function (attention, dropout); attentions: the classes it reads,
    by default those of `read_attention`; outputs: classes of the second half of an MLP in two modules."""
    hooks.check_version()
    norm1, norm2 = submodules(layer, {parts.norm1: classes.NORM, parts.norm2: classes.NORM})
    dropout, p, gammas = None, 0.0, [None, None]
    if "dropout" in layer._modules:
        (dropout,) = submodules(layer, dropout=read.DROPOUT)
    if "intermediate" in layer._modules:
        mlp = read_nested_mlp(layer, outputs)
    else:
        (module,) = submodules(layer, {parts.mlp: classes.MLP})
        mlp = read_mlp(module, dropout)
    attentions = attentions or (classes.ROTARY_ATTENTION if parts.rotates else classes.ATTENTION)
    attn = hooks.attention_of(layer, parts.attention, attentions)
    if "drop_path" in layer._modules:
        (drop_path,) = submodules(layer, drop_path=classes.DROP_PATH)
        p, _ = read.read_drop_path(drop_path)
    if "layer_scale1" in layer._modules:
        both = submodules(layer, layer_scale1=classes.LAYER_SCALE, layer_scale2=classes.LAYER_SCALE)
        gammas = [None if type(scale) is nn.Identity else scale.lambda1 for scale in both]
    elif isinstance(getattr(layer, "lambda_1", None), Tensor):  # a parameter, or what FSDP or pruning puts in its place
        gammas = [layer.lambda_1, layer.lambda_2]
    attention = attention_reader(attn, dropout)
    return HalfSpec(attention, read_norm(norm1), gammas[0], p), HalfSpec(mlp, read_norm(norm2), gammas[1], p)


def read_vjepa2_layer(layer: Any) -> BlockSpec:
    """Read a layer that returns its attention's weights too."""
    hooks.check_no_weights(layer._modules["attention"])
    return read_layer(classes.DINO, layer, attentions=classes.VJEPA2_ATTENTION)


def _made_for_export(mask: Any) -> bool:
    """Return whether a mask is the one that transformers makes for "sdpa" attention under torch.export, for calls
    without a mask: one value for each query, expanded over the keys. It prefers no key to another, for any values."""
    if not torch.compiler.is_exporting() or not isinstance(mask, Tensor):
        return False
    return mask.dtype is torch.bool and mask.stride(-1) == 0


def read_call(module: Any, hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any) -> Call:
    """Read a call with a mask. attention_mask: (B, 1 or H, 1 or N, N). Padding for flash attention, (B, N), cannot be
    fused."""
    hooks.check_others(kwargs)
    if attention_mask is None or _made_for_export(attention_mask):
        return hidden_states, {}
    if isinstance(attention_mask, Tensor) and attention_mask.dim() != 4:
        raise CannotFuse(f"an attention mask of shape {tuple(attention_mask.shape)}")
    return hidden_states, {"attn_mask": checked_mask(attention_mask, hidden_states.shape[1])}


def read_rotary_call(
    module: Any, hidden_states: Tensor, attention_mask: Any = None,
    position_embeddings: tuple[Tensor, Tensor] | None = None, **kwargs: Any,
) -> Call:  # fmt: skip
    """Read a call with rotary positions. position_embeddings: cos and sin, (N - P, d) each."""
    if attention_mask is not None:  # without a mask, flash attention separates the images by them
        kwargs.pop("position_ids", None)
    _, options = read_call(module, hidden_states, attention_mask, **kwargs)
    if position_embeddings is None:
        raise CannotFuse("no rotary positions")
    cos, sin = position_embeddings
    return hidden_states, {**options, "rotary": Rotary(sin, cos, hidden_states.shape[1] - sin.shape[-2])}


def run_layer_of_pair(x: Tensor, layer: BlockSpec, rotary: Rotary, recompute: Recompute) -> tuple[Tensor, None]:
    return run.run_block(x, layer, rotary, recompute=recompute), None


LayerHandler = partial(ClassHandler, takes_recompute=True, checkpoint=hooks.checkpoint_of)
HANDLERS: dict[type | str, ClassHandler] = {
    **{
        name: LayerHandler(partial(read_layer, parts), run.run_block, read_rotary_call if parts.rotates else read_call)
        for name, parts in classes.LAYERS.items()
    },
    qualified("vjepa2.VJEPA2Layer"): LayerHandler(read_vjepa2_layer, run_layer_of_pair, vjepa2.read_call),
    **dict.fromkeys(classes.ATTENTION, ClassHandler(read_attention_alone, run_attention, read_call)),
    **dict.fromkeys(classes.ROTARY_ATTENTION, ClassHandler(read_attention_alone, run_attention, read_rotary_call)),
    **dict.fromkeys(classes.VJEPA2_ATTENTION, ClassHandler(read_attention_alone, run_attention, vjepa2.read_call)),
    **dict.fromkeys(classes.MLP, ClassHandler(read_mlp, run.run_mlp, ndim=None)),
    **dict.fromkeys(classes.RMS_NORM, ClassHandler(read_norm, run_rms_norm, ndim=None)),
}


def register_attention(name: str = "fastvit") -> None:
    """Make `ops.attention` an attention implementation of transformers, for every model with a choice of them:

        register_attention()
        model.set_attn_implementation("fastvit")

    Calls with further arguments, such as a decoder's, and causal ones with a cache run on transformers' "sdpa"
    implementation.

    Args:
        name: the implementation's name in transformers.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, sdpa_mask)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention with transformers' signature: query (B, H, M, d), key and value (B, H or fewer, N, d) give
    (B, M, H, d), and None for the weights."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if (
        not _fits(query, key, value)
        or (attention_mask is not None and not _takes_mask(attention_mask, query, key))
        or (is_causal and key.shape[2] != query.shape[2])  # with a cache
        or not takes_head_dim(query.shape[-1])
        or any(value is not None and value is not False for value in kwargs.values())
    ):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal=is_causal, **kwargs
        )
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    is_causal = bool(is_causal) and attention_mask is None  # as in "sdpa": a mask says all
    if attention_mask is not None and _made_for_export(attention_mask):
        attention_mask = None
    out = ops.attention(
        q, k, v, attn_mask=attention_mask, is_causal=is_causal, scale=scaling, dropout_p=dropout, layout="bnhd"
    )
    return out, None


def _takes_mask(mask: Any, query: Tensor, key: Tensor) -> bool:
    try:
        return mask.dim() == 4 and checked_mask(mask, query.shape[2], key.shape[2]) is mask
    except (AttributeError, CannotFuse):
        return False


def _fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether k and v have the same shape, the samples and channels of q, and heads that divide those of q."""
    B, H, _, d = query.shape
    return key.shape == value.shape == (B, *key.shape[1:3], d) and H % key.shape[1] == 0
