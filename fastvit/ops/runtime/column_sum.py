"""Launch the deterministic second stage of a sum over rows, which several ops share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fastvit.kernels import _configs
from fastvit.kernels.column_sum import column_sum_kernel
from fastvit.ops.runtime.launch import Launch, cdiv


class ColumnSums:
    """The launch that sums a table [tables, P, D] float32 over P in a fixed order, for at most four tables: without its
    tensors, like `Launch`.

    dtypes: of the sums, one for each table, and None for sums that are not there, which become (0,).
    """

    __slots__ = ("D", "dtypes", "launch")

    def __init__(self, shape: tuple[int, int, int], dtypes: Sequence[torch.dtype | None], arch: str) -> None:
        tables, P, self.D = shape
        self.dtypes = dtypes
        cfg = _configs.column_sum(P, self.D, arch)
        constants = {
            "UNIT": math.gcd(self.D, 16),
            "BLOCK_P": cfg.block_rows,
            "BLOCK_D": cfg.block_dim,
            "num_warps": cfg.num_warps,
        }
        self.launch = Launch(column_sum_kernel, tables * cdiv(self.D, cfg.block_dim), (P, self.D), constants)

    def __call__(self, partial: Tensor) -> list[Tensor]:
        """Return a [D] for each dtype, and [0] for None."""
        out = [partial.new_empty(0 if dtype is None else self.D, dtype=dtype) for dtype in self.dtypes]
        tables = [table for table, dtype in zip(out, self.dtypes, strict=True) if dtype is not None]
        self.launch(partial, *tables, *[None] * (4 - len(tables)))
        return out


class SummedLaunch:
    """A launch whose kernel writes a table of partial sums into its last argument, and the launch that sums these.
    shape, dtypes: as `ColumnSums` takes them."""

    __slots__ = ("launch", "shape", "sums")

    def __init__(
        self, launch: Launch, shape: tuple[int, int, int], dtypes: Sequence[torch.dtype | None], arch: str
    ) -> None:
        self.launch, self.shape = launch, shape
        self.sums = ColumnSums(shape, dtypes, arch)

    def __call__(self, like: Tensor, *tensors: Tensor | None) -> list[Tensor]:
        """Launch both on the device of `like`; return the sums."""
        partial = like.new_empty(self.shape, dtype=torch.float32)
        self.launch(*tensors, partial)
        return self.sums(partial)
