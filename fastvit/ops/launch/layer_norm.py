"""Launches the kernels of the LayerNorm ops."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from fastvit.kernels import _configs
from fastvit.kernels.layer_norm import layer_norm_bwd_kernel, layer_norm_fwd_kernel
from fastvit.ops import _library
from fastvit.ops._checks import as_rows, contiguous
from fastvit.ops._epilogue import rows_per_sample
from fastvit.ops._library import Unsupported
from fastvit.ops.launch.column_sum import column_sums


def layer_norm_fwd(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, out_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    _check(x)
    y = torch.empty(x.shape, dtype=out_dtype or x.dtype, device=x.device)
    mean, rstd = _statistics(x)
    if x.numel():
        x = as_rows(x)
        grid, constants = _forward(x, None)
        weight, bias = contiguous(weight, bias)
        layer_norm_fwd_kernel[grid](
            x, None, weight, bias, None, None, None, y, mean, rstd, *x.shape, 1, x.stride(0), 0, eps, **constants
        )
    return y, mean, rstd


def add_layer_norm_fwd(
    residual: Tensor, branch: Tensor, weight: Tensor, bias: Tensor, layer_scale: Tensor | None,
    row_scale: Tensor | None, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    s = residual.new_empty(residual.shape, dtype=torch.promote_types(residual.dtype, branch.dtype))
    _check(s)
    y = torch.empty_like(s)
    mean, rstd = _statistics(s)
    if s.numel():
        residual, branch = as_rows(residual), as_rows(branch)
        grid, constants = _forward(residual, row_scale)
        weight, bias, layer_scale, row_scale = contiguous(weight, bias, layer_scale, row_scale)
        layer_norm_fwd_kernel[grid](
            residual, branch, weight, bias, layer_scale, row_scale, s, y, mean, rstd,
            *residual.shape, rows_per_sample(residual, row_scale), residual.stride(0), branch.stride(0), eps,
            **constants,
        )  # fmt: skip
    return s, y, mean, rstd


def layer_norm_bwd(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, dresidual: Tensor | None
) -> tuple[Tensor, ...]:
    return _backward(dy, dresidual, x, mean, rstd, weight)


def layer_norm_bwd_recompute(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor, dresidual: Tensor | None
) -> tuple[Tensor, ...]:
    y = torch.empty(dy.shape, dtype=dy.dtype, device=dy.device)
    return *_backward(dy, dresidual, x, mean, rstd, weight, bias=bias, y=y), y


def add_layer_norm_bwd(
    dy: Tensor, dsum: Tensor | None, s: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, branch: Tensor,
    layer_scale: Tensor | None, row_scale: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    dbranch = torch.empty(branch.shape, dtype=branch.dtype, device=branch.device)
    ds, dweight, dbias, *dlayer_scale = _backward(
        dy, dsum, s, mean, rstd, weight, branch=branch, dbranch=dbranch, layer_scale=layer_scale, row_scale=row_scale
    )
    return ds, dbranch, dweight, dbias, *(dlayer_scale or [weight.new_empty(0)])


def _check(x: Tensor) -> None:
    if x.dtype is torch.float64:
        raise Unsupported("float64")
    if x.shape[-1] > _configs.MAX_ROW:
        raise Unsupported(f"rows of more than {_configs.MAX_ROW} elements")


def _statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Room for mean and rstd (..., 1) of x (..., D)."""
    shape = (*x.shape[:-1], 1)
    mean = torch.empty(shape, dtype=torch.float32, device=x.device)
    return mean, torch.empty_like(mean)


def _forward(rows: Tensor, row_scale: Tensor | None) -> tuple[tuple[int], dict[str, Any]]:
    """The grid and the constants of the forward kernel."""
    M, D = rows.shape
    cfg = _configs.layer_norm(D, arch=_library.arch(rows))
    most = cfg.programs_per_sm * _library.multiprocessors(rows.device.index)
    return (min(triton.cdiv(M, cfg.block_rows), most),), _constants(cfg, row_scale)


def _backward(
    dy: Tensor, dsum: Tensor | None, s: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, *,
    bias: Tensor | None = None, y: Tensor | None = None, branch: Tensor | None = None, dbranch: Tensor | None = None,
    layer_scale: Tensor | None = None, row_scale: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """-> ds like s; dweight, dbias [D] and, with layer_scale, dlayer_scale [D]. Writes y and dbranch."""
    _check(s)
    ds = torch.empty(s.shape, dtype=s.dtype, device=s.device)
    parameters = (weight, weight) if layer_scale is None else (weight, weight, layer_scale)
    if s.numel() == 0:
        return ds, *(torch.zeros_like(p) for p in parameters)
    weight, bias, layer_scale, row_scale = contiguous(weight, bias, layer_scale, row_scale)
    dy, s = as_rows(dy), as_rows(s)
    dsum, branch = None if dsum is None else as_rows(dsum), None if branch is None else as_rows(branch)
    M, D = s.shape
    cfg = _configs.layer_norm(D, backward=True, arch=_library.arch(s))
    programs = min(triton.cdiv(M, cfg.block_rows), cfg.programs_per_sm * _library.multiprocessors(s.device.index))
    partial = torch.empty(len(parameters), programs, D, dtype=torch.float32, device=s.device)
    layer_norm_bwd_kernel[(programs,)](
        dy, dsum, s, mean, rstd, weight, bias, branch, layer_scale, row_scale, ds, dbranch, y, partial,
        M, D, rows_per_sample(s, row_scale), dy.stride(0), 0 if dsum is None else dsum.stride(0), s.stride(0),
        0 if branch is None else branch.stride(0), **_constants(cfg, row_scale),
    )  # fmt: skip
    return ds, *column_sums(partial, *parameters)


def _constants(cfg: _configs.LayerNormConfig, row_scale: Tensor | None) -> dict[str, Any]:
    return {
        "HAS_ROW_SCALE": row_scale is not None, "BLOCK_M": cfg.block_rows, "BLOCK_D": cfg.block_dim,
        "STAGES": cfg.num_stages, "num_warps": cfg.num_warps,
    }  # fmt: skip
