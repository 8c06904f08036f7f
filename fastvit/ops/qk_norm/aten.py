"""Norms of q and k, and their rotary positions, on PyTorch's own functions. The rotation is written over the norm's
result; with new tensors, as exporters need them, both passes take a CPU 1.4 times as long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fastvit.ops.layer_norm.aten import layer_norm_bwd, layer_norm_fwd
from fastvit.ops.rotary import aten as rotary
from fastvit.ops.runtime.dtypes import stat_dtype
from fastvit.reference.ops import layer_norm


def qk_norm_fwd(
    q: Tensor, k: Tensor, q_weight: Tensor, q_bias: Tensor | None, k_weight: Tensor, k_bias: Tensor | None,
    sin: Tensor | None, cos: Tensor | None, eps: float, rms: bool, interleaved: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    options = sin, cos, eps, rms, interleaved
    return _forward(q, q_weight, q_bias, *options), _forward(k, k_weight, k_bias, *options)


def qk_norm_bwd(
    dq_out: Tensor, dk_out: Tensor, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor,
    sin: Tensor | None, cos: Tensor | None, eps: float, rms: bool, has_bias: bool, interleaved: bool,
    *, out: Sequence[Tensor] | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Compute the gradients. out: tensors to write dq and dk to, which may be dq_out and dk_out."""
    to_q, to_k = out or (None, None)
    options = sin, cos, eps, rms, interleaved
    dq, dq_weight, dq_bias = _backward(dq_out, q, q_weight, *options, to_q)
    dk, dk_weight, dk_bias = _backward(dk_out, k, k_weight, *options, to_k)
    return dq, dk, dq_weight, dk_weight, *((dq_bias, dk_bias) if has_bias else (None, None))


def plain(
    q: Tensor, k: Tensor, q_weight: Tensor, q_bias: Tensor | None, k_weight: Tensor, k_bias: Tensor | None,
    sin: Tensor | None, cos: Tensor | None, eps: float, rms: bool, interleaved: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The forward op, with nothing changed in place."""
    normed = []
    for x, weight, bias in ((q, q_weight, q_bias), (k, k_weight, k_bias)):
        wide = stat_dtype(x)
        bias = None if bias is None else bias.to(wide)
        y = layer_norm(x.to(wide), weight.to(wide), bias, eps, "rms" if rms else "layer")
        if sin is not None and cos is not None:
            y = rotary.plain(y, sin, cos, x.shape[2], interleaved, False)
        normed.append(y.to(x.dtype).contiguous())
    return normed[0], normed[1]


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, sin: Tensor | None, cos: Tensor | None, eps: float, rms: bool,
    interleaved: bool,
) -> Tensor:  # fmt: skip
    if sin is None or cos is None:
        return layer_norm_fwd(x, weight, bias, eps, None, rms)[0]
    wide = stat_dtype(x)  # for both steps, so that the result is rounded once
    bias = None if bias is None else bias.to(wide)
    y, *_ = layer_norm_fwd(x.to(wide), weight.to(wide), bias, eps, None, rms)
    return rotary.rotary(y, sin, cos, x.shape[2], interleaved, False, y).to(x.dtype)


def _backward(
    dout: Tensor, x: Tensor, weight: Tensor, sin: Tensor | None, cos: Tensor | None, eps: float, rms: bool,
    interleaved: bool, out: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    dtype, g, wide = x.dtype, dout, stat_dtype(x)
    if sin is not None and cos is not None:
        x, g = x.to(wide), rotary.rotary(dout.to(wide), sin, cos, x.shape[2], interleaved, True)
    x, w = x.contiguous(), weight.to(wide)
    mean, rstd = layer_norm_fwd(x, w, None, eps, None, rms)[1:]
    found: Any = layer_norm_bwd(g, x, mean, rstd, w, None, None)
    dx, dweight, dbias, *_ = found
    dbias = None if dbias is None else dbias.to(weight.dtype)
    return dx.to(dtype) if out is None else out.copy_(dx), dweight.to(weight.dtype), dbias
