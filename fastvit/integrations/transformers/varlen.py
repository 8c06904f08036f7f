"""Blocks and attention of the vision towers of Qwen, GLM and others in transformers (version 5). Images of several
sizes, or windows of them, follow each other in one sequence (T, D); `cu_seqlens` has the start of each."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastvit.blocks import run
from fastvit.blocks.recompute import Recompute
from fastvit.blocks.spec import AttentionSpec, BlockSpec
from fastvit.blocks.submodules import CannotFuse, Classes
from fastvit.integrations.forward import Call, ClassHandler
from fastvit.integrations.transformers import hooks
from fastvit.integrations.transformers.attention import describe, last_of
from fastvit.integrations.transformers.classes import (
    CLIP,
    DINO,
    VARLEN_ATTENTION,
    VARLEN_PAIR_ATTENTION,
    Parts,
    qualified,
)
from fastvit.integrations.transformers.layers import LayerHandler, read_layer
from fastvit.ops import Rotary

_IMPLEMENTATIONS = (None, "eager", "sdpa", "fastvit")


def read_attention(attn: Any) -> AttentionSpec:
    implementation = attn.config._attn_implementation
    if implementation not in _IMPLEMENTATIONS and not implementation.startswith("flash_attention"):
        raise CannotFuse(f"its attention implementation is {implementation!r}")
    return describe(attn, last_of(attn), None)


def read_attention_of_pair(attn: Any) -> AttentionSpec:
    hooks.check_no_weights(attn)
    return read_attention(attn)


def read_block(parts: Parts, attentions: Classes, block: Any) -> BlockSpec:
    """Read a block, which takes and returns tokens alone, whatever its attention returns."""
    return read_layer(parts, block, lambda attn, dropout: read_attention(attn), attentions)


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


def run_attention(x: Tensor, attn: AttentionSpec, rotary: Rotary, cu_seqlens: Tensor, max_seqlen: Any) -> Tensor:
    return run.run_attention(x, run.within_sequences(attn, x, cu_seqlens, max_seqlen), rotary)


def run_attention_of_pair(x: Tensor, attn: AttentionSpec, **options: Any) -> tuple[Tensor, None]:
    return run_attention(x, attn, **options), None


def run_block(
    x: Tensor, block: BlockSpec, rotary: Rotary, cu_seqlens: Tensor, max_seqlen: Any, recompute: Recompute
) -> Tensor:
    return run.run_block(x, run.within_sequences(block, x, cu_seqlens, max_seqlen), rotary, recompute=recompute)


_BLOCK = partial(LayerHandler, run=run_block, read_call=read_call, ndim=2)
_ALONE = partial(ClassHandler, read_call=read_call, ndim=2, op="attention_varlen, linear")
HANDLERS: dict[type | str, ClassHandler] = {
    qualified("qwen2_vl.Qwen2VLVisionBlock"): _BLOCK(
        partial(read_block, DINO._replace(attention="attn"), VARLEN_ATTENTION)
    ),
    qualified("paddleocr_vl.PaddleOCRVisionEncoderLayer"): _BLOCK(partial(read_block, CLIP, VARLEN_PAIR_ATTENTION)),
    **dict.fromkeys(VARLEN_ATTENTION, _ALONE(read_attention, run_attention)),
    **dict.fromkeys(VARLEN_PAIR_ATTENTION, _ALONE(read_attention_of_pair, run_attention_of_pair)),
}
