"""Attention and MLP of ViT and DeiT in transformers 5.0 to 5.8, and attention of DINOv2 in 5.0 to 5.17. Each is two
modules: the first has q, k and v or fc1, the second has the last linear layer and its dropout."""

from __future__ import annotations

from typing import Any, NamedTuple

from fastvit.blocks import read
from fastvit.blocks.read import ACTIVATIONS, DROPOUT, LINEAR
from fastvit.blocks.spec import AttentionSpec, MlpSpec
from fastvit.blocks.submodules import submodules
from fastvit.integrations.transformers.classes import class_of
from fastvit.integrations.transformers.hooks import attention_of, check_attention


class WithoutWeights(NamedTuple):
    """Attention of a module that returns only the output, without weights."""

    attention: AttentionSpec


def is_nested(attn: Any) -> bool:
    return "attention" in attn._modules


def read_nested_attention(prefix: str, attn: Any) -> AttentionSpec:
    inner = attention_of(attn, "attention", class_of(prefix, "SelfAttention"))
    (output,) = submodules(attn, output={class_of(prefix, "SelfOutput")})
    check_attention(inner)
    qkv = submodules(inner, query=LINEAR, key=LINEAR, value=LINEAR)
    proj, dropout = submodules(output, dense=LINEAR, dropout=DROPOUT)
    layers = tuple(map(read.read_layer, qkv))
    p = inner.dropout_prob if inner.training else 0.0
    return read.describe_attention(layers, proj, inner.num_attention_heads, inner.scaling, p, dropout)


def read_nested_mlp(prefix: str, layer: Any) -> MlpSpec:
    first, last = submodules(
        layer, intermediate={class_of(prefix, "Intermediate")}, output={class_of(prefix, "Output")}
    )
    fc1, act = submodules(first, dense=LINEAR, intermediate_act_fn=ACTIVATIONS)
    fc2, dropout = submodules(last, dense=LINEAR, dropout=DROPOUT)
    return read.describe_mlp(fc1, act, fc2, None, dropout)
