"""Softmax attention within sequences of several lengths, of q, k and v or of a packed qkv: registration, gradients,
checks, public functions."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastvit.ops.attention import varlen_aten as aten
from fastvit.ops.attention.op import checked_scale
from fastvit.ops.dropout.op import draw_seeds
from fastvit.ops.runtime import decompositions
from fastvit.ops.runtime.autograd import Computed, FusedNode, inputs, needs_autograd
from fastvit.ops.runtime.backend import Path
from fastvit.ops.runtime.checks import check_float, check_like
from fastvit.ops.runtime.dtypes import autocast_dtype, stat_dtype
from fastvit.ops.runtime.registry import register
from fastvit.ops.runtime.run import Prepared, run


def _fwd_fake(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[0] * q.shape[1], dtype=stat_dtype(q))


def _fwd_flops(
    q: Any, k: Any, v: Any, cu: Any, cu_k: Any, seed: Any, longest: int, keys: int, *_: Any, **__: Any
) -> int:
    """Count as if all sequences of keys were as long as the longest."""
    T, H, d = q
    return 4 * T * H * keys * d


def _bwd_flops(
    do: Any, q: Any, k: Any, v: Any, cu: Any, cu_k: Any, o: Any, lse: Any, seed: Any, *rest: Any, **__: Any
) -> int:
    return _fwd_flops(q, k, v, cu, cu_k, seed, *rest) * 5 // 2


def _packed_fwd_flops(qkv: Any, cu: Any, seed: Any, longest: int, *_: Any, **__: Any) -> int:
    T, _, H, d = qkv
    return _fwd_flops((T, H, d), None, None, cu, None, seed, longest, longest)


def _packed_bwd_flops(do: Any, qkv: Any, cu: Any, o: Any, lse: Any, seed: Any, *rest: Any, **__: Any) -> int:
    return _packed_fwd_flops(qkv, cu, seed, *rest) * 5 // 2


# q (T, H, d), k and v with as many heads or fewer. cu_seqlens_k: None if k and v have q's sequences. `lse` is (T * H,),
# sequence by sequence (H, N), else as attention's.
attention_varlen_fwd = register(
    "attention_varlen_fwd(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, Tensor? cu_seqlens_k, Tensor? seed,"
    " SymInt max_seqlen, SymInt max_seqlen_k, float scale, float dropout_p) -> (Tensor o, Tensor lse)",
    aten=aten.attention_varlen_fwd,
    launch="attention.launch",
    fake=_fwd_fake,
    flops=_fwd_flops,
    decomposition=decompositions.attention_varlen_fwd,
)
attention_varlen_bwd = register(
    "attention_varlen_bwd(Tensor do, Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, Tensor? cu_seqlens_k, Tensor o,"
    " Tensor lse, Tensor? seed, SymInt max_seqlen, SymInt max_seqlen_k, float scale, float dropout_p)"
    " -> (Tensor dq, Tensor dk, Tensor dv)",
    aten=aten.attention_varlen_bwd,
    launch="attention.launch",
    flops=_bwd_flops,
    fake=lambda do, *inputs: tuple([t.new_empty(t.shape) for t in inputs[:3]]),
)

# qkv (T, 3, H, d); `lse` as of attention_varlen_fwd
attention_varlen_qkvpacked_fwd = register(
    "attention_varlen_qkvpacked_fwd(Tensor qkv, Tensor cu_seqlens, Tensor? seed, SymInt max_seqlen, float scale,"
    " float dropout_p) -> (Tensor o, Tensor lse)",
    aten=aten.attention_varlen_qkvpacked_fwd,
    launch="attention.launch",
    fake=lambda qkv, *_: _fwd_fake(qkv[:, 0]),
    flops=_packed_fwd_flops,
    decomposition=decompositions.attention_varlen_qkvpacked_fwd,
)
attention_varlen_qkvpacked_bwd = register(
    "attention_varlen_qkvpacked_bwd(Tensor do, Tensor qkv, Tensor cu_seqlens, Tensor o, Tensor lse, Tensor? seed,"
    " SymInt max_seqlen, float scale, float dropout_p) -> Tensor",
    aten=aten.attention_varlen_qkvpacked_bwd,
    launch="attention.launch",
    flops=_packed_bwd_flops,
    fake=lambda do, qkv, *_: qkv.new_empty(qkv.shape),
)


class _Options(NamedTuple):
    op: str
    max_seqlen: int
    max_seqlen_k: int
    scale: float
    dropout_p: float
    cast: torch.dtype | None  # autocast's dtype


_Inputs = inputs("q", "k", "v", "cu_seqlens", "cu_seqlens_k", "seed")


class _AttentionVarlen(FusedNode):
    Inputs = _Inputs
    casts = ("q", "k", "v")
    keeps = ("lse",)
    saves = ("q", "k", "v", "cu_seqlens", "cu_seqlens_k", "seed", "result", "lse")

    @staticmethod
    def compute(t: Any) -> Computed:
        o, path, *tensors = t
        out, lse = attention_varlen_fwd(*tensors, o.max_seqlen, o.max_seqlen_k, o.scale, o.dropout_p, path=path)
        return (out,), {"lse": lse}

    @staticmethod
    def gradients(s: dict[str, Any], douts: Any, o: _Options, wants: Any, path: Path) -> dict[str, Any]:
        q, k, v, cu_seqlens, cu_seqlens_k, seed, out, lse = s.values()
        options = o.max_seqlen, o.max_seqlen_k, o.scale, o.dropout_p
        arguments = *douts, q, k, v, cu_seqlens, cu_seqlens_k, out, lse, seed, *options
        dq, dk, dv = attention_varlen_bwd(*arguments, path=path)
        return {"q": dq, "k": dk, "v": dv}


_PackedInputs = inputs("qkv", "cu_seqlens", "seed")


class _AttentionVarlenQkvPacked(FusedNode):
    Inputs = _PackedInputs
    casts = ("qkv",)
    keeps = ("lse",)
    saves = ("qkv", "cu_seqlens", "seed", "result", "lse")

    @staticmethod
    def compute(t: Any) -> Computed:
        o, path, *tensors = t
        out, lse = attention_varlen_qkvpacked_fwd(*tensors, o.max_seqlen, o.scale, o.dropout_p, path=path)
        return (out,), {"lse": lse}

    @staticmethod
    def gradients(s: dict[str, Any], douts: Any, o: _Options, wants: Any, path: Path) -> dict[str, Any]:
        qkv, cu_seqlens, seed, out, lse = s.values()
        arguments = *douts, qkv, cu_seqlens, out, lse, seed, o.max_seqlen, o.scale, o.dropout_p
        return {"qkv": attention_varlen_qkvpacked_bwd(*arguments, path=path)}


def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int | None = None,
    *, cu_seqlens_k: Tensor | None = None, max_seqlen_k: int | None = None, scale: float | None = None,
    dropout_p: float = 0.0,
) -> Tensor:  # fmt: skip
    """Compute `attention` within each of several sequences, such as images of several sizes, or windows. The sequences
    follow each other without padding (Dehghani et al. 2023, arXiv:2307.06304); tokens of different sequences do not see
    each other.

    Args:
        q: (T, H, d), the tokens of all sequences; dtypes, strides and d as in `attention`.
        k, v: as q, or with fewer heads, as in `attention`; with cu_seqlens_k, of another number of tokens (T_k, H, d).
        cu_seqlens: (B + 1,) int32 or int64, on q's device: where sequences begin and end, ascending from 0 to T. On a
            GPU the values are not checked, because that would wait for the GPU: tokens outside all sequences get NaN.
        max_seqlen: at least the length of the longest sequence; T if None. On a GPU a longer sequence gets NaN in its
            output and gradients.
        cu_seqlens_k, max_seqlen_k: the same of k and v, for cross-attention: as many sequences as q has. None if k and
            v have q's. Queries of a sequence without keys get zero.
        scale, dropout_p: as in `attention`.

    Returns:
        (T, H, d), contiguous, q's dtype; under autocast autocast's.

    Raises:
        TypeError, ValueError: naming the argument, for dtypes, devices, shapes and values that do not fit; the values
            of cu_seqlens, and whether max_seqlen is too small, are checked on ATen only.
    """
    tensors = q, k, v, cu_seqlens, cu_seqlens_k
    out: Tensor = run("attention_varlen", _prepared, tensors, (max_seqlen, max_seqlen_k, scale, dropout_p))
    return out


def _prepared(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, cu_seqlens_k: Tensor | None, max_seqlen: int | None,
    max_seqlen_k: int | None, scale: float | None, dropout_p: float,
) -> Prepared:  # fmt: skip
    check_float("q", q)
    cast = autocast_dtype(q)
    if q.dim() != 3:
        raise ValueError(f"q must have shape (T, H, d), got {tuple(q.shape)}")
    T, H, d = q.shape
    check_like("q", q, ("k", k, None, ""), ("v", v, None, ""), dtype=cast is None)
    keys, heads = k.shape[:2] if k.dim() == 3 else (0, 0)
    if cu_seqlens_k is None:
        keys = T
    if k.shape != (keys, heads, d) or heads == 0 or H % heads:
        tokens = "q's T" if cu_seqlens_k is None else "any T"
        raise ValueError(
            f"k must have shape (T, H, d) with {tokens}, q's d, and H or a divisor of it, got {tuple(k.shape)} for q's "
            f"{tuple(q.shape)}"
        )
    if v.shape != k.shape:
        raise ValueError(f"v must have k's shape {tuple(k.shape)}, got {tuple(v.shape)}")
    scale = checked_scale(d, scale, dropout_p)
    longest = longest_k = checked_lengths("q", q, cu_seqlens, max_seqlen)
    if cu_seqlens_k is not None:
        longest_k = checked_lengths("q", k, cu_seqlens_k, max_seqlen_k, "_k")
        if cu_seqlens_k.shape != cu_seqlens.shape:
            raise ValueError(
                f"cu_seqlens_k must have cu_seqlens' shape {tuple(cu_seqlens.shape)}, got {tuple(cu_seqlens_k.shape)}"
            )
    elif max_seqlen_k is not None:
        raise ValueError(f"max_seqlen_k must be None without cu_seqlens_k, got {max_seqlen_k}")
    options = _Options("attention_varlen", longest, longest_k, scale, dropout_p, cast)
    seed = draw_seeds(1, q.device) if dropout_p > 0.0 else None
    tensors = q, k, v, cu_seqlens, cu_seqlens_k, seed
    return _AttentionVarlen, needs_autograd("attention_varlen", q, k, v), options, tensors


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
    options = max_seqlen, scale, dropout_p
    out: Tensor = run("attention_varlen_qkvpacked", _prepared_packed, (qkv, cu_seqlens), options)
    return out


def _prepared_packed(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | None, scale: float | None, dropout_p: float
) -> Prepared:
    check_float("qkv", qkv)
    if qkv.dim() != 4 or qkv.shape[1] != 3:
        raise ValueError(f"qkv must have shape (T, 3, H, d), got {tuple(qkv.shape)}")
    scale = checked_scale(qkv.shape[3], scale, dropout_p)
    longest = checked_lengths("qkv", qkv, cu_seqlens, max_seqlen)
    options = _Options("attention_varlen_qkvpacked", longest, longest, scale, dropout_p, autocast_dtype(qkv))
    seed = draw_seeds(1, qkv.device) if dropout_p > 0.0 else None
    autograd = needs_autograd("attention_varlen_qkvpacked", qkv)
    return _AttentionVarlenQkvPacked, autograd, options, (qkv, cu_seqlens, seed)


def checked_lengths(name: str, x: Tensor, cu_seqlens: Any, max_seqlen: Any, which: str = "") -> int:
    """Check both for x (T, ...), on the device of the tensor of that name; return max_seqlen. which: "_k" for those of
    k."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        kind = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"cu_seqlens{which} must be a tensor of int32 or int64, got {kind}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens{which} must have shape (B + 1,) with B > 0, got {tuple(cu_seqlens.shape)}")
    if cu_seqlens.device != x.device:
        raise ValueError(f"cu_seqlens{which} must be on {name}'s device {x.device}, got {cu_seqlens.device}")
    if max_seqlen is None:
        return max(x.shape[0], 1)
    if not isinstance(max_seqlen, (int, torch.SymInt)) or isinstance(max_seqlen, bool):
        raise TypeError(f"max_seqlen{which} must be an integer or None, got {max_seqlen!r}")
    if max_seqlen < 1:
        raise ValueError(f"max_seqlen{which} must be at least 1, got {max_seqlen}")
    return max_seqlen  # type: ignore[return-value]
