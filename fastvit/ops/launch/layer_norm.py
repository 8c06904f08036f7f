"""Launches the kernels of the ops of LayerNorm and RMSNorm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastvit.kernels import _configs, _tuned
from fastvit.kernels.layer_norm import layer_norm_bwd_kernel, layer_norm_fwd_kernel
from fastvit.ops import _library
from fastvit.ops._checks import by_rows, contiguous, empty_like, row_stride
from fastvit.ops._epilogue import rows_per_sample
from fastvit.ops._launch import Constants, Launch, cdiv
from fastvit.ops._library import Unsupported
from fastvit.ops._plans import AFRESH, Plans
from fastvit.ops.launch.column_sum import column_sums


def layer_norm_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out_dtype: torch.dtype | None, rms: bool = False,
    *, plans: Plans = AFRESH,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    (rows,) = plans.readable(by_rows, x)
    weight, bias = plans.readable(contiguous, weight, bias)
    launch, shape = plans.plan(_forward_plan, x, rows, None, None, eps)
    y = empty_like(x, out_dtype)
    mean, rstd = _statistics(x, shape, rms)
    launch(rows, None, weight, bias, None, None, None, y, None if rms else mean, rstd)
    return y, mean, rstd


def add_layer_norm_fwd(
    residual: Tensor, branch: Tensor, weight: Tensor, bias: Tensor | None, layer_scale: Tensor | None,
    row_scale: Tensor | None, eps: float, rms: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    s = empty_like(residual, torch.promote_types(residual.dtype, branch.dtype))
    residual, branch = by_rows(residual), by_rows(branch)
    vectors = map(contiguous, (weight, bias, layer_scale, row_scale))
    launch, shape = _forward_plan(s, residual, branch, row_scale, eps)
    y = torch.empty_like(s)
    mean, rstd = _statistics(s, shape, rms)
    launch(residual, branch, *vectors, s, y, None if rms else mean, rstd)
    return s, y, mean, rstd


def layer_norm_bwd(
    dy: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, dresidual: Tensor | None,
    *, plans: Plans = AFRESH,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _backward(dy, dresidual, x, mean, rstd, weight, plans=plans)


def layer_norm_bwd_recompute(
    dy: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, bias: Tensor | None,
    dresidual: Tensor | None, *, plans: Plans = AFRESH,
) -> tuple[Tensor, ...]:  # fmt: skip
    y = empty_like(dy)
    return *_backward(dy, dresidual, x, mean, rstd, weight, bias=bias, y=y, plans=plans), y


def add_layer_norm_bwd(
    dy: Tensor, dsum: Tensor | None, s: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, branch: Tensor,
    layer_scale: Tensor | None, row_scale: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    dbranch = empty_like(branch)
    ds, dweight, dbias, *dlayer_scale = _backward(
        dy, dsum, s, mean, rstd, weight, branch=branch, dbranch=dbranch, layer_scale=layer_scale, row_scale=row_scale
    )
    return ds, dbranch, dweight, dbias, *(dlayer_scale or [weight.new_empty(0)])


def _statistics(x: Tensor, shape: tuple[int, ...], rms: bool) -> tuple[Tensor, Tensor]:
    """Room for mean and rstd; RMSNorm's mean is (0,)."""
    rstd = x.new_empty(shape, dtype=torch.float32)
    return rstd.new_empty(0) if rms else torch.empty_like(rstd), rstd


def _backward(
    dy: Tensor, dsum: Tensor | None, s: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, *,
    bias: Tensor | None = None, y: Tensor | None = None, branch: Tensor | None = None, dbranch: Tensor | None = None,
    layer_scale: Tensor | None = None, row_scale: Tensor | None = None, plans: Plans = AFRESH,
) -> tuple[Tensor, ...]:  # fmt: skip
    """-> ds like s; dweight [D], dbias [D], or [0] without mean, and, with layer_scale, dlayer_scale [D]. Writes y and
    dbranch."""
    ds = empty_like(s)
    parameters = (weight,) if mean is None else (weight, weight)
    if layer_scale is not None:
        parameters = *parameters, layer_scale
    rows = plans.readable(by_rows, dy, dsum, s, branch)
    vectors = plans.readable(contiguous, weight, bias, layer_scale, row_scale)
    launch, shape = plans.plan(_backward_plan, s, rows, row_scale, len(parameters))
    if s.numel() == 0:
        return ds, *_with_bias(mean, [torch.zeros_like(p) for p in parameters])
    dy, dsum, s, branch = rows
    weight, bias, layer_scale, row_scale = vectors
    partial = s.new_empty(shape, dtype=torch.float32)
    launch(dy, dsum, s, mean, rstd, weight, bias, branch, layer_scale, row_scale, ds, dbranch, y, partial)
    return ds, *_with_bias(mean, column_sums(partial, *parameters, plans=plans))


def _with_bias(mean: Tensor | None, sums: Sequence[Tensor]) -> Sequence[Tensor]:
    """dweight, dbias and what else there is, where RMSNorm's sums have no dbias."""
    return sums if mean is not None else (sums[0], sums[0].new_empty(0), *sums[1:])


def _forward_plan(
    x: Tensor, rows: Tensor, branch: Tensor | None, row_scale: Tensor | None, eps: float
) -> tuple[Launch, tuple[int, ...]]:
    """The launch for x (..., D), which is read as these rows, or is the sum of these and the branch; and the shape of
    the statistics."""
    M, D, programs, constants = _programs(x, row_scale, backward=False)
    numbers = M, D, rows_per_sample(x, row_scale), row_stride(rows), row_stride(branch), eps
    return Launch(layer_norm_fwd_kernel, programs, numbers, constants), (*x.shape[:-1], 1)


def _backward_plan(
    s: Tensor, rows: Sequence[Tensor | None], row_scale: Tensor | None, tables: int
) -> tuple[Launch, tuple[int, int, int]]:
    """The launch, and the shape of the partial sums. rows: dy, dsum, s and the branch as they are read."""
    M, D, programs, constants = _programs(s, row_scale, backward=True)
    numbers = M, D, rows_per_sample(s, row_scale), *map(row_stride, rows)
    return Launch(layer_norm_bwd_kernel, programs, numbers, constants), (tables, programs, D)


def _programs(x: Tensor, row_scale: Tensor | None, *, backward: bool) -> tuple[int, int, int, Constants]:
    """How many rows x (..., D) has, D, how many programs of a kernel take them, and its constants."""
    D = x.shape[-1]
    if x.dtype is torch.float64:
        raise Unsupported("float64")
    if D > _configs.MAX_ROW:
        raise Unsupported(f"rows of more than {_configs.MAX_ROW} elements")
    M = x.numel() // D
    per_sm, constants = _plan(D, backward, _library.arch(x), row_scale is not None)
    programs = min(cdiv(M, constants["BLOCK_M"]), per_sm * _library.multiprocessors(x.device.index))
    return M, D, programs, constants


@_tuned.cached
def _plan(D: int, backward: bool, arch: str, has_row_scale: bool) -> tuple[int, Constants]:
    cfg = _configs.layer_norm(D, backward=backward, arch=arch)
    return cfg.programs_per_sm, {
        "HAS_ROW_SCALE": has_row_scale, "BLOCK_M": cfg.block_rows, "BLOCK_D": cfg.block_dim,
        "STAGES": cfg.num_stages, "num_warps": cfg.num_warps,
    }  # fmt: skip
