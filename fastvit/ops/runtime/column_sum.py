"""Launch the deterministic second stage of a sum over rows, which several ops share."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fastvit.kernels import _configs
from fastvit.kernels.column_sum import column_sum_kernel
from fastvit.ops.runtime import devices
from fastvit.ops.runtime.launch import Launch, cdiv
from fastvit.ops.runtime.plans import AFRESH, Plans


def column_sums(partial: Tensor, *dtypes: torch.dtype | None, plans: Plans = AFRESH) -> list[Tensor]:
    """Sum the tables of partial [tables, P, D] float32 over P in a fixed order, by one kernel. Return a [D] for each
    dtype, and [0] for None. At most four tables."""
    launch = plans.plan(_plan, *partial.shape, devices.arch(partial))
    D = partial.shape[2]
    out = [partial.new_empty(0 if dtype is None else D, dtype=dtype) for dtype in dtypes]
    tables = [table for table, dtype in zip(out, dtypes, strict=True) if dtype is not None]
    launch(partial, *tables, *[None] * (4 - len(tables)))
    return out


def launch_with_sum(
    launch: Launch, shape: tuple[int, int, int], tensors: tuple[Any, ...], like: Tensor, plans: Plans
) -> Tensor:
    """Launch a kernel whose last argument is a table of partial sums of this shape. Return their sum [D] in like's
    dtype."""
    partial = like.new_empty(shape, dtype=torch.float32)
    launch(*tensors, partial)
    return column_sums(partial, like.dtype, plans=plans)[0]


def _plan(tables: int, P: int, D: int, arch: str) -> Launch:
    cfg = _configs.column_sum(P, D, arch)
    constants = {
        "UNIT": math.gcd(D, 16),
        "BLOCK_P": cfg.block_rows,
        "BLOCK_D": cfg.block_dim,
        "num_warps": cfg.num_warps,
    }
    return Launch(column_sum_kernel, tables * cdiv(D, cfg.block_dim), (P, D), constants)
