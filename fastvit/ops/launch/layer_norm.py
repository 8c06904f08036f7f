"""Launches the kernels of the ops of LayerNorm and RMSNorm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastvit.kernels import _configs, _tuned
from fastvit.kernels.layer_norm import layer_norm_bwd_kernel, layer_norm_fwd_kernel
from fastvit.ops import _library
from fastvit.ops._checks import by_rows, contiguous, empty_like
from fastvit.ops._epilogue import rows_per_sample
from fastvit.ops._launch import Constants, cdiv, launch
from fastvit.ops._library import Unsupported
from fastvit.ops.launch.column_sum import column_sums


def layer_norm_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out_dtype: torch.dtype | None, rms: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    _check(x)
    y = empty_like(x, out_dtype)
    mean, rstd = _statistics(x, rms)
    if size := x.numel():
        x, stride = by_rows(x)
        D = x.shape[-1]
        programs, constants = _programs(size // D, D, x, None, backward=False)
        weight, bias = contiguous(weight, bias)
        tensors = x, None, weight, bias, None, None, None, y, None if rms else mean, rstd
        launch(layer_norm_fwd_kernel, programs, tensors, (size // D, D, 1, stride, 0, eps), constants)
    return y, mean, rstd


def add_layer_norm_fwd(
    residual: Tensor, branch: Tensor, weight: Tensor, bias: Tensor | None, layer_scale: Tensor | None,
    row_scale: Tensor | None, eps: float, rms: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    s = empty_like(residual, torch.promote_types(residual.dtype, branch.dtype))
    _check(s)
    y = torch.empty_like(s)
    mean, rstd = _statistics(s, rms)
    if size := s.numel():
        (residual, residual_stride), (branch, branch_stride) = by_rows(residual), by_rows(branch)
        D = s.shape[-1]
        programs, constants = _programs(size // D, D, s, row_scale, backward=False)
        weight, bias, layer_scale, row_scale = contiguous(weight, bias, layer_scale, row_scale)
        launch(
            layer_norm_fwd_kernel, programs,
            (residual, branch, weight, bias, layer_scale, row_scale, s, y, None if rms else mean, rstd),
            (size // D, D, rows_per_sample(s, row_scale), residual_stride, branch_stride, eps), constants,
        )  # fmt: skip
    return s, y, mean, rstd


def layer_norm_bwd(
    dy: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, dresidual: Tensor | None
) -> tuple[Tensor, ...]:
    return _backward(dy, dresidual, x, mean, rstd, weight)


def layer_norm_bwd_recompute(
    dy: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, bias: Tensor | None,
    dresidual: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    y = empty_like(dy)
    return *_backward(dy, dresidual, x, mean, rstd, weight, bias=bias, y=y), y


def add_layer_norm_bwd(
    dy: Tensor, dsum: Tensor | None, s: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, branch: Tensor,
    layer_scale: Tensor | None, row_scale: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    dbranch = empty_like(branch)
    ds, dweight, dbias, *dlayer_scale = _backward(
        dy, dsum, s, mean, rstd, weight, branch=branch, dbranch=dbranch, layer_scale=layer_scale, row_scale=row_scale
    )
    return ds, dbranch, dweight, dbias, *(dlayer_scale or [weight.new_empty(0)])


def _check(x: Tensor) -> None:
    if x.dtype is torch.float64:
        raise Unsupported("float64")
    if x.shape[-1] > _configs.MAX_ROW:
        raise Unsupported(f"rows of more than {_configs.MAX_ROW} elements")


def _statistics(x: Tensor, rms: bool) -> tuple[Tensor, Tensor]:
    """Room for mean and rstd (..., 1) of x (..., D); RMSNorm's mean is (0,)."""
    rstd = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    return rstd.new_empty(0) if rms else torch.empty_like(rstd), rstd


def _programs(M: int, D: int, x: Tensor, row_scale: Tensor | None, *, backward: bool) -> tuple[int, Constants]:
    """How many programs of a kernel take M rows, and its constants. x: on its device."""
    per_sm, constants = _plan(D, backward, _library.arch(x), row_scale is not None)
    return min(cdiv(M, constants["BLOCK_M"]), per_sm * _library.multiprocessors(x.device.index)), constants


def _backward(
    dy: Tensor, dsum: Tensor | None, s: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, *,
    bias: Tensor | None = None, y: Tensor | None = None, branch: Tensor | None = None, dbranch: Tensor | None = None,
    layer_scale: Tensor | None = None, row_scale: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """-> ds like s; dweight [D], dbias [D], or [0] without mean, and, with layer_scale, dlayer_scale [D]. Writes y and
    dbranch."""
    _check(s)
    ds = empty_like(s)
    parameters = (weight,) if mean is None else (weight, weight)
    if layer_scale is not None:
        parameters = *parameters, layer_scale
    if (size := s.numel()) == 0:
        return ds, *_with_bias(mean, [torch.zeros_like(p) for p in parameters])
    weight, bias, layer_scale, row_scale = contiguous(weight, bias, layer_scale, row_scale)
    (dy, dy_stride), (dsum, dsum_stride) = by_rows(dy), by_rows(dsum)
    (s, s_stride), (branch, branch_stride) = by_rows(s), by_rows(branch)
    D = s.shape[-1]
    M = size // D
    programs, constants = _programs(M, D, s, row_scale, backward=True)
    partial = s.new_empty((len(parameters), programs, D), dtype=torch.float32)
    launch(
        layer_norm_bwd_kernel, programs,
        (dy, dsum, s, mean, rstd, weight, bias, branch, layer_scale, row_scale, ds, dbranch, y, partial),
        (M, D, rows_per_sample(s, row_scale), dy_stride, dsum_stride, s_stride, branch_stride), constants,
    )  # fmt: skip
    return ds, *_with_bias(mean, column_sums(partial, *parameters))


def _with_bias(mean: Tensor | None, sums: Sequence[Tensor]) -> Sequence[Tensor]:
    """dweight, dbias and what else there is, where RMSNorm's sums have no dbias."""
    return sums if mean is not None else (sums[0], sums[0].new_empty(0), *sums[1:])


@_tuned.cached
def _plan(D: int, backward: bool, arch: str, has_row_scale: bool) -> tuple[int, Constants]:
    cfg = _configs.layer_norm(D, backward=backward, arch=arch)
    return cfg.programs_per_sm, {
        "HAS_ROW_SCALE": has_row_scale, "BLOCK_M": cfg.block_rows, "BLOCK_D": cfg.block_dim,
        "STAGES": cfg.num_stages, "num_warps": cfg.num_warps,
    }  # fmt: skip
