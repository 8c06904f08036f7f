"""Norms of q and k with their rotary positions: registration, gradient, checks, public function."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastvit.ops.layer_norm.op import Norm, checked_norm, layer_norm_bwd, layer_norm_fwd
from fastvit.ops.qk_norm import aten
from fastvit.ops.rotary.op import Rotary, broadcast_tables, check_tables
from fastvit.ops.runtime.autograd import Computed, FusedNode, inputs, needs_autograd
from fastvit.ops.runtime.backend import Route
from fastvit.ops.runtime.checks import check_dimensions, check_head_dim, check_like
from fastvit.ops.runtime.dtypes import autocast_dtype
from fastvit.ops.runtime.registry import register
from fastvit.ops.runtime.run import Prepared, run


def _bwd_fake(
    dq_out: Tensor, dk_out: Tensor, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, sin: Tensor | None,
    cos: Tensor | None, eps: float, rms: bool, has_bias: bool, interleaved: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    biases = (q_weight, k_weight) if has_bias else (None, None)
    return q, k, q_weight, k_weight, *biases


# q, k [B, N, H, d]; tables [B or 1, H or 1, T, d], or None, for all but the first N - T tokens. out= of
# the backward op: two tensors to write dq and dk to, which may be the outputs' gradients.
qk_norm_fwd = register(
    "qk_norm_fwd(Tensor q, Tensor k, Tensor q_weight, Tensor? q_bias, Tensor k_weight, Tensor? k_bias, Tensor? sin,"
    " Tensor? cos, float eps, bool rms, bool interleaved) -> (Tensor q_out, Tensor k_out)",
    aten=aten.qk_norm_fwd,
    fake=lambda q, k, *_: (q, k),
    plain=aten.plain,
)
qk_norm_bwd = register(
    "qk_norm_bwd(Tensor dq_out, Tensor dk_out, Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, Tensor? sin,"
    " Tensor? cos, float eps, bool rms, bool has_bias, bool interleaved)"
    " -> (Tensor dq, Tensor dk, Tensor dq_weight, Tensor dk_weight, Tensor dq_bias, Tensor dk_bias)",
    aten=aten.qk_norm_bwd,
    fake=_bwd_fake,
)


class _Options(NamedTuple):
    op: str
    eps: float
    rms: bool
    has_bias: bool
    interleaved: bool


_STATISTICS = "q_mean", "q_rstd", "k_mean", "k_rstd"


class _QkNorm(FusedNode):
    Inputs = inputs("q", "k", "q_weight", "q_bias", "k_weight", "k_bias", "sin", "cos")
    saved = ("q", "k", "q_weight", "k_weight", "sin", "cos", *_STATISTICS)
    single = False

    @classmethod
    def intermediates_of(cls, t: Any) -> tuple[str, ...]:
        return _STATISTICS if t.route is Route.ATEN and t.sin is None else ()

    @classmethod
    def compute(cls, t: Any) -> Computed:
        o, route, *tensors = t
        if not cls.intermediates_of(t):
            return qk_norm_fwd(*tensors, o.eps, o.rms, o.interleaved, route=route), {}
        # PyTorch's own norms keep what their backward pass reads
        q, *of_q = layer_norm_fwd(t.q, t.q_weight, t.q_bias, o.eps, None, o.rms, route=route)
        k, *of_k = layer_norm_fwd(t.k, t.k_weight, t.k_bias, o.eps, None, o.rms, route=route)
        return (q, k), dict(zip(_STATISTICS, (*of_q, *of_k), strict=True))

    @staticmethod
    def needed(t: Any, intermediates: dict[str, Any], needs_grad: Any) -> dict[str, bool]:
        return {"q_mean": not t.options.rms, "k_mean": not t.options.rms}

    @staticmethod
    def gradients(s: dict[str, Any], douts: Any, o: _Options, needs_grad: Any, route: Route) -> dict[str, Any]:
        douts = [torch.zeros_like(x) if dout is None else dout for dout, x in zip(douts, (s["q"], s["k"]), strict=True)]
        q, k, q_weight, k_weight, sin, cos, q_mean, q_rstd, k_mean, k_rstd = s.values()
        if q_rstd is None:
            options = o.eps, o.rms, o.has_bias, o.interleaved
            gradients = qk_norm_bwd(*douts, q, k, q_weight, k_weight, sin, cos, *options, route=route)
            dq, dk, dq_weight, dk_weight, dq_bias, dk_bias = gradients
        else:
            dq, dq_weight, dq_bias, *_ = layer_norm_bwd(douts[0], q, q_mean, q_rstd, q_weight, None, None, route=route)
            dk, dk_weight, dk_bias, *_ = layer_norm_bwd(douts[1], k, k_mean, k_rstd, k_weight, None, None, route=route)
        by_name = {"q": dq, "k": dk, "q_weight": dq_weight, "k_weight": dk_weight}
        return by_name | {"q_bias": dq_bias, "k_bias": dk_bias} if o.has_bias else by_name


def checked_norms(
    names: tuple[str, str], x: Tensor, norms: tuple[Any, Any], head_dim: int, *, dtype: bool, x_name: str = "x"
) -> tuple[Norm, Norm]:
    """Check the norms of q and k, in arguments of these names, as `checked_norm` does; return them."""
    q_norm = checked_norm(names[0], x, norms[0], "head_dim", head_dim, dtype=dtype, x_name=x_name)
    k_norm = checked_norm(names[1], x, norms[1], "head_dim", head_dim, dtype=dtype, x_name=x_name)
    of_q, of_k = (q_norm.kind, q_norm.eps, q_norm.bias is None), (k_norm.kind, k_norm.eps, k_norm.bias is None)
    if of_q != of_k:
        words = [f"kind {kind!r}, eps {eps}, {'no' if without else 'a'} bias" for kind, eps, without in (of_q, of_k)]
        raise ValueError(f"{names[1]} must be like {names[0]}: {words[0]}, got {words[1]}")
    return q_norm, k_norm


def qk_norm(q: Tensor, k: Tensor, q_norm: Norm, k_norm: Norm, rotary: Rotary | None = None) -> tuple[Tensor, Tensor]:
    """Compute norms of q and k over the head dimension, which bound attention's scores (Henry et al. 2020,
    arXiv:2010.04245; Dehghani et al. 2023, arXiv:2302.05442), and then rotary positions. Statistics and arithmetic are
    float32, and the result is rounded once.

    Args:
        q, k: (B, N, H, d) each, one dtype: float32, float16, bfloat16 or float64; any strides. Read in place if both
            have the same strides and the last dimension is contiguous, as in a packed qkv. d is a multiple of 8 from 16
            to 256.
        q_norm, k_norm: both have one kind and eps, and both a bias or none; (d,), q's dtype, or any under autocast.
        rotary: rotary positions, as in `rotary`, or None. Prefix tokens are normalised too. The tables are not
            differentiated: for learnt ones call `rotary` after this op.

    Returns:
        q and k, (B, N, H, d), contiguous, q's dtype, for `attention`.

    Raises:
        TypeError, ValueError: naming the argument, for dtypes, devices, shapes and values that do not fit.
    """
    found: tuple[Tensor, Tensor] = run("qk_norm", _prepared, (q, k, q_norm, k_norm, rotary))
    return found


def _prepared(q: Tensor, k: Tensor, q_norm: Norm, k_norm: Norm, rotary: Rotary | None) -> Prepared:
    check_dimensions("q", q, "B, N, H, d")
    check_like("q", q, ("k", k, tuple(q.shape), "q's shape"))
    check_head_dim("head_dim", q.shape[3])
    dtype = autocast_dtype(q) is None
    q_norm, k_norm = checked_norms(("q_norm", "k_norm"), q, (q_norm, k_norm), q.shape[3], dtype=dtype, x_name="q")
    if rotary is not None:
        check_tables(rotary, "q", q, tuple(q.shape), "rotary")
    sin, cos = (None, None) if rotary is None else broadcast_tables(rotary)
    _, bias, eps, kind = q_norm
    interleaved = rotary is not None and rotary.interleaved
    options = _Options("qk_norm", eps, kind == "rms", bias is not None, interleaved)
    norms = *q_norm[:2], *k_norm[:2]
    return _QkNorm, needs_autograd("qk_norm", q, k, *norms), options, (q, k, *norms, sin, cos)
