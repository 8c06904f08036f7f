"""Dropout (Srivastava et al. 2014) and the end of a residual branch in one pass:

    out = residual + row_scale * layer_scale * keep / (1 - p) * x        keep ~ Bernoulli(1 - p)

The mask is not stored: it is Philox of row and column, so that the backward pass draws it again from the same seed. One
call of Philox gives four numbers, for four elements of a row. Arithmetic is float32. Deterministic for a given seed.
"""

import triton
import triton.language as tl

from fastvit.kernels import _profiling
from fastvit.kernels._math import survives


@triton.jit(do_not_specialize=["M"], launch_metadata=_profiling.rows("x_ptr"))
def dropout_kernel(
    # inputs
    x_ptr,  # [M, D] T
    seed_ptr,  # [1] int64
    layer_scale_ptr,  # [D] or None
    row_scale_ptr,  # [M / rows_per_sample] or None
    residual_ptr,  # [M, D] or None
    # output
    out_ptr,  # [M, D]
    # sizes; strides in elements, the last dimension is contiguous
    M, D: tl.constexpr, rows_per_sample,
    stride_xm: tl.constexpr, stride_rm: tl.constexpr,
    dropout_p: tl.float32,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program owns BLOCK_M rows x 4 * BLOCK_D columns; grid: row blocks x column blocks, flattened."""
    blocks = tl.cdiv(D, 4 * BLOCK_D)
    block = tl.program_id(0) % blocks
    rows = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]  # [BLOCK_M, 1]
    lanes = tl.arange(0, BLOCK_D)[None, :]  # [1, BLOCK_D]

    scale = tl.zeros([BLOCK_M, 1], tl.float32) + 1.0 / (1.0 - dropout_p)
    if row_scale_ptr is not None:
        scale *= tl.load(row_scale_ptr + rows // rows_per_sample, mask=rows < M, other=0.0).to(tl.float32)
    counter = tl.zeros([BLOCK_M, BLOCK_D], tl.uint32)
    numbers = tl.philox(
        tl.load(seed_ptr),
        counter + (rows & 0xFFFFFFFF).to(tl.uint32),
        counter + (rows >> 32).to(tl.uint32),
        counter + (block * BLOCK_D + lanes).to(tl.uint32),
        counter,
    )
    for q in tl.static_range(4):
        cols = (block * 4 + q) * BLOCK_D + lanes
        mask = (rows < M) & (cols < D)
        x = tl.load(x_ptr + rows * stride_xm + cols, mask=mask, other=0.0).to(tl.float32)
        out = x * tl.where(survives(numbers[q], dropout_p), scale, 0.0)
        if layer_scale_ptr is not None:
            out *= tl.load(layer_scale_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)
        if residual_ptr is not None:
            out += tl.load(residual_ptr + rows * stride_rm + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + rows * D + cols, out.to(out_ptr.dtype.element_ty), mask=mask)
