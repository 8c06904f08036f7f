"""timm's EVA blocks, with and without rotary positions: EVA, EVA-02, DINOv3, Perception Encoder, ROPE-ViT.

The rotation runs as PyTorch's own functions between two fused ops. Blocks with norms of q and k run their own forward,
with what is known inside them fused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastvit import fuse
from fastvit._modules import Unsupported, submodules
from fastvit.fuse import DROP_PATH, DROPOUT, LAYER_NORM, LINEAR, MLP, Attention, Half, Layer, Linear, Rotary
from fastvit.integrations._plan import ROTARY_BLOCK, Plan

EVA_ATTENTION = "timm.models.eva.EvaAttention"
ROPE_ATTENTION = "timm.layers.attention.AttentionRope"
ATTENTION = {EVA_ATTENTION, ROPE_ATTENTION}


def read_attention(attn: Any) -> Attention:
    attn_drop, proj, proj_drop = submodules(attn, attn_drop=DROPOUT, proj=LINEAR, proj_drop=DROPOUT)
    fuse.refuse_options(attn)
    layers: tuple[Layer, ...]
    if attn._modules.get("qkv") is not None:
        (packed,) = submodules(attn, qkv=LINEAR)
        layers, width = (_with_biases(attn, packed),), packed.out_features
    else:
        three = submodules(attn, q_proj=LINEAR, k_proj=LINEAR, v_proj=LINEAR)
        layers, width = tuple(map(fuse.read_layer, three)), sum(layer.out_features for layer in three)
    if width != 3 * proj.in_features:
        raise Unsupported(f"q, k and v have {width} outputs for {proj.in_features} inputs of proj")
    # with fused_attn timm leaves both to F.scaled_dot_product_attention
    scale, training = (None, attn.training) if attn.fused_attn else (attn.scale, attn_drop.training)
    p = attn_drop.p if training else 0.0
    return fuse.describe_attention(layers, proj, attn.num_heads, scale, p, proj_drop)


def _with_biases(attn: Any, packed: nn.Linear) -> Layer:
    """EvaAttention's packed layer has no bias of its own, but parameters for q's and v's, and zeros for k's."""
    layer = fuse.read_layer(packed)
    q_bias = getattr(attn, "q_bias", None)
    if q_bias is None:
        return layer
    if attn.qkv_bias_separate or not isinstance(layer, Linear):
        raise Unsupported("a bias that is added behind the qkv layer")
    return Linear(layer.weight, torch.cat((q_bias, attn.k_bias, attn.v_bias)))


def read_block(block: Any) -> fuse.Block:
    norm1, attn, drop_path1 = submodules(block, norm1=LAYER_NORM, attn=ATTENTION, drop_path1=DROP_PATH)
    norm2, mlp, drop_path2 = submodules(block, norm2=LAYER_NORM, mlp=MLP, drop_path2=DROP_PATH)
    return (
        Half(read_attention(attn), fuse.read_norm(norm1), block.gamma_1, *_drop_path(drop_path1)),
        Half(fuse.read_mlp(mlp), fuse.read_norm(norm2), block.gamma_2, *_drop_path(drop_path2)),
    )


def _drop_path(module: Any) -> tuple[float, bool]:
    if isinstance(module, nn.Identity) or not module.training:
        return 0.0, True
    return module.drop_prob, module.scale_by_keep


def check_call(module: nn.Module, x: Any, rope: Any = None, attn_mask: Any = None, is_causal: bool = False) -> Any:
    if attn_mask is not None or is_causal:
        raise Unsupported("an attention mask")
    return x


def rotary(module: Any, x: Tensor, rope: Tensor | None = None, *_: Any, **__: Any) -> Rotary | None:
    """rope: sin and cos side by side, (..., N - P, 2 * d)."""
    if rope is None:
        return None
    attn = module._modules.get("attn", module)
    if x.shape[1] != attn.num_prefix_tokens + rope.shape[-2]:
        raise Unsupported(f"rotary positions for {rope.shape[-2]} of {x.shape[1]} tokens")
    sin, cos = rope.chunk(2, dim=-1)
    return Rotary(sin, cos, interleaved=not attn.rotate_half)


_ATTENTION = Plan(read_attention, fuse.run_attention, "attention, linear", check_call, rotary=rotary)
PLANS = {
    "timm.models.eva.EvaBlock": Plan(read_block, fuse.run_block, ROTARY_BLOCK, check_call, rotary=rotary),
    **dict.fromkeys(ATTENTION, _ATTENTION),
}
EMBEDDINGS: dict[str, str] = {}
