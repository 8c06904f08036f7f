"""torchvision's Vision Transformers: vit_b_16, vit_b_32, vit_l_16, vit_l_32, vit_h_14."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from fastvit.blocks import read, run, spec
from fastvit.blocks.read import DROPOUT, NORM
from fastvit.blocks.spec import AttentionSpec, PlainLinear
from fastvit.blocks.submodules import CannotFuse, Classes, submodules
from fastvit.integrations.forward import ClassHandler
from fastvit.integrations.mlp_names import read_mlp

ATTENTION: Classes = {nn.MultiheadAttention}
OUT_PROJ: Classes = {nn.Linear, "torch.nn.modules.linear.NonDynamicallyQuantizableLinear"}
MLP: Classes = {"torchvision.models.vision_transformer.MLPBlock"}


def read_attention(attn: Any, dropout: read.Dropout = None) -> AttentionSpec:
    """Read nn.MultiheadAttention, whose qkv layer is two of its parameters, and the dropout after it."""
    if not attn.batch_first:
        raise CannotFuse("an nn.MultiheadAttention with tokens before samples")
    if attn.in_proj_weight is None or attn.bias_k is not None or attn.add_zero_attn:
        raise CannotFuse("an nn.MultiheadAttention with other keys and values than self-attention's")
    (proj,) = submodules(attn, out_proj=OUT_PROJ)
    qkv = PlainLinear(attn.in_proj_weight, attn.in_proj_bias)
    return read.describe_attention((qkv,), proj, attn.num_heads, None, attn.dropout if attn.training else 0.0, dropout)


def read_block(block: Any) -> spec.BlockSpec:
    (dropout,) = submodules(block, dropout=DROPOUT)
    first = read.read_half(partial(read_attention, dropout=dropout), {"self_attention": ATTENTION, "ln_1": NORM}, block)
    return first, read.read_half(read_mlp, {"mlp": MLP, "ln_2": NORM}, block)


HANDLERS = {
    "torchvision.models.vision_transformer.EncoderBlock": ClassHandler(read_block, run.run_block, takes_recompute=True),
    **dict.fromkeys(MLP, ClassHandler(read_mlp, run.run_mlp, ndim=None)),
}
EMBEDDINGS = {"torchvision.models.vision_transformer.VisionTransformer": "conv_proj"}
