"""Hugging Face transformers (version 5): the layers of ViT, DeiT, Dinov2, Dinov2WithRegisters, CLIP's and SigLIP's
vision towers, and an attention implementation for other models: `register_attention`."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from fastvit import _halves as halves
from fastvit import ops
from fastvit._fusible import affine
from fastvit._halves import AttentionParts, Ends, MlpParts
from fastvit.integrations._plan import (
    FUSED_BLOCK,
    IDENTITY,
    LAYER_NORM,
    LINEAR,
    BlockParts,
    Cannot,
    Plan,
    check_dropout,
    check_heads,
    part,
    qualified,
    read_activation,
    read_dropout,
    read_norm,
    run_block,
    run_mlp,
)


class _Names(NamedTuple):
    """How a model names what all of them have."""

    file: str
    norm1: str
    attention: str
    norm2: str
    projection: str


_MODELS = {  # by the prefix of its classes
    "ViT": _Names("vit", "layernorm_before", "attention", "layernorm_after", "o_proj"),
    "DeiT": _Names("deit", "layernorm_before", "attention", "layernorm_after", "o_proj"),
    "Dinov2": _Names("dinov2", "norm1", "attention", "norm2", "o_proj"),
    "Dinov2WithRegisters": _Names("dinov2_with_registers", "norm1", "attention", "norm2", "o_proj"),
    "CLIP": _Names("clip", "layer_norm1", "self_attn", "layer_norm2", "out_proj"),
    "Siglip": _Names("siglip", "layer_norm1", "self_attn", "layer_norm2", "out_proj"),
}
# Implementations of the same attention; another one, registered by somebody, is somebody's choice
_SAME_ATTENTION = (None, "eager", "sdpa", "flex_attention", "fastvit")
# Those that return weights or their sums beside the output, for whoever calls or hooks the attention
_WITH_WEIGHTS = ("eager", "flex_attention")
# Arguments that say what a model returns, or are for the loss, and change nothing inside a layer
_HARMLESS = ("output_hidden_states", "return_dict", "use_cache", "num_items_in_batch")


def _class(prefix: str, suffix: str) -> str:
    file = _MODELS[prefix].file
    return f"transformers.models.{file}.modeling_{file}.{prefix}{suffix}"


def _captures_attentions() -> bool:
    """Whether transformers collects attention weights in this call, which its hooks on attention modules are for. They
    stay there once a model has been asked for hidden states or attentions, and do nothing otherwise."""
    capturing: Any = sys.modules.get("transformers.utils.output_capturing")
    collector = capturing and capturing._active_collector.get()
    return bool(collector) and "attentions" in collector


def _attention_part(layer: Any, name: str, kinds: tuple[str, ...]) -> Any:
    attn = layer._modules[name]
    hooks = attn._forward_hooks.values()
    others = attn._forward_pre_hooks or attn._backward_hooks or attn._backward_pre_hooks or "forward" in attn.__dict__
    if others or not hooks or any(hook.__module__ != "transformers.utils.output_capturing" for hook in hooks):
        return part(layer, name, kinds)
    if _captures_attentions():
        raise Cannot("attention weights are collected")
    if qualified(attn) not in kinds:
        raise Cannot(f"{name} is {type(attn).__name__}")
    return attn


def read_attention(attn: Any, proj: str, proj_p: float = 0.0) -> AttentionParts:
    if type(attn.config).__name__ == "CLIPTextConfig":
        raise Cannot("the text tower's attention is causal")
    if getattr(attn, "is_causal", False):
        raise Cannot("its attention is causal")
    if attn.config._attn_implementation not in _SAME_ATTENTION and not attn.config._attn_implementation.startswith(
        "flash_attention"
    ):
        raise Cannot(f"its attention implementation is {attn.config._attn_implementation!r}")
    q, k, v = (part(attn, name, LINEAR) for name in ("q_proj", "k_proj", "v_proj"))
    out = part(attn, proj, LINEAR)
    heads = q.out_features // attn.head_dim
    check_heads(q.out_features, heads)
    if not q.out_features == k.out_features == v.out_features:
        raise Cannot("its keys have fewer heads than its queries")
    p = getattr(attn, "attention_dropout", None)
    p = attn.dropout if p is None else p
    scale = getattr(attn, "scaling", None)
    scale = attn.scale if scale is None else scale
    p = check_dropout(p if attn.training else 0.0)
    return AttentionParts((affine(q), affine(k), affine(v)), affine(out), heads, scale, p, proj_p)


def read_attention_alone(attn: Any, proj: str) -> AttentionParts:
    implementation = attn.config._attn_implementation or "eager"
    if implementation in _WITH_WEIGHTS:
        raise Cannot(f"{implementation} attention returns its weights as well")
    return read_attention(attn, proj)


def read_mlp(mlp: Any, out_p: float = 0.0) -> MlpParts:
    return MlpParts(
        affine(part(mlp, "fc1", LINEAR)), affine(part(mlp, "fc2", LINEAR)), read_activation(mlp, "activation_fn"),
        out_p=out_p,
    )  # fmt: skip


def read_layer(prefix: str, layer: Any) -> BlockParts:
    names = _MODELS[prefix]
    p = read_dropout(layer, "dropout") if "dropout" in layer._modules else 0.0
    drop = (0.0, True)
    if "drop_path" in layer._modules:
        path = part(layer, "drop_path", (*IDENTITY, _class(prefix, "DropPath")))
        if path.training and not isinstance(path, nn.Identity):
            drop = path.drop_prob, True
    gammas: list[Any] = [None, None]
    if "layer_scale1" in layer._modules:
        kinds = (_class(prefix, "LayerScale"),)
        gammas = [part(layer, name, kinds).lambda1 for name in ("layer_scale1", "layer_scale2")]
    return (
        read_attention(_attention_part(layer, names.attention, (_class(prefix, "Attention"),)), names.projection, p),
        Ends(read_norm(part(layer, names.norm1, LAYER_NORM)), gammas[0], drop),
        read_mlp(part(layer, "mlp", (_class(prefix, "MLP"),)), p),
        Ends(read_norm(part(layer, names.norm2, LAYER_NORM)), gammas[1], drop),
    )


def admit(module: Any, hidden_states: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
    if attention_mask is not None:
        raise Cannot("an attention mask")
    for name, value in kwargs.items():
        if name not in _HARMLESS and value is not None and value is not False:
            raise Cannot(f"the argument {name}")
    return hidden_states


def run_layer(layer: Any, x: Tensor, parts: BlockParts) -> Tensor:
    if layer.gradient_checkpointing and layer.training:
        return layer._gradient_checkpointing_func(partial(run_block, layer, parts=parts), x)
    return run_block(layer, x, parts)


def run_attention(attn: Any, x: Tensor, parts: AttentionParts) -> tuple[Tensor, None]:
    return halves.attention(x, parts), None


PLANS: dict[str, Plan] = {}
for _prefix, _names in _MODELS.items():
    _suffix = "EncoderLayer" if _prefix in ("CLIP", "Siglip") else "Layer"
    PLANS[_class(_prefix, _suffix)] = Plan(partial(read_layer, _prefix), run_layer, FUSED_BLOCK, admit)
    PLANS[_class(_prefix, "Attention")] = Plan(
        partial(read_attention_alone, proj=_names.projection), run_attention, "attention, linear", admit
    )
    PLANS[_class(_prefix, "MLP")] = Plan(read_mlp, run_mlp, "mlp", ndim=None)
EMBEDDINGS = {
    **{_class(prefix, "PatchEmbeddings"): "projection" for prefix in ("ViT", "DeiT", "Dinov2", "Dinov2WithRegisters")},
    **{_class(prefix, "VisionEmbeddings"): "patch_embedding" for prefix in ("CLIP", "Siglip")},
}


def register_attention(name: str = "fastvit") -> None:
    """Makes `ops.attention` an attention implementation of transformers, for every model that has a choice:

        register_attention()
        model.set_attn_implementation("fastvit")

    Masked, causal, cross and grouped-query attention run on transformers' "sdpa" implementation, masks included.
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
    """As transformers calls it: query, key, value (B, H, N, d) -> (B, N, H, d), and None for the weights."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    head_dim = query.shape[-1]
    if (
        attention_mask is not None
        or (is_causal and query.shape[2] > 1)
        or not query.shape == key.shape == value.shape
        or head_dim % 8
        or not 16 <= head_dim <= 256
        or any(value is not None and value is not False for value in kwargs.values())
    ):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal=is_causal, **kwargs
        )
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    return ops.attention(q, k, v, scale=scaling, dropout_p=dropout), None
