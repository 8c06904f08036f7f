"""Launch the kernels of the ops of LayerNorm and RMSNorm."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fastvit.kernels import _configs
from fastvit.kernels.layer_norm import layer_norm_bwd_kernel, layer_norm_fwd_kernel
from fastvit.ops.runtime import device
from fastvit.ops.runtime.backend import KernelUnsupported
from fastvit.ops.runtime.column_sum import launch_and_sum
from fastvit.ops.runtime.epilogue import rows_per_sample
from fastvit.ops.runtime.launch import Constants, Launch, cdiv
from fastvit.ops.runtime.rows import by_rows, contiguous, empty_like, row_stride


def layer_norm_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out_dtype: torch.dtype | None, rms: bool = False
) -> tuple[Tensor, Tensor | None, Tensor]:
    rows = by_rows(x)
    weight, bias = map(contiguous, (weight, bias))
    launch, shape = _forward(x, rows, None, None, eps)
    y = empty_like(x, out_dtype)
    mean, rstd = _statistics(x, shape, rms)
    launch(rows, None, weight, bias, None, None, None, y, mean, rstd)
    return y, mean, rstd


def add_layer_norm_fwd(
    residual: Tensor, branch: Tensor, weight: Tensor, bias: Tensor | None, layer_scale: Tensor | None,
    row_scale: Tensor | None, eps: float, rms: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:  # fmt: skip
    s = empty_like(residual, torch.promote_types(residual.dtype, branch.dtype))
    residual, branch = map(by_rows, (residual, branch))
    weight, bias, layer_scale, row_scale = map(contiguous, (weight, bias, layer_scale, row_scale))
    launch, shape = _forward(s, residual, branch, row_scale, eps)
    y = torch.empty_like(s)
    mean, rstd = _statistics(s, shape, rms)
    launch(residual, branch, weight, bias, layer_scale, row_scale, s, y, mean, rstd)
    return s, y, mean, rstd


def layer_norm_bwd(
    dy: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, bias: Tensor | None,
    dresidual: Tensor | None, row_scale: Tensor | None = None, total_dtype: torch.dtype | None = None,
    want_y: bool = False,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    y, bias = (empty_like(dy), bias) if want_y else (None, None)
    dx, dweight, dbias, total = _backward(
        dy, dresidual, x, mean, rstd, weight, total_dtype, bias=bias, y=y, row_scale=row_scale
    )
    return dx, dweight, dbias, y, total


def add_layer_norm_bwd(
    dy: Tensor, dsum: Tensor | None, s: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, branch: Tensor,
    layer_scale: Tensor | None, row_scale: Tensor | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    dbranch = empty_like(branch)
    ds, *sums = _backward(
        dy, dsum, s, mean, rstd, weight, None if layer_scale is None else layer_scale.dtype,
        branch=branch, dbranch=dbranch, layer_scale=layer_scale, row_scale=row_scale,
    )  # fmt: skip
    return ds, dbranch, *sums


def _statistics(x: Tensor, shape: tuple[int, ...], rms: bool) -> tuple[Tensor | None, Tensor]:
    """Return empty tensors for mean and rstd."""
    rstd = x.new_empty(shape, dtype=torch.float32)
    return None if rms else torch.empty_like(rstd), rstd


def _backward(
    dy: Tensor, dsum: Tensor | None, s: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor,
    third: torch.dtype | None, *, bias: Tensor | None = None, y: Tensor | None = None,
    branch: Tensor | None = None, dbranch: Tensor | None = None, layer_scale: Tensor | None = None,
    row_scale: Tensor | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Write y and dbranch. Return ds like s, dweight and dbias (D,), and in the dtype `third` the total, or with a
    branch dlayer_scale; dbias is None without mean, the last one if `third` is None."""
    ds = empty_like(s)
    rows = [*map(by_rows, (dy, dsum, s, branch))]
    weight, bias, layer_scale, row_scale = map(contiguous, (weight, bias, layer_scale, row_scale))
    dtypes = weight.dtype, None if mean is None else weight.dtype, third
    M, D, programs, constants = _programs(s, row_scale, backward=True)
    if s.numel() == 0:
        return ds, *[None if dtype is None else s.new_zeros(D, dtype=dtype) for dtype in dtypes]
    numbers = M, D, rows_per_sample(s, row_scale), *map(row_stride, rows)
    constants = {"WANT_TOTAL": branch is None and third is not None, **constants}
    launch = Launch(layer_norm_bwd_kernel, programs, numbers, constants)
    dy, dsum, s, branch = rows
    tensors = dy, dsum, s, mean, rstd, weight, bias, branch, layer_scale, row_scale, ds, dbranch, y
    return ds, *launch_and_sum(launch, programs, D, dtypes, *tensors)


def _forward(
    x: Tensor, rows: Tensor, branch: Tensor | None, row_scale: Tensor | None, eps: float
) -> tuple[Launch, tuple[int, ...]]:
    """Return the launch for x (..., D), which is read as these rows, or is the sum of these and the branch; and the
    shape of the statistics."""
    M, D, programs, constants = _programs(x, row_scale, backward=False, alone=branch is None)
    numbers = M, D, rows_per_sample(x, row_scale), row_stride(rows), row_stride(branch), eps
    return Launch(layer_norm_fwd_kernel, programs, numbers, constants), (*x.shape[:-1], 1)


def _programs(
    x: Tensor, row_scale: Tensor | None, *, backward: bool, alone: bool = False
) -> tuple[int, int, int, Constants]:
    """Return the number of rows of x (..., D), D, the number of programs, and the kernel's constants. alone: there is
    no branch to add."""
    D = x.shape[-1]
    if x.dtype is torch.float64:
        raise KernelUnsupported("float64")
    if D > _configs.MAX_ROW:
        raise KernelUnsupported(f"rows of more than {_configs.MAX_ROW} elements")
    M = x.numel() // D
    per_sm, constants = _plan(D, backward, device.arch(x), row_scale is not None, alone)
    programs = min(cdiv(M, constants["BLOCK_M"]), per_sm * device.multiprocessors(x.device.index))
    return M, D, programs, constants


@functools.cache
def _plan(D: int, backward: bool, arch: str, has_row_scale: bool, alone: bool) -> tuple[int, Constants]:
    cfg = _configs.layer_norm(D, backward=backward, arch=arch)
    # a limit on registers that the grid respects keeps ptxas from spilling to fit one more program
    limit = cfg.registers if alone and cfg.registers >= 64 and arch in _configs.FIRST_TIER else None
    return cfg.programs_per_sm, {
        "HAS_ROW_SCALE": has_row_scale, "BLOCK_M": cfg.block_rows, "BLOCK_D": cfg.block_dim,
        "STAGES": cfg.num_stages, "num_warps": cfg.num_warps, **_configs.register_limit(limit),
    }  # fmt: skip
