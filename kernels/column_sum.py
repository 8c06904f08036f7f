"""The second stage of sums over rows (dweight, dbias, dlayer_scale, a mask's gradient):

    out_t = sum over p of partial[t, p]

In the first stage each program stores a partial row in float32. This stage adds them up in float32 and in a fixed
order: bitwise reproducible, no atomics.
"""

import triton
import triton.language as tl

from fastvit.kernels import _profiling


@triton.jit(do_not_specialize=["P", "D"], launch_metadata=_profiling.rows("partial_ptr", "P"))
def column_sum_kernel(
    partial_ptr,  # [tables, P, D] f32
    out0_ptr, out1_ptr, out2_ptr, out3_ptr,  # [D], one per table, then None
    P, D,
    UNIT: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_D columns of one out_t; grid: tables x column blocks, flattened. UNIT: a divisor of D,
    at most 16, which tells the compiler how rows are aligned."""
    D = D // UNIT * UNIT
    blocks = tl.cdiv(D, BLOCK_D)
    table = tl.program_id(0) // blocks
    cols = tl.program_id(0) % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_P, BLOCK_D], tl.float32)
    for start in range(0, P, BLOCK_P):
        rows = start + tl.arange(0, BLOCK_P)
        at = (table.to(tl.int64) * P + rows)[:, None] * D + cols[None, :]
        total += tl.load(partial_ptr + at, mask=(rows < P)[:, None] & (cols < D)[None, :], other=0.0)
    result = tl.sum(total, 0)
    if table == 0:
        tl.store(out0_ptr + cols, result.to(out0_ptr.dtype.element_ty), mask=cols < D)
    if out1_ptr is not None:
        if table == 1:
            tl.store(out1_ptr + cols, result.to(out1_ptr.dtype.element_ty), mask=cols < D)
    if out2_ptr is not None:
        if table == 2:
            tl.store(out2_ptr + cols, result.to(out2_ptr.dtype.element_ty), mask=cols < D)
    if out3_ptr is not None:
        if table == 3:
            tl.store(out3_ptr + cols, result.to(out3_ptr.dtype.element_ty), mask=cols < D)
