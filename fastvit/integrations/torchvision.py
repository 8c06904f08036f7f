"""torchvision's Vision Transformers: vit_b_16, vit_b_32, vit_l_16, vit_l_32, vit_h_14."""

from __future__ import annotations

from typing import Any

from fastvit._fusible import affine
from fastvit._halves import Affine, AttentionParts, Ends, MlpParts
from fastvit.integrations._plan import (
    FUSED_BLOCK,
    LAYER_NORM,
    LINEAR,
    BlockParts,
    Cannot,
    Plan,
    check_dropout,
    check_heads,
    part,
    read_activation,
    read_dropout,
    read_dropouts,
    read_norm,
    run_block,
    run_mlp,
)

ATTENTION = ("torch.nn.modules.activation.MultiheadAttention",)
OUT_PROJ = (*LINEAR, "torch.nn.modules.linear.NonDynamicallyQuantizableLinear")
MLP = ("torchvision.models.vision_transformer.MLPBlock",)


def read_attention(block: Any) -> AttentionParts:
    """Of nn.MultiheadAttention, whose qkv layer is two parameters of its own, and the dropout behind it."""
    attn = part(block, "self_attention", ATTENTION)
    if attn.in_proj_weight is None or attn.bias_k is not None or attn.add_zero_attn or not attn.batch_first:
        raise Cannot("an nn.MultiheadAttention with other keys and values than self-attention's")
    check_heads(attn.embed_dim, attn.num_heads)
    return AttentionParts(
        (Affine(attn.in_proj_weight, attn.in_proj_bias),),
        affine(part(attn, "out_proj", OUT_PROJ)),
        attn.num_heads,
        attn_p=check_dropout(attn.dropout if attn.training else 0.0),
        proj_p=read_dropout(block, "dropout"),
    )


def read_mlp(mlp: Any) -> MlpParts:
    p = read_dropouts(mlp, "2", "4")
    return MlpParts(affine(part(mlp, "0", LINEAR)), affine(part(mlp, "3", LINEAR)), read_activation(mlp, "1"), *p)


def read_block(block: Any) -> BlockParts:
    return (
        read_attention(block),
        Ends(read_norm(part(block, "ln_1", LAYER_NORM))),
        read_mlp(part(block, "mlp", MLP)),
        Ends(read_norm(part(block, "ln_2", LAYER_NORM))),
    )


PLANS = {
    "torchvision.models.vision_transformer.EncoderBlock": Plan(read_block, run_block, FUSED_BLOCK),
    **dict.fromkeys(MLP, Plan(read_mlp, run_mlp, "mlp", ndim=None)),
}
EMBEDDINGS = {"torchvision.models.vision_transformer.VisionTransformer": "conv_proj"}
