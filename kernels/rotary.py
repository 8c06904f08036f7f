"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) of q and k in one pass:

    out1 = x1 cos1 - x2 sin1        x = (x1, x2): the halves of a head, or its even and odd elements
    out2 = x2 cos2 + x1 sin2

and transposed, which is the gradient: out1 = x1 cos1 + x2 sin2, out2 = x2 cos2 - x1 sin1. Prefix tokens and heads from
`rotated` on (v in a packed qkv) are copied, or left alone where out is x. Arithmetic is float32. Every element is
written once: bitwise reproducible.
"""

import triton
import triton.language as tl

from fastvit.kernels import _profiling
from fastvit.kernels._rotation import load_pairs, load_tables, part, rotate, rows, share, store_pairs

_STRIDES = [f"stride_{x}{i}" for x in "xto" for i in "bnh"]


@triton.jit(
    do_not_specialize=["N", "P", "first_token", "heads", "rotated", "steps", "tables", *_STRIDES],
    launch_metadata=_profiling.rows("x_ptr", rows="N", columns="heads"),
)
def rotary_kernel(
    # inputs
    x_ptr,  # [B, N, heads, d] T
    sin_ptr, cos_ptr,  # [B, N - P, TABLE_HEADS, d]
    # output
    out_ptr,  # as x; may be x itself
    # tokens, P of which are prefix; the first token to write; heads to write and to rotate; steps in all; tables: B if
    # each sample has one, otherwise 1
    N, P, first_token, heads, rotated, steps, tables,
    # strides in UNITs of elements: batch, token, head; the last dimension is contiguous
    stride_xb, stride_xn, stride_xh,
    stride_tb, stride_tn, stride_th,
    stride_ob, stride_on, stride_oh,
    UNIT: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, TABLE_HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr, TRANSPOSED: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A persistent grid: each program takes its share of all steps (_rotation.py)."""
    begin, end = share(steps, tl.program_id(0), tl.num_programs(0))
    blocks = tl.cdiv(N - first_token, BLOCK_N)
    per_block = steps // (blocks * tables)
    for block in range(begin // per_block, tl.cdiv(end, per_block)):
        table, start = block // blocks, first_token + block % blocks * BLOCK_N
        tokens = tl.arange(0, BLOCK_N)[:, None]  # [BLOCK_N, 1], counted from start
        within = tokens < N - start
        positioned = within & (tokens >= P - start)
        if TABLE_HEADS == 1:
            sin1, sin2, cos1, cos2 = load_tables(
                sin_ptr, cos_ptr, table, start - P, 0, tokens, stride_tb, stride_tn, stride_th, positioned,
                UNIT, HEAD_DIM, HALF, INTERLEAVED,
            )  # fmt: skip
        left, right = part(begin, end, block, per_block)
        left, right = left + table * heads, right + table * heads
        for sample in range(left // heads, tl.cdiv(right, heads)):
            first, stop = part(left, right, sample, heads)
            x_rows = rows(x_ptr, sample, start, first, tokens, stride_xb, stride_xn, stride_xh, UNIT)
            out_rows = rows(out_ptr, sample, start, first, tokens, stride_ob, stride_on, stride_oh, UNIT)
            for i in tl.range(0, stop - first, num_stages=STAGES):
                if TABLE_HEADS > 1:
                    head = (first + i) % TABLE_HEADS
                    sin1, sin2, cos1, cos2 = load_tables(
                        sin_ptr, cos_ptr, table, start - P, head, tokens, stride_tb, stride_tn, stride_th, positioned,
                        UNIT, HEAD_DIM, HALF, INTERLEAVED,
                    )  # fmt: skip
                here = x_rows + i * stride_xh.to(tl.int64) * UNIT
                x1, x2 = load_pairs(here, within, HEAD_DIM, HALF, INTERLEAVED)
                y1, y2 = rotate(x1, x2, sin1, sin2, cos1, cos2, TRANSPOSED)
                turned = positioned & (first + i < rotated)
                y1, y2 = tl.where(turned, y1, x1), tl.where(turned, y2, x2)
                here = out_rows + i * stride_oh.to(tl.int64) * UNIT
                store_pairs(here, y1, y2, within, HEAD_DIM, HALF, INTERLEAVED)
