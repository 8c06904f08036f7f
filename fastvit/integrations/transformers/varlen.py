"""Attention of the vision towers of Qwen's, GLM's and other models in transformers (version 5). Images of several
sizes, or windows of them, follow each other in one sequence (T, D); `cu_seqlens` has the start of each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastvit.blocks import read
from fastvit.blocks.read import LINEAR
from fastvit.blocks.run import run_attention, within_sequences
from fastvit.blocks.spec import AttentionSpec
from fastvit.blocks.submodules import CannotFuse, submodules
from fastvit.integrations.forward import Call, ClassHandler
from fastvit.integrations.transformers import hooks
from fastvit.integrations.transformers.classes import VARLEN_ATTENTION
from fastvit.ops import Rotary

_IMPLEMENTATIONS = (None, "eager", "sdpa", "fastvit")


def read_attention(attn: Any) -> AttentionSpec:
    implementation = attn.config._attn_implementation
    if implementation not in _IMPLEMENTATIONS and not implementation.startswith("flash_attention"):
        raise CannotFuse(f"its attention implementation is {implementation!r}")
    qkv, proj = submodules(attn, qkv=LINEAR, proj=LINEAR)
    p = attn.attention_dropout if attn.training else 0.0
    return read.describe_attention(read.read_packed(qkv, proj), proj, attn.num_heads, attn.scaling, p, None)


def read_call(
    module: Any, hidden_states: Tensor, cu_seqlens: Any = None, position_embeddings: Any = None,
    max_seqlen: Any = None, **kwargs: Any,
) -> Call:  # fmt: skip
    """Read the rotary positions of all tokens, and the ends of sequences as `ops.attention_varlen` takes them.
    position_embeddings: cos and sin, (T, d) each.

    The longest length is read from the device, as the library does to split the sequences, unless it is given or a
    graph is being made, which that would break."""
    hooks.check_others(kwargs)
    if not isinstance(cu_seqlens, Tensor) or position_embeddings is None:
        raise CannotFuse("no cu_seqlens or no rotary positions")
    cos, sin = position_embeddings
    if max_seqlen is None and not torch.compiler.is_compiling() and not _captured(hidden_states):
        max_seqlen = int((cu_seqlens[1:] - cu_seqlens[:-1]).max())
    rotary = Rotary(sin.float(), cos.float())
    return hidden_states, {"rotary": rotary, "cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}


def _captured(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def run(x: Tensor, attn: AttentionSpec, rotary: Rotary, cu_seqlens: Tensor, max_seqlen: int | None) -> Tensor:
    return run_attention(x, within_sequences(attn, x, cu_seqlens, max_seqlen), rotary)


HANDLERS: dict[type | str, ClassHandler] = dict.fromkeys(
    VARLEN_ATTENTION,
    ClassHandler(
        read_attention,
        run,
        read_call,
        ndim=2,
        op="rotary_qkvpacked, attention_varlen_qkvpacked, linear",
    ),
)
