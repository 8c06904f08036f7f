"""timm's Vision Transformers: vit, deit, deit3, dinov2, the CLIP and SigLIP towers, and what else uses their blocks."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

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
    part,
    read_activation,
    read_dropouts,
    read_norm,
    read_packed_attention,
    run_attention,
    run_block,
    run_mlp,
)

ATTENTION = ("timm.layers.attention.Attention", "timm.models.vision_transformer.Attention")
MLP = ("timm.layers.mlp.Mlp",)
LAYER_SCALE = ("timm.layers.layer_scale.LayerScale", "timm.models.vision_transformer.LayerScale")
DROP_PATH = ("timm.layers.drop.DropPath",)


def read_attention(attn: Any) -> AttentionParts:
    for name, meaning in (("q_norm", "qk-norm"), ("k_norm", "qk-norm"), ("norm", "scale_norm"), ("gate", "a gate")):
        child = attn._modules.get(name)
        if child is not None and not isinstance(child, nn.Identity):
            raise Cannot(f"{meaning} in attention")
    drop = part(attn, "attn_drop", DROPOUT)
    if attn.fused_attn:  # then F.scaled_dot_product_attention scales, and drops when the module around is in training
        return read_packed_attention(attn, drop.p if attn.training else 0.0, None)
    return read_packed_attention(attn, active_p(drop), attn.scale)


def read_mlp(mlp: Any) -> MlpParts:
    if "norm" in mlp._modules:
        part(mlp, "norm", IDENTITY)
    fc1, fc2 = part(mlp, "fc1", LINEAR), part(mlp, "fc2", LINEAR)
    p = read_dropouts(mlp, "drop1", "drop2")
    return MlpParts(affine(fc1), affine(fc2), read_activation(mlp, "act"), *p)


def read_ends(block: Any, norm: str, scale: str, drop_path: str) -> Ends:
    gamma, path = part(block, scale, LAYER_SCALE + IDENTITY), part(block, drop_path, DROP_PATH + IDENTITY)
    drop = (0.0, True)
    if path.training and not isinstance(path, nn.Identity):
        drop = path.drop_prob, path.scale_by_keep
    return Ends(read_norm(part(block, norm, LAYER_NORM)), None if isinstance(gamma, nn.Identity) else gamma.gamma, drop)


def read_block(block: Any) -> BlockParts:
    return (
        read_attention(part(block, "attn", ATTENTION)),
        read_ends(block, "norm1", "ls1", "drop_path1"),
        read_mlp(part(block, "mlp", MLP)),
        read_ends(block, "norm2", "ls2", "drop_path2"),
    )


def admit(module: nn.Module, x: Any, attn_mask: Tensor | None = None, is_causal: bool = False) -> Any:
    if attn_mask is not None or is_causal:
        raise Cannot("an attention mask")
    return x


PLANS = {
    "timm.models.vision_transformer.Block": Plan(read_block, run_block, FUSED_BLOCK, admit),
    **dict.fromkeys(ATTENTION, Plan(read_attention, run_attention, "attention_qkvpacked, linear", admit)),
    **dict.fromkeys(MLP, Plan(read_mlp, run_mlp, "mlp", ndim=None)),
}
EMBEDDINGS = {"timm.layers.patch_embed.PatchEmbed": "proj"}
