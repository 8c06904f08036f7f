"""timm's EVA blocks, with and without rotary positions: EVA, EVA-02, DINOv3, Perception Encoder, ROPE-ViT, and those of
DeepSeek's vision encoder.

Blocks with norms after their branches (`EvaBlockPostNorm`) run their own forward; the modules in them are fused.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fastvit.blocks import read_eva, run
from fastvit.blocks.submodules import CannotFuse
from fastvit.integrations.forward import ClassHandler
from fastvit.integrations.libraries import timm
from fastvit.ops import Rotary


def check_call(module: nn.Module, x: Any, rope: Any = None, attn_mask: Any = None, is_causal: bool = False) -> Any:
    return timm.check_call(module, x, attn_mask, is_causal)


def masks(
    module: nn.Module, x: Any, rope: Any = None, attn_mask: Any = None, is_causal: bool = False
) -> dict[str, Any]:
    return timm.masks(module, x, attn_mask, is_causal)


def rotary(module: Any, x: Tensor, rope: Tensor | None = None, *_: Any, **__: Any) -> Rotary | None:
    positions = read_eva.rotary(module, x, rope)
    if positions is not None and x.shape[1] != positions.num_prefix_tokens + positions.sin.shape[-2]:
        raise CannotFuse(f"rotary positions for {positions.sin.shape[-2]} of {x.shape[1]} tokens")
    return positions


_ATTENTION = ClassHandler(read_eva.read_attention, run.run_attention, check_call, rotary=rotary, options=masks)
_BLOCK = ClassHandler(
    read_eva.read_block, run.run_block, check_call, rotary=rotary, options=masks, takes_recompute=True
)
HANDLERS = {
    "timm.models.eva.EvaBlock": _BLOCK,
    "timm.models.deepseek_vit.DeepseekVitBlock": _BLOCK,
    "timm.models.eva.EvaAttention": _ATTENTION,
    "timm.layers.attention.AttentionRope": _ATTENTION,
}
EMBEDDINGS: dict[str, str] = {}
