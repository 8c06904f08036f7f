"""Heads as pairs of elements that are rotated together (Su et al. 2021, arXiv:2104.09864): their two halves or, if
interleaved, their even and odd elements."""

import triton
import triton.language as tl


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
def rotate(x1, x2, sin1, sin2, cos1, cos2, TRANSPOSED: tl.constexpr):
    """-> x1 cos1 - x2 sin1 and x2 cos2 + x1 sin2, or transposed, which is the gradient."""
    if TRANSPOSED:
        sin_of_x2, sin_of_x1 = -sin2, -sin1
    else:
        sin_of_x2, sin_of_x1 = sin1, sin2
    return x1 * cos1 - x2 * sin_of_x2, x2 * cos2 + x1 * sin_of_x1
