"""The ops of LayerNorm and RMSNorm on PyTorch's own functions.

`native_layer_norm` returns the statistics that its backward pass reads. Computed again from `reference.ops`, both
passes would take a CPU 1.3 times as long, those of RMSNorm 1.9 times."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastvit.ops.runtime.dtypes import stat_dtype
from fastvit.ops.runtime.epilogue import by_sample, rows_per_sample
from fastvit.ops.runtime.rows import as_rows
from fastvit.reference import ops as reference

_CHUNK = 1 << 19  # products for LayerScale's gradient that exist at a time: 2 MB, which stay in the cache

_backward = torch.ops.aten.native_layer_norm_backward.default


def layer_norm_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out_dtype: torch.dtype | None, rms: bool = False
) -> tuple[Tensor, Tensor | None, Tensor]:
    if rms:
        return _rms_norm(x, weight, eps, out_dtype)
    if x.dtype is not torch.float32:
        weight, bias = weight.to(_parameter_dtype(x)), None if bias is None else bias.to(_parameter_dtype(x))
    y, mean, rstd = torch.native_layer_norm(x, weight.shape, weight, bias, eps)
    return y if out_dtype is None or out_dtype is y.dtype else y.to(out_dtype), mean, rstd


def layer_norm_bwd(
    dy: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, bias: Tensor | None,
    dresidual: Tensor | None, row_scale: Tensor | None = None, total_dtype: torch.dtype | None = None,
    want_y: bool = False,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    total = None if total_dtype is None else _total(dresidual, row_scale, total_dtype)
    y: Any = None
    if mean is None:
        x = x.contiguous()
        normalised = x * rstd
        if want_y:
            y = (normalised * weight).to(dy.dtype)
        return *_rms_norm_bwd(dy, x, normalised, rstd, weight, dresidual), y, total
    if want_y:
        x = x.contiguous()
        normalised = (x - mean).mul_(rstd)
        y = normalised.mul_(weight) if bias is None else torch.addcmul(bias, normalised, weight)
        y = y.to(dy.dtype)
    return *_layer_norm_bwd(dy, x, mean, rstd, weight, dresidual), y, total


def _total(g: Any, row_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return row_scale * g summed over all rows."""
    if row_scale is None:
        return as_rows(g).sum(0, dtype=dtype)
    samples = by_sample(g, row_scale).sum(1, dtype=stat_dtype(g))
    return torch.mv(samples.t(), row_scale.to(samples.dtype)).to(dtype)


