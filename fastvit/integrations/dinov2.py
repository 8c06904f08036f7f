"""Meta's DINOv2 repository: blocks and attention as `dinov2.layers` has them."""

from __future__ import annotations

from typing import Any

from torch import nn

from fastvit._fusible import active_p, affine
from fastvit._halves import AttentionParts, Ends, MlpParts
from fastvit.integrations._plan import (
    DROPOUT,
    FUSED_BLOCK,
    IDENTITY,
    LAYER_NORM,
    LINEAR,
    BlockParts,
    Cannot,
    Plan,
    only_input,
    part,
    qualified,
    read_activation,
    read_dropout,
    read_norm,
    read_packed_attention,
    run_attention,
    run_block,
    run_mlp,
)

ATTENTION = ("dinov2.layers.attention.MemEffAttention", "dinov2.layers.attention.Attention")
MLP = ("dinov2.layers.mlp.Mlp",)
LAYER_SCALE = ("dinov2.layers.layer_scale.LayerScale",)


def read_attention(attn: Any) -> AttentionParts:
    if "attn_drop" in attn._modules:  # until 2025
        p, scale = active_p(part(attn, "attn_drop", DROPOUT)), attn.scale
    else:
        p, scale = attn.attn_drop if attn.training else 0.0, None
    if p and qualified(attn) == ATTENTION[0]:
        raise Cannot("a dropout of attention, which xformers leaves out")
    return read_packed_attention(attn, p, scale)


def read_mlp(mlp: Any) -> MlpParts:
    p = read_dropout(mlp, "drop")
    return MlpParts(
        affine(part(mlp, "fc1", LINEAR)), affine(part(mlp, "fc2", LINEAR)), read_activation(mlp, "act"), p, p
    )


def read_ends(block: Any, norm: str, scale: str) -> Ends:
    gamma = part(block, scale, LAYER_SCALE + IDENTITY)
    return Ends(read_norm(part(block, norm, LAYER_NORM)), None if isinstance(gamma, nn.Identity) else gamma.gamma)


def read_block(block: Any) -> BlockParts:
    return (
        read_attention(part(block, "attn", ATTENTION)),
        read_ends(block, "norm1", "ls1"),
        read_mlp(part(block, "mlp", MLP)),
        read_ends(block, "norm2", "ls2"),
    )


def admit_block(block: Any, *args: Any, **kwargs: Any) -> Any:
    x = only_input(block, *args, **kwargs)
    if isinstance(x, list):
        raise Cannot("a list of crops")
    if block.training and block.sample_drop_ratio > 0.0:
        raise Cannot("stochastic depth in training, which leaves samples out of the batch")
    return x


def admit_attention(attn: Any, x: Any, mask: Any = None, *, attn_bias: Any = None, is_causal: bool = False) -> Any:
    """mask: MemEffAttention's attn_bias, or Attention's is_causal."""
    if not (mask is None or mask is False) or attn_bias is not None or is_causal:
        raise Cannot("an attention bias or causality")
    return x


_BLOCK = Plan(read_block, run_block, FUSED_BLOCK, admit_block)
_ATTENTION = Plan(read_attention, run_attention, "attention_qkvpacked, linear", admit_attention)
PLANS = {
    "dinov2.layers.block.Block": _BLOCK,
    "dinov2.layers.block.NestedTensorBlock": _BLOCK,
    **dict.fromkeys(ATTENTION, _ATTENTION),
    **dict.fromkeys(MLP, Plan(read_mlp, run_mlp, "mlp", ndim=None)),
}
EMBEDDINGS = {"dinov2.layers.patch_embed.PatchEmbed": "proj"}
