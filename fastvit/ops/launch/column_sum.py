"""Launches the deterministic second stage of a sum over rows, which several ops share."""

from __future__ import annotations

from torch import Tensor

from fastvit.kernels import _configs
from fastvit.kernels.column_sum import column_sum_kernel
from fastvit.ops import _library
from fastvit.ops._launch import cdiv, launch


def column_sums(partial: Tensor, *like: Tensor) -> list[Tensor]:
    """partial [tables, P, D] f32 -> one [D] tensor a table, in the dtype of `like`'s entry: sums over P in a fixed
    order, all by one kernel. At most four tables."""
    tables, P, D = partial.shape
    cfg = _configs.column_sum(P, D, _library.arch(partial))
    out = [partial.new_empty(D, dtype=t.dtype) for t in like]
    launch(
        column_sum_kernel, tables * cdiv(D, cfg.block_dim),
        (partial, *out, *[None] * (4 - tables)), (P, D),
        {"BLOCK_P": cfg.block_rows, "BLOCK_D": cfg.block_dim, "num_warps": cfg.num_warps},
    )  # fmt: skip
    return out
