"""timm's Vision Transformers: vit, deit, deit3, dinov2, the CLIP and SigLIP towers, and what else uses their blocks."""

from __future__ import annotations

from typing import Any

from torch import nn

from fastvit import fuse, readers, readers_parallel
from fastvit._modules import Unsupported
from fastvit.integrations._plan import Plan, checked_mask


def check_call(module: nn.Module, x: Any, attn_mask: Any = None, is_causal: bool = False) -> Any:
    if is_causal:
        raise Unsupported("a causal mask")
    return x


def mask(module: nn.Module, x: Any, attn_mask: Any = None, is_causal: bool = False) -> Any:
    return checked_mask(attn_mask, x)


PLANS = {
    "timm.models.vision_transformer.Block": Plan(readers.read_block, fuse.run_block, check_call, mask=mask),
    "timm.models.vision_transformer.ParallelScalingBlock": Plan(
        readers_parallel.read_block, readers_parallel.run_block, check_call, mask=mask
    ),
    **dict.fromkeys(readers.ATTENTION, Plan(readers.read_attention, fuse.run_attention, check_call, mask=mask)),
    **dict.fromkeys(readers.MLP, Plan(readers.read_mlp, fuse.run_mlp, ndim=None)),
}
EMBEDDINGS = {"timm.layers.patch_embed.PatchEmbed": "proj"}
