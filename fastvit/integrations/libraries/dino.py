"""Meta's repositories of DINOv2 and DINOv3: the blocks, attention and MLPs of `dinov2.layers` and `dinov3.layers`. The
latter's model passes blocks a list of batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fastvit.blocks import read, run, spec
from fastvit.blocks.read import DROPOUT, LINEAR, NORM
from fastvit.blocks.recompute import DEFAULT, Recompute
from fastvit.blocks.spec import AttentionSpec, PlainLinear
from fastvit.blocks.submodules import CannotFuse, Classes, class_name, has_own_forward, qualified_name, submodules
from fastvit.integrations.forward import Call, ClassHandler, only_input
from fastvit.integrations.mlp_names import read_mlp
from fastvit.ops import Rotary

# Names with 2 are about DINOv2's classes, those with 3 about DINOv3's
XFORMERS_ATTENTION = "dinov2.layers.attention.MemEffAttention"
ATTENTION2: Classes = {XFORMERS_ATTENTION, "dinov2.layers.attention.Attention"}
ATTENTION3: Classes = {"dinov3.layers.attention.SelfAttention"}
MASKED = "dinov3.layers.attention.LinearKMaskedBias"
MLP: Classes = {
    "dinov2.layers.mlp.Mlp", "dinov2.layers.swiglu_ffn.SwiGLUFFN", "dinov2.layers.swiglu_ffn.SwiGLUFFNFused",
    "dinov3.layers.ffn_layers.Mlp", "dinov3.layers.ffn_layers.SwiGLUFFN",
}  # fmt: skip
LAYER_SCALE: Classes = {
    nn.Identity, "dinov2.layers.layer_scale.LayerScale", "dinov3.layers.layer_scale.LayerScale",
}  # fmt: skip

Batches = Tensor | list[Tensor]


def check_bases(module: nn.Module) -> None:
    """Check that base classes have their own forward, which NestedTensorBlock and MemEffAttention call."""
    for base in type(module).__mro__[1:]:
        forward = base.__dict__.get("forward")
        if forward is not None and base is not nn.Module and not has_own_forward(base, forward):
            raise CannotFuse(f"the forward of {class_name(base)} was replaced")


def read_attention2(attn: Any) -> AttentionSpec:
    check_bases(attn)
    if "attn_drop" in attn._modules:  # until 2025
        (drop,) = submodules(attn, attn_drop=DROPOUT)
        p, scale = drop.p if drop.training else 0.0, attn.scale
    else:
        p, scale = attn.attn_drop if attn.training else 0.0, None
    if p and qualified_name(attn) == XFORMERS_ATTENTION:
        raise CannotFuse("a dropout of attention, which xformers leaves out")
    qkv, proj, proj_drop = submodules(attn, qkv=LINEAR, proj=LINEAR, proj_drop=DROPOUT)
    return read.describe_attention(read.read_packed(qkv, proj), proj, attn.num_heads, scale, p, proj_drop)


def read_attention3(attn: Any) -> AttentionSpec:
    """Read attention without its attn_drop, which is never called."""
    qkv, proj, proj_drop = submodules(attn, qkv=LINEAR | {MASKED}, proj=LINEAR, proj_drop=DROPOUT)
    (layer,) = read.read_packed(qkv, proj)
    if isinstance(layer, PlainLinear) and layer.bias is not None and "bias_mask" in qkv._buffers:
        layer = PlainLinear(layer.weight, layer.bias * qkv.bias_mask.to(layer.bias.dtype))
    return read.describe_attention((layer,), proj, attn.num_heads, None, 0.0, proj_drop)


def read_block(attention: Classes, read_attention: Callable[[Any], AttentionSpec], block: Any) -> spec.BlockSpec:
    """Read a block without stochastic depth, which `_check_no_drop` checks. attention: its classes and their reader."""
    check_bases(block)
    first = read.read_half(read_attention, {"attn": attention, "norm1": NORM, "ls1": LAYER_SCALE}, block)
    return first, read.read_half(read_mlp, {"mlp": MLP, "norm2": NORM, "ls2": LAYER_SCALE}, block)


def _check_no_drop(block: Any) -> None:
    if block.training and block.sample_drop_ratio > 0.0:
        raise CannotFuse("stochastic depth in training, which leaves samples out of the batch")


def read_block2_call(block: Any, *args: Any, **kwargs: Any) -> Call:
    x, options = only_input(block, *args, **kwargs)
    if isinstance(x, list):
        raise CannotFuse("a list of crops")
    _check_no_drop(block)
    return x, options


def read_block3_call(block: Any, x_or_x_list: Batches, rope_or_rope_list: Any = None) -> Call:
    _check_no_drop(block)
    if isinstance(x_or_x_list, Tensor):
        return x_or_x_list, {"rotary": _rotary(x_or_x_list, rope_or_rope_list)}
    ropes = rope_or_rope_list or [None] * len(x_or_x_list)
    return x_or_x_list, {"rotary": [_rotary(x, rope) for x, rope in zip(x_or_x_list, ropes, strict=True)]}


def read_attention2_call(
    attn: Any, x: Any, mask: Any = None, *, attn_bias: Any = None, is_causal: bool = False
) -> Call:
    """mask: MemEffAttention's attn_bias, or Attention's is_causal."""
    is_bias = mask is not None and (qualified_name(attn) == XFORMERS_ATTENTION or not isinstance(mask, bool))
    if is_bias or attn_bias is not None:
        raise CannotFuse("an attention bias")
    return x, {"is_causal": bool(mask or is_causal)}


def read_attention3_call(attn: Any, x: Tensor, attn_bias: Any = None, rope: Any = None) -> Call:
    if attn_bias is not None:
        raise CannotFuse("an attention bias")
    return x, {"rotary": _rotary(x, rope)}


def _rotary(x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Rotary | None:
    """Return rotary positions. rope: sin and cos, (N - P, d), perhaps with dimensions for heads and samples before."""
    if rope is None:
        return None
    sin, cos = rope
    if torch.promote_types(x.dtype, sin.dtype) is not sin.dtype:
        raise CannotFuse(f"rotary positions in {sin.dtype}, to which the library rounds q and k")
    return Rotary(sin, cos, x.shape[1] - sin.shape[-2])


def run_block3(x: Batches, block: spec.BlockSpec, rotary: Any, recompute: Recompute = DEFAULT) -> Batches:
    if isinstance(x, Tensor):
        return run.run_block(x, block, rotary, recompute=recompute)
    return [run.run_block(tokens, block, one, recompute=recompute) for tokens, one in zip(x, rotary, strict=True)]


_BLOCK2 = ClassHandler(
    partial(read_block, ATTENTION2, read_attention2), run.run_block, read_block2_call, takes_recompute=True
)
HANDLERS: dict[type | str, ClassHandler] = {
    "dinov2.layers.block.Block": _BLOCK2,
    "dinov2.layers.block.NestedTensorBlock": _BLOCK2,
    "dinov3.layers.block.SelfAttentionBlock": ClassHandler(
        partial(read_block, ATTENTION3, read_attention3), run_block3, read_block3_call,
        takes_lists=True, takes_recompute=True,
    ),
    **dict.fromkeys(
        ATTENTION2, ClassHandler(read_attention2, run.run_attention, read_attention2_call)
    ),
    **dict.fromkeys(
        ATTENTION3, ClassHandler(read_attention3, run.run_attention, read_attention3_call)
    ),
    **dict.fromkeys(MLP, ClassHandler(read_mlp, run.run_mlp, ndim=None)),
}  # fmt: skip
EMBEDDINGS = {f"{library}.layers.patch_embed.PatchEmbed": "proj" for library in ("dinov2", "dinov3")}
