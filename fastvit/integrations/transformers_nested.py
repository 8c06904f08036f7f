"""Attention and MLP of ViT and DeiT in transformers 5.0 to 5.8, and attention of DINOv2 in 5.0 to 5.17: each in two
modules, of which the first has q, k and v or fc1, and the second the linear layer behind and its dropout."""

from __future__ import annotations

from typing import Any, NamedTuple

from fastvit import readers
from fastvit._modules import submodules
from fastvit.fuse import Attention, Mlp
from fastvit.integrations._transformers_attention import attention_of, check_attention
from fastvit.integrations._transformers_names import class_of
from fastvit.readers import ACTIVATIONS, DROPOUT, LINEAR


class Bare(NamedTuple):
    """Of a module that returns no weights beside attention's output."""

    attention: Attention


def is_nested(attn: Any) -> bool:
    return "attention" in attn._modules


def read_nested_attention(prefix: str, attn: Any) -> Attention:
    inner = attention_of(attn, "attention", class_of(prefix, "SelfAttention"))
    (output,) = submodules(attn, output={class_of(prefix, "SelfOutput")})
    check_attention(inner)
    qkv = submodules(inner, query=LINEAR, key=LINEAR, value=LINEAR)
    proj, dropout = submodules(output, dense=LINEAR, dropout=DROPOUT)
    layers = tuple(map(readers.read_layer, qkv))
    p = inner.dropout_prob if inner.training else 0.0
    return readers.describe_attention(layers, proj, inner.num_attention_heads, inner.scaling, p, dropout)


def read_nested_mlp(prefix: str, layer: Any) -> Mlp:
    first, last = submodules(
        layer, intermediate={class_of(prefix, "Intermediate")}, output={class_of(prefix, "Output")}
    )
    fc1, act = submodules(first, dense=LINEAR, intermediate_act_fn=ACTIVATIONS)
    fc2, dropout = submodules(last, dense=LINEAR, dropout=DROPOUT)
    return readers.describe_mlp(fc1, act, fc2, None, dropout)
