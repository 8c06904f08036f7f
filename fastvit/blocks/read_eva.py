"""Read blocks of EVA, DINOv3 and the Perception Encoder, timm's and ours, as the descriptions of `spec.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from fastvit.blocks import read
from fastvit.blocks.read import DROP_PATH, MLP, NORM
from fastvit.blocks.read_mlp import read_mlp
from fastvit.blocks.read_timm import read_attention
from fastvit.blocks.spec import AttentionSpec, BlockSpec, HalfSpec, MlpSpec
from fastvit.blocks.submodules import Classes, read_or_none, submodules
from fastvit.ops import Rotary

ATTENTION: Classes = {
    "fastvit.layers.Attention",
    "fastvit.eva_layers.AttentionRope",
    "fastvit.eva_layers.EvaAttention",
    "timm.layers.attention.AttentionRope",
    "timm.models.eva.EvaAttention",
}


def _read_half(
    read_branch: Callable[[Any], Any], parts: Mapping[str, Classes], gamma: str, block: Any
) -> HalfSpec[Any]:
    """Read a half whose LayerScale is a parameter of the block, or None."""
    branch, norm, drop_path = submodules(block, parts)
    return HalfSpec(
        read_branch(branch), read.read_norm(norm), getattr(block, gamma, None), *read.read_drop_path(drop_path)
    )


_read_attention_half: Callable[[Any], HalfSpec[AttentionSpec]] = partial(
    _read_half, read_attention, {"attn": ATTENTION, "norm1": NORM, "drop_path1": DROP_PATH}, "gamma_1"
)
_read_mlp_half: Callable[[Any], HalfSpec[MlpSpec]] = partial(
    _read_half, read_mlp, {"mlp": MLP, "norm2": NORM, "drop_path2": DROP_PATH}, "gamma_2"
)


def read_halves(block: Any) -> tuple[HalfSpec[AttentionSpec] | None, HalfSpec[MlpSpec] | None]:
    """Read both halves of a block; None for one that cannot be fused."""
    return read_or_none(_read_attention_half, block), read_or_none(_read_mlp_half, block)


def read_block(block: Any) -> BlockSpec:
    return _read_attention_half(block), _read_mlp_half(block)


def rotary(module: Any, x: Tensor, rope: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Rotary | None:
    """Describe the rotary tables of a call. rope: sin and cos side by side, (..., N - P, 2 * d); with cu_seqlens
    (T, 2 * d)."""
    if rope is None:
        return None
    attn = module._modules.get("attn", module)
    sin, cos = rope.chunk(2, dim=-1)
    return Rotary(sin, cos, attn.num_prefix_tokens if cu_seqlens is None else 0, interleaved=not attn.rotate_half)
