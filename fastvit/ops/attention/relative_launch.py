"""Launch the kernels of attention with decomposed relative positions."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from fastvit.kernels._relative_configs import attention_relative
from fastvit.kernels.attention_relative import attention_relative_fwd_kernel
from fastvit.kernels.attention_relative_bwd import (
    attention_relative_bwd_dkdv_kernel,
    attention_relative_bwd_dq_kernel,
)
from fastvit.ops.attention.aten_samples import zero_without_queries
from fastvit.ops.attention.groups import Windows
from fastvit.ops.attention.softmax_launch import readable
from fastvit.ops.attention.workload import DTYPES, in_units, shape_of_strides, stored
from fastvit.ops.runtime import device
from fastvit.ops.runtime.backend import KernelUnsupported
from fastvit.ops.runtime.device import dot_precision
from fastvit.ops.runtime.launch import Constants, Launch, cdiv
from fastvit.ops.runtime.rows import empty_like


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor, scale: float, windows: Windows | None
) -> tuple[Tensor, Tensor]:
    """Launch the forward kernel. q (B, M, H, d), k and v (B, gh * gw, H, d), rows (B, M, H, gh), columns (B, M, H, gw):
    one of float32, bfloat16, float16, read by stride; or the same in windows.

    Return o (B, M, H, d), contiguous, and LSE. Raise `KernelUnsupported` for another dtype.
    """
    tensors = tuple(map(readable, (q, k, v, rows, columns)))
    launch, of_lse = _forward(tensors, scale, windows)
    o, lse = empty_like(q), q.new_empty(of_lse, dtype=torch.float32)
    launch(*tensors, o, lse)
    return o, lse


def launch_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor, o: Tensor, lse: Tensor,
    scale: float, gradients: Sequence[Tensor], windows: Windows | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Write dq, dk and dv; return the gradients of rows and columns."""
    do, q, k, v, rows, columns = map(readable, (do, q, k, v, rows, columns))
    (dq, dk, dv), dcolumns = gradients, empty_like(columns)
    zero_without_queries(q, dk, dv)
    strided = q, k, v, o, do, dq, dk, dv, rows, columns
    first, second, parts = _backward(strided, scale, windows)
    drows = rows.new_empty((parts, *rows.shape), dtype=rows.dtype if parts == 1 else torch.float32)
    statistics = lse.new_empty((*lse.shape[:2], 2, lse.shape[2]))
    first(q, k, v, o, do, rows, columns, lse, dq, drows, dcolumns, statistics)
    second(q, k, v, do, rows, columns, statistics, dk, dv)
    drows = drows[0].detach() if parts == 1 else drows.sum(0).to(rows.dtype)  # no view, as in aten.linear
    return drows, dcolumns


def _forward(tensors: tuple[Tensor, ...], scale: float, windows: Windows | None) -> tuple[Launch, tuple[int, int, int]]:
    """Configure the kernel. Also return LSE's shape. tensors: q, k, v, rows, columns."""
    q, k, v, rows, columns = tensors
    strides, others, units = _strides((q, k, v), rows, columns, windows)
    of_lse = samples, H, M = stored(q, windows)
    grid, tokens = (rows.shape[3], columns.shape[3]), (None, None) if windows is None else windows.grid
    block_m, _, constants, _ = _config("fwd", _workload(q, M, *grid, windows))
    numbers = M, H, *grid, *tokens, *strides, *others, scale
    programs = samples * H * cdiv(M, block_m) if q.numel() else 0
    return Launch(attention_relative_fwd_kernel, programs, numbers, units | constants), of_lse


def _backward(strided: tuple[Tensor, ...], scale: float, windows: Windows | None) -> tuple[Launch, Launch, int]:
    """Configure the kernels. Also return the number of parts of drows. strided: q, k, v, o, do, dq, dk, dv, rows,
    columns."""
    q, rows, columns = strided[0], *strided[8:]
    strides, others, units = _strides(strided[:8], rows, columns, windows)
    samples, H, M = stored(q, windows)
    grid, tokens = (rows.shape[3], columns.shape[3]), (None, None) if windows is None else windows.grid
    workload, planes = _workload(q, M, *grid, windows), samples * H if q.numel() else 0
    block_m, across, constants, _ = _config("dq", workload)
    numbers = q.shape[0], M, H, *grid, *tokens, *strides[:18], *others, scale
    of_dq = Launch(attention_relative_bwd_dq_kernel, planes * cdiv(M, block_m), numbers, units | constants)
    _, _, constants, tiles = _config("dkdv", workload)
    numbers = M, H, *grid, *tokens, *strides[:9], *strides[12:15], *strides[18:], *others, scale
    of_dkdv = Launch(attention_relative_bwd_dkdv_kernel, planes * tiles, numbers, units | constants)
    return of_dq, of_dkdv, across


def _strides(
    strided: tuple[Tensor, ...], rows: Tensor, columns: Tensor, windows: Windows | None
) -> tuple[tuple[int, ...], tuple[int, ...], Constants]:
    """Return the strides of the first and of rows and columns, and the constants that are their units."""
    if rows.dtype not in DTYPES:
        raise KernelUnsupported(f"attention has no kernel for {rows.dtype}")
    q, k = strided[:2]
    if windows is not None:  # offsets within a window are 32 bits
        made = q.shape[2] * max(q.shape[3], rows.shape[3], columns.shape[3])  # o and the gradients of rows and columns
        of_token = max(made, *(t.stride(1) for t in (*strided, rows, columns)))
        apart = windows.window[0] * windows.grid[1] * of_token
        if apart >= 1 << 31:
            raise KernelUnsupported(f"attention's kernels need windows within 2^31 elements, got {apart}")
    unit, strides = in_units(shape_of_strides(q, k), *[t.stride() for t in strided])
    other_unit, others = in_units(q.shape, rows.stride(), columns.stride())
    return strides, others, {"UNIT": unit, "OTHER_UNIT": other_unit}


# M, height and width of the grid, d, bytes of an element, target, precision of the matmuls, whether in windows
_Workload = tuple[int, int, int, int, int, str, str, bool]


def _workload(q: Tensor, M: int, height: int, width: int, windows: Windows | None) -> _Workload:
    d, itemsize, in_windows = q.shape[3], q.element_size(), windows is not None
    return M, height, width, d, itemsize, device.arch(q), dot_precision(q), in_windows


@functools.cache
def _config(kernel: str, workload: _Workload) -> tuple[int, int, Constants, int]:
    """Return the queries of a tile, the tiles of keys in a row of them, the constants, and the tiles of all keys."""
    M, height, width, d, itemsize, arch, precision, in_windows = workload
    c = attention_relative(kernel, M, height, width, d, itemsize, arch, precision == "tf32", in_windows)
    constants: Constants = {
        "HEAD_DIM": d, "D0": c.parts[0], "D1": c.parts[1], "PRECISION": precision, "BLOCK_M": c.block_m,
        "GRID_ROWS": c.grid_rows, "GRID_COLUMNS": c.grid_columns, "EVEN": c.even,
        "num_warps": c.num_warps, "num_stages": c.num_stages,
    }  # fmt: skip
    if kernel == "dkdv":
        constants |= {"LOOP": c.loop, "TAIL": c.tail}
    across = cdiv(width, c.grid_columns)
    return c.block_m, across, constants, cdiv(height, c.grid_rows) * across
