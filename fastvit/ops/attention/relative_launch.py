"""Launch the kernels of attention with decomposed relative positions."""

from __future__ import annotations

import torch
from torch import Tensor

from fastvit.kernels import _tuned
from fastvit.kernels._relative_configs import attention_relative
from fastvit.kernels.attention_relative import attention_relative_fwd_kernel
from fastvit.kernels.attention_relative_bwd import (
    attention_relative_bwd_dkdv_kernel,
    attention_relative_bwd_dq_kernel,
)
from fastvit.ops.attention.launch import readable
from fastvit.ops.attention.workload import DTYPES, in_units, shape_of_strides
from fastvit.ops.runtime import device
from fastvit.ops.runtime.backend import KernelUnsupported
from fastvit.ops.runtime.call import Call
from fastvit.ops.runtime.device import dot_precision
from fastvit.ops.runtime.launch import Constants, Launch, cdiv
from fastvit.ops.runtime.rows import empty_like


def attention_relative_fwd(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor, scale: float, *, call: Call
) -> tuple[Tensor, Tensor]:
    """Launch the forward kernel. q (B, M, H, d), k and v (B, gh * gw, H, d), rows (B, M, H, gh), columns (B, M, H, gw):
    one of float32, bfloat16, float16, read by stride.

    Return o (B, M, H, d), contiguous, and LSE (B, H, M) float32. Raise `KernelUnsupported` for another dtype.
    """
    tensors = call.as_read(readable, q, k, v, rows, columns)
    launch = call.once("attention_relative_fwd", _forward, tensors, scale)
    o, (B, M, H, _) = empty_like(q), q.shape
    lse = q.new_empty((B, H, M), dtype=torch.float32)
    launch(*tensors, o, lse)
    return o, lse


def attention_relative_bwd(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor, o: Tensor, lse: Tensor, scale: float,
    *, call: Call,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Launch the backward kernels. Return the gradients of q, k, v, rows and columns, contiguous."""
    do, q, k, v, rows, columns = call.as_read(readable, do, q, k, v, rows, columns)
    dq, dk, dv, dcolumns = (empty_like(t) for t in (q, k, v, columns))
    strided = q, k, v, o, do, dq, dk, dv, rows, columns
    first, second, parts = call.once("attention_relative_bwd", _backward, strided, scale)
    drows = rows.new_empty((parts, *rows.shape), dtype=rows.dtype if parts == 1 else torch.float32)
    statistics = lse.new_empty((*lse.shape[:2], 2, lse.shape[2]))
    first(q, k, v, o, do, rows, columns, lse, dq, drows, dcolumns, statistics)
    second(q, k, v, do, rows, columns, statistics, dk, dv)
    drows = drows[0].detach() if parts == 1 else drows.sum(0).to(rows.dtype)  # no view, as in aten.linear
    return dq, dk, dv, drows, dcolumns


def _forward(tensors: tuple[Tensor, ...], scale: float) -> Launch:
    """Configure the kernel. tensors: q, k, v, rows, columns."""
    q, k, v, rows, columns = tensors
    strides, others, units = _strides((q, k, v), rows, columns)
    (_, M, H, _), grid = q.shape, (rows.shape[3], columns.shape[3])
    block_m, _, constants, _ = _config("fwd", _workload(q, *grid))
    numbers = M, H, *grid, *strides, *others, scale
    return Launch(attention_relative_fwd_kernel, _planes(q) * cdiv(M, block_m), numbers, units | constants)


def _backward(strided: tuple[Tensor, ...], scale: float) -> tuple[Launch, Launch, int]:
    """Configure the kernels. Also return the number of parts of drows. strided: q, k, v, o, do, dq, dk, dv, rows,
    columns."""
    q, rows, columns = strided[0], *strided[8:]
    strides, others, units = _strides(strided[:8], rows, columns)
    (B, M, H, _), grid = q.shape, (rows.shape[3], columns.shape[3])
    workload = _workload(q, *grid)
    block_m, across, constants, _ = _config("dq", workload)
    numbers = B, M, H, *grid, *strides[:18], *others, scale
    of_dq = Launch(attention_relative_bwd_dq_kernel, _planes(q) * cdiv(M, block_m), numbers, units | constants)
    _, _, constants, tiles = _config("dkdv", workload)
    numbers = M, H, *grid, *strides[:9], *strides[12:15], *strides[18:], *others, scale
    of_dkdv = Launch(attention_relative_bwd_dkdv_kernel, _planes(q) * tiles, numbers, units | constants)
    return of_dq, of_dkdv, across


def _planes(q: Tensor) -> int:
    return q.shape[0] * q.shape[2] if q.numel() else 0


def _strides(
    strided: tuple[Tensor, ...], rows: Tensor, columns: Tensor
) -> tuple[tuple[int, ...], tuple[int, ...], Constants]:
    """Return the strides of the first and of rows and columns, and the constants that are their units."""
    if rows.dtype not in DTYPES:
        raise KernelUnsupported(f"attention has no kernel for {rows.dtype}")
    q, k = strided[:2]
    unit, strides = in_units(shape_of_strides(q, k), *[t.stride() for t in strided])
    other_unit, others = in_units(q.shape, rows.stride(), columns.stride())
    return strides, others, {"UNIT": unit, "OTHER_UNIT": other_unit}


# M, height and width of the grid, d, bytes of an element, target, precision of the matmuls
_Workload = tuple[int, int, int, int, int, str, str]


def _workload(q: Tensor, height: int, width: int) -> _Workload:
    return q.shape[1], height, width, q.shape[3], q.element_size(), device.arch(q), dot_precision(q)


@_tuned.cached
def _config(kernel: str, workload: _Workload) -> tuple[int, int, Constants, int]:
    """Return the queries of a tile, the tiles of keys in a row of them, the constants, and the tiles of all keys."""
    M, height, width, d, itemsize, arch, precision = workload
    c = attention_relative(kernel, M, height, width, d, itemsize, arch, precision == "tf32")
    constants: Constants = {
        "HEAD_DIM": d, "D0": c.parts[0], "D1": c.parts[1], "PRECISION": precision, "BLOCK_M": c.block_m,
        "GRID_ROWS": c.grid_rows, "GRID_COLUMNS": c.grid_columns, "EVEN": c.even,
        "num_warps": c.num_warps, "num_stages": c.num_stages,
    }  # fmt: skip
    if kernel == "dkdv":
        constants |= {"LOOP": c.loop, "TAIL": c.tail}
    across = cdiv(width, c.grid_columns)
    return c.block_m, across, constants, cdiv(height, c.grid_rows) * across