def _layer_norm_bwd(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, dresidual: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    dtype, parameter_dtype = x.dtype, weight.dtype
    if dy.dtype != dtype:  # LayerNorm that also changed the dtype, under autocast
        x, dy = x.to(stat_dtype(x)), dy.to(stat_dtype(x))
    if weight.dtype is not _parameter_dtype(x):
        weight = weight.to(_parameter_dtype(x))
    dx, dweight, dbias = _backward(dy, x, x.shape[-1:], mean, rstd, weight, weight, (True, True, True))
    if dx.dtype is not dtype:
        dx = dx.to(dtype)
    if dresidual is not None:
        dx.add_(dresidual)
    if dweight.dtype is not parameter_dtype:
        dweight, dbias = dweight.to(parameter_dtype), dbias.to(parameter_dtype)
    return dx, dweight, dbias


def add_layer_norm_fwd(
    residual: Tensor, branch: Tensor, weight: Tensor, bias: Tensor | None, layer_scale: Tensor | None,
    row_scale: Tensor | None, eps: float, rms: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:  # fmt: skip
    total = _sum(residual, branch, layer_scale, row_scale)
    return total, *layer_norm_fwd(total, weight, bias, eps, None, rms)


def _sum(residual: Tensor, branch: Tensor, layer_scale: Tensor | None, row_scale: Tensor | None) -> Tensor:
    dtype = torch.promote_types(residual.dtype, branch.dtype)
    total = reference.add_branch(branch.to(dtype), layer_scale, row_scale, residual.contiguous())
    return total.to(dtype)


def add_layer_norm_bwd(
    dy: Tensor, dsum: Tensor | None, s: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, branch: Tensor,
    layer_scale: Tensor | None, row_scale: Tensor | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    found: Any = layer_norm_bwd(dy, s, mean, rstd, weight, None, dsum)
    ds, dweight, dbias, *_ = found
    scaled = layer_scale is not None or row_scale is not None
    dbranch = _scale_branch(ds, layer_scale, row_scale).to(branch.dtype, copy=not scaled)
    dlayer_scale = None
    if layer_scale is not None:
        dlayer_scale = _dlayer_scale(ds, branch, row_scale).to(layer_scale.dtype)
    return ds, dbranch, dweight, dbias, dlayer_scale


def _rms_norm(x: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype | None) -> tuple[Tensor, None, Tensor]:
    x = x.contiguous()
    rstd = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=stat_dtype(x))
    rstd = rstd.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    y = (x * rstd).mul_(weight)
    return y.to(out_dtype or x.dtype), None, rstd


def _rms_norm_bwd(
    dy: Tensor, x: Tensor, normalised: Tensor, rstd: Tensor, weight: Tensor, dresidual: Tensor | None
) -> tuple[Tensor, Tensor, None]:
    """Compute the gradients. normalised: x * rstd, which is overwritten."""
    dy = dy.to(rstd.dtype).contiguous()
    dweight = as_rows(dy * normalised).sum(0)
    dx = dy * weight
    normalised.mul_((dx * normalised).mean(-1, keepdim=True))
    dx = dx.sub_(normalised).mul_(rstd).to(x.dtype)
    if dresidual is not None:
        dx.add_(dresidual)
    return dx, dweight.to(weight.dtype), None


def _parameter_dtype(x: Tensor) -> torch.dtype:
    """Return the parameters' dtype for which native_layer_norm keeps float32 statistics: on the CPU they get the
    weight's."""
    dtype = x.dtype
    return dtype if dtype is torch.float32 or x.is_cuda else stat_dtype(x)


def _scale(layer_scale: Tensor | None, row_scale: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return the factor of a branch: (D,), or with a row_scale shaped as in `by_sample`; None if both are None."""
    if row_scale is None:
        return layer_scale
    row_scale = row_scale.to(torch.promote_types(row_scale.dtype, dtype))  # both scales may be narrower
    return row_scale[:, None, None] if layer_scale is None else row_scale[:, None, None] * layer_scale


def _scale_branch(branch: Tensor, layer_scale: Tensor | None, row_scale: Tensor | None) -> Tensor:
    """Return row_scale * layer_scale * branch in the promoted dtype; branch itself without them."""
    scale = _scale(layer_scale, row_scale, branch.dtype)
    if scale is None or row_scale is None:
        return branch if scale is None else scale * branch
    return (scale * by_sample(branch, row_scale)).view(branch.shape)


def _dlayer_scale(ds: Tensor, branch: Tensor, row_scale: Tensor | None) -> Tensor:
    """Return row_scale * ds * branch summed over rows, in the dtype of statistics. Sum a chunk of rows at a time: all
    products together would be as large as ds, or twice as large if ds has 16 bits."""
    dtype, rows = stat_dtype(ds), max(_CHUNK // ds.shape[-1], 1)
    chunks = zip(as_rows(ds).split(rows), as_rows(branch).split(rows), strict=True)
    products = (d * b if d.dtype is dtype else d.to(dtype).mul_(b) for d, b in chunks)
    if row_scale is None:
        sums = [p.sum(0) for p in products]
    else:
        factors = row_scale.to(dtype).repeat_interleave(rows_per_sample(ds, row_scale)).split(rows)
        sums = [torch.mv(p.t(), f) for p, f in zip(products, factors, strict=True)]
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)


# ---- for exporters: nothing is computed in place ----


def plain_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out_dtype: torch.dtype | None, rms: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    out_dtype, wide = out_dtype or x.dtype, x.to(stat_dtype(x))
    if weight.dtype is not x.dtype:
        x, weight, bias = wide, weight.to(wide.dtype), None if bias is None else bias.to(wide.dtype)
    y = reference.layer_norm(x, weight, bias, eps, "rms" if rms else "layer").to(out_dtype)
    if rms:
        return y, x.new_empty(0), (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return y, wide.mean(-1, keepdim=True), (wide.var(-1, correction=0, keepdim=True) + eps).rsqrt()


def plain_add_norm(
    residual: Tensor, branch: Tensor, weight: Tensor, bias: Tensor | None, layer_scale: Tensor | None,
    row_scale: Tensor | None, eps: float, rms: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    total = _sum(residual, branch, layer_scale, row_scale)
    return total, *plain_norm(total, weight, bias, eps, None, rms)
