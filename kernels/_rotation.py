"""Heads as pairs of elements that are rotated together (Su et al. 2021, arXiv:2104.09864): their two halves or, if
interleaved, their even and odd elements; and the order in which the programs of a persistent grid take them.

A step is BLOCK_N tokens of one head of one sample. Steps of the same tokens of a table follow one another, head by head
and sample by sample, so that a program loads the table once for all of them, unless each head has its own. There is one
table for all samples, or one for each:

    for block in range(begin // of_block, tl.cdiv(end, of_block)):      begin, end = share(...)
        table, start = block // blocks, block % blocks * BLOCK_N        of_block = steps // (blocks * tables)
        for sample in range(left // H, tl.cdiv(right, H)):              left, right = part(begin, end, block, of_block)
            for i in range(behind - first):                             first, behind = part(left, right, sample, H)
"""

import triton
import triton.language as tl


@triton.jit
def share(steps, program, programs):
    """The first step of a program and the one behind its last, of so many."""
    each = tl.cdiv(steps, programs)
    return program * each, tl.minimum((program + 1) * each, steps)


@triton.jit
def part(begin, end, i, size):
    """What of begin to end lies in the i-th piece of that size, counted from the piece's beginning."""
    return tl.maximum(begin - i * size, 0), tl.minimum(end - i * size, size)


@triton.jit
def rows(ptr, sample, start, head, tokens, stride_b, stride_n, stride_h, UNIT: tl.constexpr):
    """Pointers to a head of tokens [BLOCK_N, 1], which are counted from start. Strides are in UNITs."""
    at = tl.cast(sample, tl.int64) * stride_b + tl.cast(start, tl.int64) * stride_n + tl.cast(head, tl.int64) * stride_h
    return ptr + at * UNIT + tokens * (stride_n * UNIT)


@triton.jit
def load_pairs(rows, mask, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """rows: pointers [BLOCK_N, 1] to first elements -> x1, x2 [BLOCK_N, HALF] f32, zero outside head and mask."""
    if INTERLEAVED:
        cols = tl.arange(0, 2 * HALF)[None, :]
        x = tl.load(rows + cols, mask=mask & (cols < HEAD_DIM), other=0.0)
        x1, x2 = x.reshape(x.shape[0], HALF, 2).split()
    else:
        cols = tl.arange(0, HALF)[None, :]
        inside = mask & (cols < HEAD_DIM // 2)
        x1 = tl.load(rows + cols, mask=inside, other=0.0)
        x2 = tl.load(rows + HEAD_DIM // 2 + cols, mask=inside, other=0.0)
    return x1.to(tl.float32), x2.to(tl.float32)


@triton.jit
def store_pairs(rows, x1, x2, mask, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    dtype = rows.dtype.element_ty
    if INTERLEAVED:
        cols = tl.arange(0, 2 * HALF)[None, :]
        x = tl.join(x1.to(dtype), x2.to(dtype)).reshape(x1.shape[0], 2 * HALF)
        tl.store(rows + cols, x, mask=mask & (cols < HEAD_DIM))
    else:
        cols = tl.arange(0, HALF)[None, :]
        inside = mask & (cols < HEAD_DIM // 2)
        tl.store(rows + cols, x1.to(dtype), mask=inside)
        tl.store(rows + HEAD_DIM // 2 + cols, x2.to(dtype), mask=inside)


@triton.jit
def load_tables(
    sin_ptr, cos_ptr, table, start, head, tokens, stride_b, stride_n, stride_h, mask,
    UNIT: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """sin1, sin2, cos1, cos2 [BLOCK_N, HALF] f32, of tokens that are counted from start."""
    at = rows(0, table, start, head, tokens, stride_b, stride_n, stride_h, UNIT)
    sin1, sin2 = load_pairs(sin_ptr + at, mask, HEAD_DIM, HALF, INTERLEAVED)
    cos1, cos2 = load_pairs(cos_ptr + at, mask, HEAD_DIM, HALF, INTERLEAVED)
    return sin1, sin2, cos1, cos2


@triton.jit
def rotate(x1, x2, sin1, sin2, cos1, cos2, TRANSPOSED: tl.constexpr):
    """-> x1 cos1 - x2 sin1 and x2 cos2 + x1 sin2, or transposed, which is the gradient."""
    if TRANSPOSED:
        sin_of_x2, sin_of_x1 = -sin2, -sin1
    else:
        sin_of_x2, sin_of_x1 = sin1, sin2
    return x1 * cos1 - x2 * sin_of_x2, x2 * cos2 + x1 * sin_of_x1
