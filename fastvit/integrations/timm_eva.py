"""timm's EVA blocks, with and without rotary positions: EVA, EVA-02, DINOv3, Perception Encoder, ROPE-ViT.

Blocks with norms of q and k run their own forward, with what is known inside them fused.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from fastvit import fuse, fuse_eva
from fastvit._modules import Unsupported
from fastvit.integrations._plan import FUSED_BLOCK, Plan


def check_call(module: nn.Module, x: Any, rope: Any = None, attn_mask: Any = None, is_causal: bool = False) -> Any:
    if attn_mask is not None or is_causal:
        raise Unsupported("an attention mask")
    return x


_ATTENTION = Plan(fuse_eva.read_attention, fuse.run_attention, "attention, linear", check_call, rotary=fuse_eva.rotary)
PLANS = {
    "timm.models.eva.EvaBlock": Plan(
        fuse_eva.read_block, fuse.run_block, FUSED_BLOCK, check_call, rotary=fuse_eva.rotary
    ),
    "timm.models.eva.EvaAttention": _ATTENTION,
    "timm.layers.attention.AttentionRope": _ATTENTION,
}
EMBEDDINGS: dict[str, str] = {}
