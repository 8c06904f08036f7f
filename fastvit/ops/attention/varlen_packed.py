"""Softmax attention within sequences of several lengths, of a packed qkv: registration, gradient, public function."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastvit.ops.attention import varlen_aten as aten
from fastvit.ops.attention.op import checked_scale
from fastvit.ops.attention.varlen import checked_lengths
from fastvit.ops.dropout.op import draw_seeds
from fastvit.ops.runtime import decompositions
from fastvit.ops.runtime.autograd import Computed, FusedNode, inputs, needs_autograd, run
from fastvit.ops.runtime.call import Call, begin
from fastvit.ops.runtime.checks import check_float
from fastvit.ops.runtime.dtypes import autocast_dtype, stat_dtype
from fastvit.ops.runtime.registry import register


def _fwd_fake(qkv: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    q = qkv[:, 0]
    return q.new_empty(q.shape), q.new_empty(q.shape[0] * q.shape[1], dtype=stat_dtype(q))


def _fwd_flops(qkv: Any, cu_seqlens: Any, seed: Any, max_seqlen: int, *_: Any, **__: Any) -> int:
    """Count as if all sequences were as long as the longest."""
    T, _, H, d = qkv
    return int(4 * T * H * max_seqlen * d)


def _bwd_flops(do: Any, qkv: Any, cu: Any, o: Any, lse: Any, seed: Any, *rest: Any, **__: Any) -> int:
    return _fwd_flops(qkv, cu, seed, *rest) * 5 // 2


# qkv (T, 3, H, d); `lse` as of attention_varlen_fwd
attention_varlen_qkvpacked_fwd = register(
    "attention_varlen_qkvpacked_fwd(Tensor qkv, Tensor cu_seqlens, Tensor? seed, SymInt max_seqlen, float scale,"
    " float dropout_p) -> (Tensor o, Tensor lse)",
    aten=aten.attention_varlen_qkvpacked_fwd,
    launch="attention.launch",
    fake=_fwd_fake,
    flops=_fwd_flops,
    decomposition=decompositions.attention_varlen_qkvpacked_fwd,
)
attention_varlen_qkvpacked_bwd = register(
    "attention_varlen_qkvpacked_bwd(Tensor do, Tensor qkv, Tensor cu_seqlens, Tensor o, Tensor lse, Tensor? seed,"
    " SymInt max_seqlen, float scale, float dropout_p) -> Tensor",
    aten=aten.attention_varlen_qkvpacked_bwd,
    launch="attention.launch",
    flops=_bwd_flops,
    fake=lambda do, qkv, *_: qkv.new_empty(qkv.shape),
)


class _Options(NamedTuple):
    op: str
    max_seqlen: int
    scale: float
    dropout_p: float
    cast: torch.dtype | None  # autocast's dtype


_Inputs = inputs("qkv", "cu_seqlens", "seed")


class _AttentionVarlenQkvPacked(FusedNode):
    Inputs = _Inputs
    casts = ("qkv",)
    keeps = ("lse",)
    saves = ("qkv", "cu_seqlens", "seed", "result", "lse")

    @staticmethod
    def compute(t: Any) -> Computed:
        *tensors, o, call = t
        out, lse = attention_varlen_qkvpacked_fwd(*tensors, o.max_seqlen, o.scale, o.dropout_p, call=call)
        return (out,), {"lse": lse}

    @staticmethod
    def gradients(s: dict[str, Any], douts: Any, o: _Options, wants: Any, call: Call) -> dict[str, Any]:
        qkv, cu_seqlens, seed, out, lse = s.values()
        arguments = *douts, qkv, cu_seqlens, out, lse, seed, o.max_seqlen, o.scale, o.dropout_p
        return {"qkv": attention_varlen_qkvpacked_bwd(*arguments, call=call)}


def attention_varlen_qkvpacked(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | None = None, *, scale: float | None = None,
    dropout_p: float = 0.0,
) -> Tensor:  # fmt: skip
    """Compute `attention_varlen` of q, k, v = qkv.unbind(1), read in place. The gradient is one packed tensor.

    Args:
        qkv: (T, 3, H, d), as a qkv projection of the tokens of all sequences leaves it; dtypes, strides and d as in
            `attention`.
        cu_seqlens, max_seqlen, scale, dropout_p: as in `attention_varlen`.

    Returns:
        (T, H, d), contiguous, as from `attention_varlen`.

    Raises:
        TypeError, ValueError: as `attention_varlen`.
    """
    tensors = qkv, cu_seqlens
    call = begin("attention_varlen_qkvpacked", tensors, (max_seqlen, type(max_seqlen), scale, dropout_p))
    autograd, options = call.once("checked", _checked, *tensors, max_seqlen, scale, dropout_p)
    seed = draw_seeds(1, qkv.device) if dropout_p > 0.0 else None
    out: Tensor = run(_AttentionVarlenQkvPacked, autograd, _Inputs(*tensors, seed, options, call))
    return out


def _checked(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | None, scale: float | None, dropout_p: float
) -> tuple[bool, _Options]:
    """Check a call; return whether it needs autograd."""
    check_float("qkv", qkv)
    if qkv.dim() != 4 or qkv.shape[1] != 3:
        raise ValueError(f"qkv must have shape (T, 3, H, d), got {tuple(qkv.shape)}")
    scale = checked_scale(qkv.shape[3], scale, dropout_p)
    longest = checked_lengths("qkv", qkv, cu_seqlens, max_seqlen)
    options = _Options("attention_varlen_qkvpacked", longest, scale, dropout_p, autocast_dtype(qkv))
    return needs_autograd("attention_varlen_qkvpacked", qkv), options
