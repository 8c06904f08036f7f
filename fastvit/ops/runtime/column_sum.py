"""Launch the deterministic second stage of a sum over rows, which several ops share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastvit.kernels._configs import COLUMN_SUM
from fastvit.kernels.column_sum import column_sum_kernel
from fastvit.ops.runtime.launch import Launch, cdiv


def column_sums(partial: Tensor, dtypes: Sequence[torch.dtype | None]) -> list[Any]:
    """Return the sums of (tables, P, D) float32 over P, in a fixed order, for at most four tables: (D,) for each dtype,
    and None for None, which has no table."""
    tables, P, D = partial.shape
    programs = tables * cdiv(D, COLUMN_SUM["BLOCK_D"])
    launch = Launch(column_sum_kernel, programs, (P, D), {"UNIT": math.gcd(D, 16), **COLUMN_SUM})
    sums = [None if dtype is None else partial.new_empty(D, dtype=dtype) for dtype in dtypes]
    wanted = [t for t in sums if t is not None]
    launch(partial, *wanted, *[None] * (4 - len(wanted)))
    return sums


def launch_and_sum(
    launch: Launch, programs: int, D: int, dtypes: Sequence[torch.dtype | None], *tensors: Any
) -> list[Any]:
    """Run a launch whose kernel writes partial sums (tables, programs, D) into its last argument, after these tensors.
    Return the `column_sums`."""
    tables = len(dtypes) - dtypes.count(None)
    partial = tensors[0].new_empty((tables, programs, D), dtype=torch.float32)
    launch(*tensors, partial)
    return column_sums(partial, dtypes)
