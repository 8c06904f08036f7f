"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) of q and k, all heads that share a table in one pass:

    out1 = x1 cos1 - x2 sin1        x = (x1, x2): the halves of a head, or its even and odd elements
    out2 = x2 cos2 + x1 sin2

and transposed, which is its gradient: out1 = x1 cos1 + x2 sin2, out2 = x2 cos2 - x1 sin1. Prefix tokens and the heads
behind the rotated ones (v's, of a packed qkv) are copied, or, where out is x, left alone. Arithmetic is float32.
"""

import triton
import triton.language as tl

from fastvit.kernels import _cost
from fastvit.kernels._pairs import load_pairs, rotate, store_pairs

_STRIDES = [f"stride_{x}{i}" for x in "xto" for i in "bnh"]


@triton.jit(
    do_not_specialize=["N", "P", "first", "heads", "rotated", *_STRIDES],
    launch_metadata=_cost.of_rows("x_ptr", rows="N", columns="heads"),
)
def rotary_kernel(
    # inputs
    x_ptr,  # [B, N, heads, d] T
    sin_ptr, cos_ptr,  # [B, N - P, TABLE_HEADS, d]
    # output
    out_ptr,  # as x; may be x itself
    # tokens, of which P are prefix; the first one that is written; heads that are written and that are rotated
    N, P, first, heads, rotated,
    # strides in UNITs: batch, token, head; the last dimension is contiguous
    stride_xb, stride_xn, stride_xh,
    stride_tb, stride_tn, stride_th,
    stride_ob, stride_on, stride_oh,
    UNIT: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, TABLE_HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr, TRANSPOSED: tl.constexpr, BLOCK_N: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """One program owns BLOCK_N tokens of HEADS heads; grid: batch x token blocks x head groups, flattened."""
    groups = tl.cdiv(heads, HEADS)
    blocks = tl.cdiv(N - first, BLOCK_N)
    batch = (tl.program_id(0) // (groups * blocks)).to(tl.int64)
    start = (first + tl.program_id(0) // groups % blocks * BLOCK_N).to(tl.int64)
    tokens = tl.arange(0, BLOCK_N)[:, None]  # [BLOCK_N, 1], counted from start
    within = tokens < N - start
    positioned = within & (tokens >= P - start)
    x_rows = x_ptr + (batch * stride_xb + start * stride_xn) * UNIT + tokens * (stride_xn * UNIT)
    out_rows = out_ptr + (batch * stride_ob + start * stride_on) * UNIT + tokens * (stride_on * UNIT)
    table_rows = (batch * stride_tb + (start - P) * stride_tn) * UNIT + tokens * (stride_tn * UNIT)
    for i in tl.static_range(HEADS):
        head = tl.program_id(0) % groups * HEADS + i
        if i == 0 or TABLE_HEADS > 1:
            of_head = table_rows + (head % TABLE_HEADS).to(tl.int64) * stride_th * UNIT
            sin1, sin2 = load_pairs(sin_ptr + of_head, positioned, HEAD_DIM, HALF, INTERLEAVED)
            cos1, cos2 = load_pairs(cos_ptr + of_head, positioned, HEAD_DIM, HALF, INTERLEAVED)
        mask = within & (head < heads)
        x1, x2 = load_pairs(x_rows + head.to(tl.int64) * stride_xh * UNIT, mask, HEAD_DIM, HALF, INTERLEAVED)
        turned = positioned & (head < rotated)
        y1, y2 = rotate(x1, x2, sin1, sin2, cos1, cos2, TRANSPOSED)
        y1, y2 = tl.where(turned, y1, x1), tl.where(turned, y2, x2)
        store_pairs(out_rows + head.to(tl.int64) * stride_oh * UNIT, y1, y2, mask, HEAD_DIM, HALF, INTERLEAVED)
