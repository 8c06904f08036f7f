"""Hugging Face transformers, versions 5.0 to 5.24: the layers of ViT, DeiT, I-JEPA, Dinov2, Dinov2WithRegisters,
DINOv3, Sapiens2, VideoMAE, V-JEPA 2, and of the vision towers of CLIP, SigLIP, SigLIP 2, AIMv2, Ovis2, InternVL and
Pixtral, with and without a mask; layers over a grid (grids.py); attention (varlen.py), RMSNorm and MLPs of Qwen's and
GLM's towers; and an attention implementation for other models: `register_attention`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastvit import ops
from fastvit.blocks import read, run
from fastvit.blocks.read import LINEAR
from fastvit.blocks.read_mlp import describe_mlp
from fastvit.blocks.recompute import Recompute
from fastvit.blocks.spec import AttentionSpec, BlockSpec, HalfSpec, MlpSpec
from fastvit.blocks.submodules import CannotFuse, submodules
from fastvit.integrations.forward import Call, ClassHandler, checked_mask
from fastvit.integrations.mlp_names import read_mlp
from fastvit.integrations.transformers import hooks, vjepa2
from fastvit.integrations.transformers.classes import (
    ATTENTIONS,
    DROP_PATH,
    FAMILIES,
    LAYER_SCALE,
    MLPS,
    RMS_NORM,
    class_of,
)
from fastvit.ops import Norm, Rotary
from fastvit.ops.runtime.checks import takes_head_dim

__all__ = ["register_attention"]

_NORM = read.NORM | RMS_NORM


class WithoutWeights(NamedTuple):
    """Attention of a module that returns only the output, without weights."""

    attention: AttentionSpec


def is_nested(attn: Any) -> bool:
    """Return whether attention is two modules, as in ViT and DeiT of transformers 5.0 to 5.8 and DINOv2 of 5.0 to 5.17:
    the first has q, k and v, the second the last linear layer and its dropout."""
    return "attention" in attn._modules


def read_nested_attention(prefix: str, attn: Any) -> AttentionSpec:
    inner = hooks.attention_of(attn, "attention", {class_of(prefix, "SelfAttention")})
    (output,) = submodules(attn, output={class_of(prefix, "SelfOutput")})
    hooks.check_attention(inner)
    qkv = submodules(inner, query=LINEAR, key=LINEAR, value=LINEAR)
    proj, dropout = submodules(output, dense=LINEAR, dropout=read.DROPOUT)
    layers = tuple(map(read.read_layer, qkv))
    p = inner.dropout_prob if inner.training else 0.0
    return read.describe_attention(layers, proj, inner.num_attention_heads, inner.scaling, p, dropout)


def read_nested_mlp(prefix: str, layer: Any) -> MlpSpec:
    """Read the MLP of ViT and DeiT in transformers 5.0 to 5.8: the first module has fc1, the second fc2 and dropout."""
    first, last = submodules(
        layer, intermediate={class_of(prefix, "Intermediate")}, output={class_of(prefix, "Output")}
    )
    fc1, act = submodules(first, dense=LINEAR, intermediate_act_fn=read.ACTIVATIONS)
    fc2, dropout = submodules(last, dense=LINEAR, dropout=read.DROPOUT)
    return describe_mlp(fc1, act, fc2, None, dropout)


def read_attention(prefix: str, attn: Any, dropout: read.Dropout = None) -> AttentionSpec:
    """Read attention. dropout: the layer's, if it applies to attention too."""
    if is_nested(attn):
        return read_nested_attention(prefix, attn)
    hooks.check_attention(attn)
    names = ("q_proj", "k_proj", "v_proj") if "q_proj" in attn._modules else ("query", "key", "value")
    q, k, v, out = submodules(attn, dict.fromkeys((*names, FAMILIES[prefix].projection), LINEAR))
    if "projection_dropout" in attn._modules:
        (own,) = submodules(attn, projection_dropout={nn.Identity, *read.DROPOUT})
        dropout = None if type(own) is nn.Identity else own
    p = next(getattr(attn, name) for name in ("attention_dropout", "dropout_prob", "dropout") if hasattr(attn, name))
    scale = attn.scaling if hasattr(attn, "scaling") else attn.scale
    qkv = read.read_layer(q), read.read_layer(k), read.read_layer(v)
    head_dim = attn.head_dim if hasattr(attn, "head_dim") else attn.attention_head_size
    heads, kv_heads = q.out_features // head_dim, k.out_features // head_dim
    if k.out_features != v.out_features or q.out_features != out.in_features:
        raise CannotFuse(f"q, k and v have {q.out_features}, {k.out_features} and {v.out_features} outputs")
    qk_norms = read.read_qk_norm(attn, _NORM, read_norm)
    p = p if attn.training else 0.0
    return read.describe_attention(qkv, out, heads, scale, p, dropout, qk_norm=qk_norms, kv_heads=kv_heads)


