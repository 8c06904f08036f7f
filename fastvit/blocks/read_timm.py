"""Read modules of timm's shape, ours included, as the descriptions of `spec.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from fastvit.blocks import read
from fastvit.blocks.read import ATTENTION, DROP_PATH, DROPOUT, LAYER_SCALE, LINEAR, MLP, NORM
from fastvit.blocks.read_mlp import read_mlp
from fastvit.blocks.spec import AttentionSpec, BlockSpec, HalfSpec, MlpSpec
from fastvit.blocks.submodules import CannotFuse, read_or_none, submodules
from fastvit.ops import Norm

_ATTENTION_PARTS = {"qkv": LINEAR, "proj": LINEAR, "attn_drop": DROPOUT, "proj_drop": DROPOUT}


def read_attention(attn: Any) -> AttentionSpec:
    qkv, proj, attn_drop, proj_drop = submodules(attn, _ATTENTION_PARTS)
    layers = read.read_packed(qkv, proj)
    norms: tuple[Any, ...] = ()
    if len(attn._modules) > 4:
        norms = read_norms_of_attention(attn)
    scale, training = attn.scale, attn_drop.training
    if attn.__dict__.get("fused_attn"):  # timm then leaves both to F.scaled_dot_product_attention
        scale, training = None, attn.training
    attn_drop_p = attn_drop.p if training else 0.0
    return read.describe_attention(layers, proj, attn.num_heads, scale, attn_drop_p, proj_drop, *norms)


def read_norms_of_attention(attn: nn.Module) -> tuple[Norm | None, tuple[Norm, Norm] | None]:
    """Read `norm`, `q_norm` and `k_norm`, which timm's attention may have in addition to its four layers. Raises
    CannotFuse for a gate, which no op has."""
    if not read.is_left_out(attn, "gate"):
        raise CannotFuse("a gate in attention")
    return read.read_inner_norm(attn), read.read_qk_norm(attn)


read_attention_half: Callable[[Any], HalfSpec[AttentionSpec]] = partial(
    read.read_half, read_attention, {"attn": ATTENTION, "norm1": NORM, "ls1": LAYER_SCALE, "drop_path1": DROP_PATH}
)
read_mlp_half: Callable[[Any], HalfSpec[MlpSpec]] = partial(
    read.read_half, read_mlp, {"mlp": MLP, "norm2": NORM, "ls2": LAYER_SCALE, "drop_path2": DROP_PATH}
)


def read_halves(block: Any) -> tuple[HalfSpec[AttentionSpec] | None, HalfSpec[MlpSpec] | None]:
    """Read both halves of a block; None for one that cannot be fused."""
    return read_or_none(read_attention_half, block), read_or_none(read_mlp_half, block)


def read_block(block: Any) -> BlockSpec:
    return read_attention_half(block), read_mlp_half(block)
