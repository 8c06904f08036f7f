"""Meta's DINOv3 repository: the blocks, attention and MLPs of `dinov3.layers`. The model passes blocks a list of
batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastvit.blocks import read, run, spec
from fastvit.blocks.read import DROPOUT, LINEAR, NORM
from fastvit.blocks.recompute import DEFAULT, Recompute
from fastvit.blocks.spec import AttentionSpec, PlainLinear
from fastvit.blocks.submodules import CannotFuse, Classes, submodules
from fastvit.integrations.forward import ClassHandler
from fastvit.integrations.libraries.dinov2 import read_mlp
from fastvit.ops import Rotary

ATTENTION = {"dinov3.layers.attention.SelfAttention"}
MASKED = "dinov3.layers.attention.LinearKMaskedBias"
MLP = {"dinov3.layers.ffn_layers.Mlp", "dinov3.layers.ffn_layers.SwiGLUFFN"}
LAYER_SCALE: Classes = {nn.Identity, "dinov3.layers.layer_scale.LayerScale"}

Batches = Tensor | list[Tensor]


def read_attention(attn: Any) -> AttentionSpec:
    """Read attention without its attn_drop, which is never called."""
    qkv, proj, proj_drop = submodules(attn, qkv=LINEAR | {MASKED}, proj=LINEAR, proj_drop=DROPOUT)
    if qkv.out_features != 3 * proj.in_features:
        raise CannotFuse(f"qkv has {qkv.out_features} outputs for {proj.in_features} inputs of proj")
    layer = read.read_layer(qkv)
    if isinstance(layer, PlainLinear) and layer.bias is not None and "bias_mask" in qkv._buffers:
        layer = PlainLinear(layer.weight, layer.bias * qkv.bias_mask.to(layer.bias.dtype))
    return read.describe_attention((layer,), proj, attn.num_heads, None, 0.0, proj_drop)


def read_block(block: Any) -> spec.BlockSpec:
    """Read a block without stochastic depth, which `check_block_call` checks."""
    attn, norm1, ls1 = submodules(block, attn=ATTENTION, norm1=NORM, ls1=LAYER_SCALE)
    mlp, norm2, ls2 = submodules(block, mlp=MLP, norm2=NORM, ls2=LAYER_SCALE)
    return read.describe_half(read_attention(attn), norm1, ls1), read.describe_half(read_mlp(mlp), norm2, ls2)


def check_block_call(block: Any, x_or_x_list: Batches, rope_or_rope_list: Any = None) -> Batches:
    if block.training and block.sample_drop_ratio > 0.0:
        raise CannotFuse("stochastic depth in training, which leaves samples out of the batch")
    return x_or_x_list


def check_attention_call(attn: Any, x: Tensor, attn_bias: Any = None, rope: Any = None) -> Tensor:
    if attn_bias is not None:
        raise CannotFuse("an attention bias")
    return x


def _rotary(x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Rotary | None:
    """Return rotary positions. rope: sin and cos, (N - P, d), perhaps with dimensions for heads and samples before."""
    if rope is None:
        return None
    sin, cos = rope
    if torch.promote_types(x.dtype, sin.dtype) is not sin.dtype:
        raise CannotFuse(f"rotary positions in {sin.dtype}, to which the library rounds q and k")
    return Rotary(sin, cos, x.shape[1] - sin.shape[-2])


def block_rotary(
    block: Any, x_or_x_list: Batches, rope_or_rope_list: Any = None
) -> list[Rotary | None] | Rotary | None:
    if isinstance(x_or_x_list, Tensor):
        return _rotary(x_or_x_list, rope_or_rope_list)
    rotary = rope_or_rope_list or [None] * len(x_or_x_list)
    return [_rotary(tokens, one) for tokens, one in zip(x_or_x_list, rotary, strict=True)]


def attention_rotary(attn: Any, x: Tensor, attn_bias: Any = None, rope: Any = None) -> Rotary | None:
    return _rotary(x, rope)


def run_block(x: Batches, block: spec.BlockSpec, rotary: Any, recompute: Recompute = DEFAULT) -> Batches:
    if isinstance(x, Tensor):
        return run.run_block(x, block, rotary, recompute=recompute)
    return [run.run_block(tokens, block, one, recompute=recompute) for tokens, one in zip(x, rotary, strict=True)]


HANDLERS = {
    "dinov3.layers.block.SelfAttentionBlock": ClassHandler(
        read_block, run_block, check_block_call, rotary=block_rotary, takes_lists=True, takes_recompute=True
    ),
    **dict.fromkeys(
        ATTENTION,
        ClassHandler(read_attention, run.run_attention, check_attention_call, rotary=attention_rotary),
    ),
    **dict.fromkeys(MLP, ClassHandler(read_mlp, run.run_mlp, ndim=None)),
}
EMBEDDINGS = {"dinov3.layers.patch_embed.PatchEmbed": "proj"}
