"""Attention of the vision towers of Qwen's, GLM's and other models in transformers (version 5). Images of several
sizes, or windows of them, follow each other in one sequence (T, D); `cu_seqlens` has the start of each."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastvit import ops
from fastvit.blocks import read
from fastvit.blocks.read import LINEAR
from fastvit.blocks.spec import AdaptedLinear, LinearSpec
from fastvit.blocks.submodules import CannotFuse, submodules
from fastvit.integrations.forward import ClassHandler
from fastvit.integrations.transformers.classes import VARLEN_ATTENTION
from fastvit.ops import Rotary

_IMPLEMENTATIONS = (None, "eager", "sdpa", "fastvit")


class VarlenSpec(NamedTuple):
    """Attention over packed sequences. dropout_p: of the attention probabilities, 0 in evaluation."""

    qkv: LinearSpec
    proj: LinearSpec
    num_heads: int
    scale: float
    dropout_p: float


class Sequences(NamedTuple):
    """Rotary positions of all tokens, and the ends of sequences as `ops.attention_varlen` takes them."""

    rotary: Rotary
    cu_seqlens: Tensor
    max_seqlen: int | None


def read_attention(attn: Any) -> VarlenSpec:
    implementation = attn.config._attn_implementation
    if implementation not in _IMPLEMENTATIONS and not implementation.startswith("flash_attention"):
        raise CannotFuse(f"its attention implementation is {implementation!r}")
    qkv, proj = submodules(attn, qkv=LINEAR, proj=LINEAR)
    if qkv.out_features != 3 * proj.in_features:
        raise CannotFuse(f"qkv has {qkv.out_features} outputs for {proj.in_features} inputs of proj")
    p = attn.attention_dropout if attn.training else 0.0
    attention = read.describe_attention((read.read_layer(qkv),), proj, attn.num_heads, attn.scaling, p, None)
    return VarlenSpec(attention.qkv[0], attention.proj, attention.num_heads, attn.scaling, p)


def check_call(
    module: Any, hidden_states: Any, cu_seqlens: Any = None, position_embeddings: Any = None, max_seqlen: Any = None,
    **kwargs: Any,
) -> Any:  # fmt: skip
    for name, value in kwargs.items():
        if value is not None and value is not False:
            raise CannotFuse(f"the argument {name}")
    return hidden_states


def read_sequences(
    module: Any, hidden_states: Tensor, cu_seqlens: Any = None, position_embeddings: Any = None,
    max_seqlen: Any = None, **_: Any,
) -> Sequences:  # fmt: skip
    """Return a call's sequences. position_embeddings: cos and sin, (T, d) each.

    The longest length is read from the device, as the library does to split the sequences, unless it is given or a
    graph is being made, which that would break."""
    if not isinstance(cu_seqlens, Tensor) or position_embeddings is None:
        raise CannotFuse("no cu_seqlens or no rotary positions")
    cos, sin = position_embeddings
    if max_seqlen is None and not torch.compiler.is_compiling() and not _captured(hidden_states):
        max_seqlen = int((cu_seqlens[1:] - cu_seqlens[:-1]).max())
    return Sequences(Rotary(sin.float(), cos.float()), cu_seqlens, max_seqlen)


def _captured(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def run(x: Tensor, attn: VarlenSpec, sequences: Sequences) -> Tensor:
    qkv = attn.qkv.module(x) if isinstance(attn.qkv, AdaptedLinear) else F.linear(x, *attn.qkv)
    q, k, v = ops.rotary_qkvpacked(qkv.view(1, len(x), 3, attn.num_heads, -1), sequences.rotary)[0].unbind(1)
    out = ops.attention_varlen(
        q, k, v, sequences.cu_seqlens, sequences.max_seqlen, scale=attn.scale, dropout_p=attn.dropout_p
    ).flatten(1)
    return attn.proj.module(out) if isinstance(attn.proj, AdaptedLinear) else ops.linear(out, *attn.proj)


HANDLERS: dict[type | str, ClassHandler] = dict.fromkeys(
    VARLEN_ATTENTION,
    ClassHandler(
        read_attention, run, check_call, ndim=2, rotary=read_sequences, op="rotary_qkvpacked, attention_varlen, linear"
    ),
)
