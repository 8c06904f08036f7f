"""Norms of q and k with their rotary positions: registration, gradient, checks, public function."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastvit.ops.layer_norm.op import LayerNormFunction, Norm, checked_norm
from fastvit.ops.qk_norm import aten
from fastvit.ops.rotary.op import Rotary, tables
from fastvit.ops.runtime import decompositions
from fastvit.ops.runtime.autograd import (
    FusedFunction,
    autocast_dtype,
    differentiable_once,
    needs_autograd,
    repeats_as_views,
    run,
)
from fastvit.ops.runtime.checks import check_float, check_head_dim, check_like
from fastvit.ops.runtime.dispatch import choose_backend
from fastvit.ops.runtime.registry import register


def _bwd_fake(
    dq_out: Tensor, dk_out: Tensor, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, sin: Tensor | None,
    cos: Tensor | None, eps: float, rms: bool, has_bias: bool, interleaved: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    of_weights = [t.new_empty(t.shape) for t in (q_weight, k_weight)]
    of_biases = [t.new_empty(t.shape if has_bias else 0) for t in (q_weight, k_weight)]
    return q.new_empty(q.shape), k.new_empty(k.shape), *of_weights, *of_biases


# q, k [B, N, H, d]; tables [B or 1, H or 1, T, d], or None, for all but the first N - T tokens. Backward takes further
# arguments, after the schema's, to write dq and dk over the outputs' gradients (see `rotary.in_place`).
qk_norm_fwd = register(
    "qk_norm_fwd(Tensor q, Tensor k, Tensor q_weight, Tensor? q_bias, Tensor k_weight, Tensor? k_bias, Tensor? sin,"
    " Tensor? cos, float eps, bool rms, bool interleaved) -> (Tensor q_out, Tensor k_out)",
    aten=aten.qk_norm_fwd,
    launch="qk_norm.launch",
    fake=lambda q, k, *_: (q.new_empty(q.shape), k.new_empty(k.shape)),
    decomposition=decompositions.qk_norm_fwd,
)
qk_norm_bwd = register(
    "qk_norm_bwd(Tensor dq_out, Tensor dk_out, Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, Tensor? sin,"
    " Tensor? cos, float eps, bool rms, bool has_bias, bool interleaved)"
    " -> (Tensor dq, Tensor dk, Tensor dq_weight, Tensor dk_weight, Tensor dq_bias, Tensor dk_bias)",
    aten=aten.qk_norm_bwd,
    launch="qk_norm.launch",
    fake=_bwd_fake,
)


class _QkNorm(FusedFunction):
    @staticmethod
    def forward(*inputs: Any) -> Any:
        return qk_norm_fwd(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        q, k, q_weight, q_bias, k_weight, _, sin, cos, eps, rms, interleaved = inputs
        ctx.save_for_backward(q, k, q_weight, k_weight, sin, cos)
        ctx.options = eps, rms, q_bias is not None, interleaved

    @staticmethod
    def backward(ctx: Any, dq_out: Tensor, dk_out: Tensor) -> tuple[Any, ...]:
        arguments = dq_out, dk_out, *ctx.saved_tensors, *ctx.options
        dq, dk, dq_weight, dk_weight, *biases = differentiable_once("qk_norm", qk_norm_bwd, *arguments)
        dq_bias, dk_bias = biases if ctx.options[2] else (None, None)
        return dq, dk, dq_weight, dq_bias, dk_weight, dk_bias, *(None,) * 5


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
    check_float("q", q)
    if q.dim() != 4:
        raise ValueError(f"q must have shape (B, N, H, d), got {tuple(q.shape)}")
    check_like("q", q, ("k", k, tuple(q.shape), "q's shape"))
    check_head_dim("head_dim", q.shape[3])
    names, dtype = ("q_norm", "k_norm"), autocast_dtype(q) is None
    norms = checked_norms(names, q, (q_norm, k_norm), q.shape[3], dtype=dtype, x_name="q")
    (q_weight, q_bias, eps, kind), (k_weight, k_bias, *_) = norms
    sin = cos = None
    interleaved = False
    if rotary is not None:
        (sin, cos), interleaved = tables(rotary, "q", q, tuple(q.shape), "rotary"), rotary.interleaved
    tensors = q, k, q_weight, q_bias, k_weight, k_bias
    autograd = needs_autograd("qk_norm", *tensors)
    if rotary is None and choose_backend(*tensors) == "aten":  # PyTorch's own norm, and its statistics are kept
        norm = eps, None, kind == "rms"
        q = run(LayerNormFunction, autograd, "qk_norm", q, q_weight, q_bias, *norm)
        return q, run(LayerNormFunction, autograd, "qk_norm", k, k_weight, k_bias, *norm)
    options = sin, cos, eps, kind == "rms", interleaved
    if autograd:
        return _QkNorm.apply(*repeats_as_views(*tensors), *options)
    return qk_norm_fwd(*tensors, *options)
