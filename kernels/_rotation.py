"""Rotary positions (Su et al. 2021, arXiv:2104.09864): a head as pairs of elements that are rotated together, and the
order in which the programs of a persistent grid take the heads. A pair is an element of each half of the head or, if
INTERLEAVED, an even element and the next one. HALF is the number of pairs, padded to a power of two.

A step is BLOCK_N tokens of one head of one sample. Steps that share rows of a sin/cos table follow one another, sample
by sample and head by head, so that a program loads these rows once for all of them, unless each head has a table of its
own. There is one table for all samples, or one for each:

    for block in range(begin // per_block, tl.cdiv(end, per_block)):    begin, end = share(...)
        table, start = block // blocks, block % blocks * BLOCK_N        per_block = steps // (blocks * tables)
        for sample in range(left // H, tl.cdiv(right, H)):              left, right = part(begin, end, block, per_block)
            for i in range(stop - first):                               first, stop = part(left, right, sample, H)
"""

import triton
import triton.language as tl


@triton.jit
def share(steps, program, programs):
    """Return the first step of a program and the one after its last."""
    each = tl.cdiv(steps, programs)
    return program * each, tl.minimum((program + 1) * each, steps)


@triton.jit
def part(begin, end, i, size):
    """Return the bounds of what [begin, end) has in the i-th piece of `size`, counted from the piece's start."""
    return tl.maximum(begin - i * size, 0), tl.minimum(end - i * size, size)


@triton.jit
def rows(ptr, sample, start, head, tokens, stride_b, stride_n, stride_h, UNIT: tl.constexpr):
    """Return pointers [BLOCK_N, 1] to a head of `tokens`, which count from start. Strides are in UNITs of elements."""
    at = tl.cast(sample, tl.int64) * stride_b + tl.cast(start, tl.int64) * stride_n + tl.cast(head, tl.int64) * stride_h
    return ptr + at * UNIT + tokens * (stride_n * UNIT)


@triton.jit
def load_pairs(rows, mask, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Load x1, x2 [BLOCK_N, HALF] f32, zero outside head and mask. rows: pointers [BLOCK_N, 1] to first elements."""
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
    """Store x1, x2 [BLOCK_N, HALF] in the dtype of `rows`. The counterpart of `load_pairs`."""
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
    """Load sin1, sin2, cos1, cos2 [BLOCK_N, HALF] f32 of `tokens`, which count from start."""
    at = rows(0, table, start, head, tokens, stride_b, stride_n, stride_h, UNIT)
    sin1, sin2 = load_pairs(sin_ptr + at, mask, HEAD_DIM, HALF, INTERLEAVED)
    cos1, cos2 = load_pairs(cos_ptr + at, mask, HEAD_DIM, HALF, INTERLEAVED)
    return sin1, sin2, cos1, cos2


@triton.jit
def rotate(x1, x2, sin1, sin2, cos1, cos2, TRANSPOSED: tl.constexpr):
    """Return x1 cos1 - x2 sin1 and x2 cos2 + x1 sin2. TRANSPOSED: x1 cos1 + x2 sin2 and x2 cos2 - x1 sin1, which is
    the gradient."""
    if TRANSPOSED:
        sin_of_x2, sin_of_x1 = -sin2, -sin1
    else:
        sin_of_x2, sin_of_x1 = sin1, sin2
    return x1 * cos1 - x2 * sin_of_x2, x2 * cos2 + x1 * sin_of_x1
