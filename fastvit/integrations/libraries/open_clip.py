"""Blocks of open_clip's own towers, of images and of text. Its models have towers of timm and transformers, too, which
are fused as in those libraries."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fastvit.blocks import read, run, spec
from fastvit.blocks.read import NORM
from fastvit.blocks.submodules import CannotFuse, Classes
from fastvit.integrations.forward import Call, ClassHandler, checked_mask
from fastvit.integrations.libraries.torchvision import ATTENTION, read_attention
from fastvit.integrations.mlp_names import read_mlp

_FILE = "open_clip.transformer"
LAYER_SCALE: Classes = {nn.Identity, f"{_FILE}.LayerScale"}
_ATTENTION_HALF: dict[str, Classes] = {"attn": ATTENTION, "ln_1": NORM, "ls_1": LAYER_SCALE}
_MLP_HALF: dict[str, Classes] = {"mlp": {nn.Sequential}, "ln_2": NORM, "ls_2": LAYER_SCALE}


def read_block(block: Any) -> spec.BlockSpec:
    if "ln_1_kv" in block._modules:
        raise CannotFuse("keys and values of another tensor")
    first = read.read_half(read_attention, _ATTENTION_HALF, block)
    return first, read.read_half(read_mlp, _MLP_HALF, block)


def read_call(block: Any, q_x: Tensor, k_x: Any = None, v_x: Any = None, attn_mask: Any = None) -> Call:
    """Read a call. k_x, v_x: left out, as in the block's own forward. attn_mask: floating, added to the scores, (N, N)
    or (B * H, N, N)."""
    if attn_mask is not None and not attn_mask.is_floating_point():
        raise CannotFuse("an attention mask that is not floating")
    if attn_mask is not None and attn_mask.dim() == 3:
        attn_mask = attn_mask.unflatten(0, (-1, block.attn.num_heads))
    return q_x, {"attn_mask": checked_mask(attn_mask, q_x.shape[1])}


HANDLERS = {
    f"{_FILE}.ResidualAttentionBlock": ClassHandler(read_block, run.run_block, read_call, takes_recompute=True),
}
EMBEDDINGS = {f"{_FILE}.VisionTransformer": "conv1"}
