"""Meta's DINOv2 repository: the blocks, attention and MLPs of `dinov2.layers`."""

from __future__ import annotations

from typing import Any

from torch import nn

from fastvit.blocks import read, run, spec
from fastvit.blocks.read import DROPOUT, LINEAR, NORM
from fastvit.blocks.spec import AttentionSpec, MlpSpec
from fastvit.blocks.submodules import CannotFuse, Classes, class_name, has_own_forward, qualified_name, submodules
from fastvit.integrations.forward import ClassHandler, only_input

BLOCK = {"dinov2.layers.block.Block", "dinov2.layers.block.NestedTensorBlock"}
XFORMERS_ATTENTION = "dinov2.layers.attention.MemEffAttention"
ATTENTION = {XFORMERS_ATTENTION, "dinov2.layers.attention.Attention"}
MLP = {"dinov2.layers.mlp.Mlp", "dinov2.layers.swiglu_ffn.SwiGLUFFN", "dinov2.layers.swiglu_ffn.SwiGLUFFNFused"}
LAYER_SCALE: Classes = {nn.Identity, "dinov2.layers.layer_scale.LayerScale"}


def check_bases(module: nn.Module) -> None:
    """Check that base classes have their own forward, which NestedTensorBlock and MemEffAttention call."""
    for base in type(module).__mro__[1:]:
        forward = base.__dict__.get("forward")
        if forward is not None and base is not nn.Module and not has_own_forward(base, forward):
            raise CannotFuse(f"the forward of {class_name(base)} was replaced")


def read_attention(attn: Any) -> AttentionSpec:
    check_bases(attn)
    if "attn_drop" in attn._modules:  # until 2025
        (drop,) = submodules(attn, attn_drop=DROPOUT)
        p, scale = drop.p if drop.training else 0.0, attn.scale
    else:
        p, scale = attn.attn_drop if attn.training else 0.0, None
    if p and qualified_name(attn) == XFORMERS_ATTENTION:
        raise CannotFuse("a dropout of attention, which xformers leaves out")
    qkv, proj, proj_drop = submodules(attn, qkv=LINEAR, proj=LINEAR, proj_drop=DROPOUT)
    if qkv.out_features != 3 * proj.in_features:
        raise CannotFuse(f"qkv has {qkv.out_features} outputs for {proj.in_features} inputs of proj")
    return read.describe_attention((read.read_layer(qkv),), proj, attn.num_heads, scale, p, proj_drop)


def read_mlp(mlp: Any) -> MlpSpec:
    """Read an MLP of DINOv2, or of DINOv3, whose SwiGLU has a layer each for gate and value."""
    if "w3" in mlp._modules:  # no dropout, and a function for its activation
        names = ("w1", "w2", "w3") if "w1" in mlp._modules else ("w12", "w3")
        *both, last = submodules(mlp, **dict.fromkeys(names, LINEAR))
        return read.describe_gated_mlp(both, read.SILU, last)
    fc1, act, fc2, drop = submodules(mlp, fc1=LINEAR, act=read.ACTIVATIONS, fc2=LINEAR, drop=DROPOUT)
    return read.describe_mlp(fc1, act, fc2, drop, drop)


def read_block(block: Any) -> spec.BlockSpec:
    """Read a block without stochastic depth, which `check_block_call` checks."""
    check_bases(block)
    attn, norm1, ls1 = submodules(block, attn=ATTENTION, norm1=NORM, ls1=LAYER_SCALE)
    mlp, norm2, ls2 = submodules(block, mlp=MLP, norm2=NORM, ls2=LAYER_SCALE)
    return read.describe_half(read_attention(attn), norm1, ls1), read.describe_half(read_mlp(mlp), norm2, ls2)


def check_block_call(block: Any, *args: Any, **kwargs: Any) -> Any:
    x = only_input(block, *args, **kwargs)
    if isinstance(x, list):
        raise CannotFuse("a list of crops")
    if block.training and block.sample_drop_ratio > 0.0:
        raise CannotFuse("stochastic depth in training, which leaves samples out of the batch")
    return x


def check_attention_call(attn: Any, x: Any, mask: Any = None, *, attn_bias: Any = None, is_causal: bool = False) -> Any:
    """mask: MemEffAttention's attn_bias, or Attention's is_causal."""
    is_bias = mask is not None and (qualified_name(attn) == XFORMERS_ATTENTION or not isinstance(mask, bool))
    if is_bias or attn_bias is not None:
        raise CannotFuse("an attention bias")
    return x


def causality(attn: Any, x: Any, mask: Any = None, *, attn_bias: Any = None, is_causal: bool = False) -> dict[str, Any]:
    return {"is_causal": bool(mask or is_causal)}


HANDLERS = {
    **dict.fromkeys(BLOCK, ClassHandler(read_block, run.run_block, check_block_call, takes_recompute=True)),
    **dict.fromkeys(
        ATTENTION, ClassHandler(read_attention, run.run_attention, check_attention_call, options=causality)
    ),
    **dict.fromkeys(MLP, ClassHandler(read_mlp, run.run_mlp, ndim=None)),
}
EMBEDDINGS = {"dinov2.layers.patch_embed.PatchEmbed": "proj"}
