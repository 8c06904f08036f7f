"""Read modules of timm's shape, ours included, as the descriptions of `spec.py`: blocks of ViT, and those of EVA,
DINOv3 and the Perception Encoder, whose calls have rotary positions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fastvit.blocks import read
from fastvit.blocks.read import ATTENTION, DROP_PATH, DROPOUT, LAYER_SCALE, LINEAR, MLP, NORM
from fastvit.blocks.read_mlp import read_mlp
from fastvit.blocks.spec import AttentionSpec, BlockSpec, HalfSpec, LinearSpec, MlpSpec, PlainLinear
from fastvit.blocks.submodules import CannotFuse, Classes, read_or_none, submodules
from fastvit.ops import Norm, Rotary

EVA_ATTENTION: Classes = {
    "fastvit.layers.Attention",
    "fastvit.layers.AttentionRope",
    "fastvit.layers.EvaAttention",
    "timm.layers.attention.AttentionRope",
    "timm.models.eva.EvaAttention",
}
_AFTER_QKV = {"proj": LINEAR, "attn_drop": DROPOUT, "proj_drop": DROPOUT}
_PACKED_PARTS = {"qkv": LINEAR, **_AFTER_QKV}
_SEPARATE_PARTS = {"q_proj": LINEAR, "k_proj": LINEAR, "v_proj": LINEAR, **_AFTER_QKV}


def read_attention(attn: Any) -> AttentionSpec:
    """Read attention with one layer for q, k and v, or, as EVA's may have, with three."""
    kv_heads = None
    layers: tuple[LinearSpec, ...]
    if attn._modules.get("q_proj") is None:
        qkv, proj, attn_drop, proj_drop = submodules(attn, _PACKED_PARTS)
        (packed,) = read.read_packed(qkv, proj)
        layers = (_with_biases(attn, packed),)
    else:
        *three, proj, attn_drop, proj_drop = submodules(attn, _SEPARATE_PARTS)
        kv_heads = getattr(attn, "num_kv_heads", attn.num_heads)  # timm's AttentionRope has them
        layers, width = tuple(map(read.read_layer, three)), 3 * three[0].out_features
        if any(layer.out_features * attn.num_heads * 3 != width * kv_heads for layer in three[1:]):
            raise CannotFuse(f"k and v have {three[1].out_features} outputs for {kv_heads} heads")
        if width != 3 * proj.in_features:
            raise CannotFuse(f"q, k and v have {width} outputs for {proj.in_features} inputs of proj")
    norms = read_norms_of_attention(attn) if len(attn._modules) > 4 else (None, None)
    scale, training = attn.scale, attn_drop.training
    if attn.__dict__.get("fused_attn"):  # timm then leaves both to F.scaled_dot_product_attention
        scale, training = None, attn.training
    p = attn_drop.p if training else 0.0
    return read.describe_attention(layers, proj, attn.num_heads, scale, p, proj_drop, *norms, kv_heads)


def _with_biases(attn: Any, packed: LinearSpec) -> LinearSpec:
    """Add the biases of EVA's attention to its packed layer: it has parameters for q's and v's, and zeros for k's."""
    q_bias = getattr(attn, "q_bias", None)
    if q_bias is None:
        return packed
    if getattr(attn, "qkv_bias_separate", False) or not isinstance(packed, PlainLinear):
        raise CannotFuse("a bias that is added after the qkv layer")
    k_bias = getattr(attn, "k_bias", None)  # zeros, in a buffer of timm's
    k_bias = torch.zeros_like(q_bias) if k_bias is None else k_bias
    return PlainLinear(packed.weight, torch.cat((q_bias, k_bias, attn.v_bias)))


def read_norms_of_attention(attn: nn.Module) -> tuple[Norm | None, tuple[Norm, Norm] | None]:
    """Read `norm`, `q_norm` and `k_norm`, which timm's attention may have in addition to its four layers. Raises
    CannotFuse for a gate, which no op has."""
    if not read.is_left_out(attn, "gate"):
        raise CannotFuse("a gate in attention")
    return read.read_inner_norm(attn), read.read_qk_norm(attn)


read_attention_half: Callable[[Any], HalfSpec[AttentionSpec]] = partial(
    read.read_half, read_attention, {"attn": ATTENTION, "norm1": NORM, "ls1": LAYER_SCALE, "drop_path1": DROP_PATH}
)
read_mlp_half: Callable[[Any], HalfSpec[MlpSpec]] = partial(
    read.read_half, read_mlp, {"mlp": MLP, "norm2": NORM, "ls2": LAYER_SCALE, "drop_path2": DROP_PATH}
)

_read_eva_attention_half: Callable[[Any], HalfSpec[AttentionSpec]] = partial(
    read.read_half, read_attention, {"attn": EVA_ATTENTION, "norm1": NORM, "drop_path1": DROP_PATH}, gamma="gamma_1"
)
_read_eva_mlp_half: Callable[[Any], HalfSpec[MlpSpec]] = partial(
    read.read_half, read_mlp, {"mlp": MLP, "norm2": NORM, "drop_path2": DROP_PATH}, gamma="gamma_2"
)


def read_halves(block: Any) -> tuple[HalfSpec[AttentionSpec] | None, HalfSpec[MlpSpec] | None]:
    """Read both halves of a block; None for one that cannot be fused."""
    return read_or_none(read_attention_half, block), read_or_none(read_mlp_half, block)


def read_block(block: Any) -> BlockSpec:
    return read_attention_half(block), read_mlp_half(block)


def read_eva_halves(block: Any) -> tuple[HalfSpec[AttentionSpec] | None, HalfSpec[MlpSpec] | None]:
    return read_or_none(_read_eva_attention_half, block), read_or_none(_read_eva_mlp_half, block)


def read_eva_block(block: Any) -> BlockSpec:
    return _read_eva_attention_half(block), _read_eva_mlp_half(block)


def rotary(module: Any, x: Tensor, rope: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Rotary | None:
    """Describe the rotary tables of a call. rope: sin and cos side by side, (..., N - P, 2 * d); with cu_seqlens
    (T, 2 * d)."""
    if rope is None:
        return None
    attn = module._modules.get("attn", module)
    sin, cos = rope.chunk(2, dim=-1)
    return Rotary(sin, cos, attn.num_prefix_tokens if cu_seqlens is None else 0, interleaved=not attn.rotate_half)
