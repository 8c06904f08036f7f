"""Read blocks of EVA, DINOv3 and the Perception Encoder, timm's and ours, as the descriptions of `spec.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastvit.blocks import read, read_timm, spec
from fastvit.blocks.read import DROP_PATH, DROPOUT, LINEAR, MLP, NORM
from fastvit.blocks.read_mlp import read_mlp
from fastvit.blocks.spec import AttentionSpec, HalfSpec, LinearSpec, PlainLinear
from fastvit.blocks.submodules import CannotFuse, Classes, submodules
from fastvit.ops import Rotary

ATTENTION: Classes = {
    "fastvit.eva_layers.AttentionRope",
    "fastvit.eva_layers.EvaAttention",
    "timm.layers.attention.AttentionRope",
    "timm.models.eva.EvaAttention",
}


def read_attention(attn: Any) -> AttentionSpec:
    attn_drop, proj, proj_drop = submodules(attn, attn_drop=DROPOUT, proj=LINEAR, proj_drop=DROPOUT)
    norms = read_timm.read_norms_of_attention(attn)
    layers: tuple[LinearSpec, ...]
    kv_heads = None
    if attn._modules.get("qkv") is not None:
        (packed,) = submodules(attn, qkv=LINEAR)
        layers, width = (_with_biases(attn, packed),), packed.out_features
    else:
        three = submodules(attn, q_proj=LINEAR, k_proj=LINEAR, v_proj=LINEAR)
        kv_heads = getattr(attn, "num_kv_heads", attn.num_heads)  # AttentionRope has them
        layers, width = tuple(map(read.read_layer, three)), 3 * three[0].out_features
        if any(layer.out_features * attn.num_heads * 3 != width * kv_heads for layer in three[1:]):
            raise CannotFuse(f"k and v have {three[1].out_features} outputs for {kv_heads} heads")
    if width != 3 * proj.in_features:
        raise CannotFuse(f"q, k and v have {width} outputs for {proj.in_features} inputs of proj")
    scale, training = attn.scale, attn_drop.training
    if attn.__dict__.get("fused_attn"):  # timm then leaves both to F.scaled_dot_product_attention
        scale, training = None, attn.training
    p = attn_drop.p if training else 0.0
    return read.describe_attention(layers, proj, attn.num_heads, scale, p, proj_drop, *norms, kv_heads)


def _with_biases(attn: Any, packed: nn.Linear) -> LinearSpec:
    """Add the biases to EvaAttention's packed layer: it has parameters for q's and v's, and zeros for k's."""
    layer = read.read_layer(packed)
    q_bias = getattr(attn, "q_bias", None)
    if q_bias is None:
        return layer
    if getattr(attn, "qkv_bias_separate", False) or not isinstance(layer, PlainLinear):
        raise CannotFuse("a bias that is added after the qkv layer")
    k_bias = getattr(attn, "k_bias", None)  # zeros, in a buffer of timm's
    k_bias = torch.zeros_like(q_bias) if k_bias is None else k_bias
    return PlainLinear(layer.weight, torch.cat((q_bias, k_bias, attn.v_bias)))


def read_block(block: Any) -> spec.BlockSpec:
    norm, attn, drop_path = submodules(block, norm1=NORM, attn=ATTENTION, drop_path1=DROP_PATH)
    attention = HalfSpec(
        read_attention(attn), read.read_norm(norm), getattr(block, "gamma_1", None), *read.read_drop_path(drop_path)
    )
    return attention, read_mlp_half(block)


def read_mlp_half(block: Any) -> HalfSpec[spec.MlpSpec]:
    norm, mlp, drop_path = submodules(block, norm2=NORM, mlp=MLP, drop_path2=DROP_PATH)
    return HalfSpec(
        read_mlp(mlp), read.read_norm(norm), getattr(block, "gamma_2", None), *read.read_drop_path(drop_path)
    )


def rotary(
    module: Any, x: Tensor, rope: Tensor | None = None, *_: Any, cu_seqlens: Tensor | None = None, **__: Any
) -> Rotary | None:
    """Describe the rotary tables of a call. rope: sin and cos side by side, (..., N - P, 2 * d); with cu_seqlens
    (T, 2 * d)."""
    if rope is None:
        return None
    attn = module._modules.get("attn", module)
    sin, cos = rope.chunk(2, dim=-1)
    return Rotary(sin, cos, attn.num_prefix_tokens if cu_seqlens is None else 0, interleaved=not attn.rotate_half)
