"""timm's Vision Transformers: vit, deit, deit3, dinov2, CLIP and SigLIP towers, and other models with their blocks."""

from __future__ import annotations

from typing import Any

from torch import nn

from fastvit.blocks import read, read_parallel, read_timm, run
from fastvit.blocks.submodules import CannotFuse
from fastvit.integrations.forward import ClassHandler, checked_mask


def check_call(module: nn.Module, x: Any, attn_mask: Any = None, is_causal: bool = False) -> Any:
    if is_causal and attn_mask is not None:  # timm's own forward raises or ignores the mask
        raise CannotFuse("a mask and is_causal")
    return x


def masks(module: nn.Module, x: Any, attn_mask: Any = None, is_causal: bool = False) -> dict[str, Any]:
    return {"attn_mask": checked_mask(attn_mask, x.shape[1]), "is_causal": bool(is_causal)}


HANDLERS = {
    "timm.models.vision_transformer.Block": ClassHandler(
        read_timm.read_block, run.run_block, check_call, options=masks, takes_recompute=True
    ),
    "timm.models.vision_transformer.ParallelScalingBlock": ClassHandler(
        read_parallel.read_block, read_parallel.run_block, check_call, options=masks
    ),
    **dict.fromkeys(
        read.ATTENTION, ClassHandler(read_timm.read_attention, run.run_attention, check_call, options=masks)
    ),
    **dict.fromkeys(read.MLP, ClassHandler(read_timm.read_mlp, run.run_mlp, ndim=None)),
}
EMBEDDINGS = {"timm.layers.patch_embed.PatchEmbed": "proj"}