def read_attention_alone(prefix: str, attn: Any) -> AttentionSpec | WithoutWeights:
    hooks.check_version()
    if is_nested(attn):
        return WithoutWeights(read_attention(prefix, attn))
    hooks.check_no_weights(attn)
    return read_attention(prefix, attn)


def read_norm(norm: Any) -> Norm:
    if "variance_epsilon" in norm.__dict__:
        return read.rms_norm(norm.weight, norm.variance_epsilon)
    return read.read_norm(norm)


def run_rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """Run T5's RMSNorm, which rounds to x's dtype and then multiplies by the weight in the weight's dtype."""
    return run.run_norm(x, norm).to(torch.promote_types(x.dtype, norm.weight.dtype))


def read_layer(prefix: str, layer: Any, attention_reader: Callable[..., Any] = read_attention) -> BlockSpec:
    """Read both halves of a layer. attention_reader: function (prefix, attention, dropout)."""
    hooks.check_version()
    names = FAMILIES[prefix]
    norm1, norm2 = submodules(layer, {names.norm1: _NORM, names.norm2: _NORM})
    dropout, p, gammas = None, 0.0, [None, None]
    if "dropout" in layer._modules:
        (dropout,) = submodules(layer, dropout=read.DROPOUT)
    if "intermediate" in layer._modules:
        mlp = read_nested_mlp(prefix, layer)
    else:
        (module,) = submodules(layer, {names.mlp: MLPS})
        mlp = read_mlp(module, dropout)
    attn = hooks.attention_of(layer, names.attention, ATTENTIONS[prefix])
    if "drop_path" in layer._modules:
        (drop_path,) = submodules(layer, drop_path=DROP_PATH)
        p, _ = read.read_drop_path(drop_path)
    if "layer_scale1" in layer._modules:
        both = submodules(layer, layer_scale1=LAYER_SCALE, layer_scale2=LAYER_SCALE)
        gammas = [None if type(scale) is nn.Identity else scale.lambda1 for scale in both]
    elif "lambda_1" in layer._parameters:
        gammas = [layer.lambda_1, layer.lambda_2]
    attention = attention_reader(prefix, attn, dropout)
    return HalfSpec(attention, read_norm(norm1), gammas[0], p), HalfSpec(mlp, read_norm(norm2), gammas[1], p)


def read_layer_of_pair(prefix: str, layer: Any) -> BlockSpec:
    """Read a layer that returns its attention's weights too."""
    hooks.check_no_weights(layer._modules[FAMILIES[prefix].attention])
    return read_layer(prefix, layer)


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


def run_attention(
    x: Tensor, attn: AttentionSpec | WithoutWeights, rotary: Rotary | None = None, attn_mask: Tensor | None = None
) -> Tensor | tuple[Tensor, None]:
    if isinstance(attn, WithoutWeights):
        return run.run_attention(x, attn.attention, rotary, attn_mask)
    return run.run_attention(x, attn, rotary, attn_mask), None


LayerHandler = partial(ClassHandler, takes_recompute=True, checkpoint=hooks.checkpoint_of)
HANDLERS: dict[type | str, ClassHandler] = {
    **dict.fromkeys(MLPS, ClassHandler(read_mlp, run.run_mlp, ndim=None)),
    **dict.fromkeys(RMS_NORM, ClassHandler(read_norm, run_rms_norm, ndim=None)),
}
for _prefix, _names in FAMILIES.items():
    if _names.on_grid:  # grids.py
        continue
    _read_call: Callable[..., Call] = read_rotary_call if _names.rotates else read_call
    _layer: tuple[Any, Any] = read_layer, run.run_block
    if _prefix == "VJEPA2":
        _read_call, _layer = vjepa2.read_call, (read_layer_of_pair, run_layer_of_pair)
    HANDLERS[class_of(_prefix, _names.layer)] = LayerHandler(partial(_layer[0], _prefix), _layer[1], _read_call)
    HANDLERS[class_of(_prefix, _names.attentions[0])] = ClassHandler(
        partial(read_attention_alone, _prefix), run_attention, _read_call
    )


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


def takes_registered_attention(attn: Any) -> bool:
    """Return whether attention has an implementation by name, and is no decoder's."""
    config = getattr(attn, "config", None)
    return (
        hasattr(sys.modules.get(type(attn).__module__), "ALL_ATTENTION_FUNCTIONS")
        and getattr(config, "_attn_implementation", "fastvit") in {*hooks.SAME_ATTENTION} - {"fastvit"}
        and not getattr(attn, "is_causal", True)
        and takes_head_dim(getattr(attn, "head_dim", 64))
    )


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
