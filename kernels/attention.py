"""Softmax attention, non-causal, without the N x N matrix in memory (Dao et al. 2022; online softmax: Milakov 2018).

    S = scale * Q K^T,   P = softmax(S),   O = dropout(P) V,   LSE = log(sum(exp(S)))      per batch and head

The kernel here loops over key tiles with a running maximum; short sequences have one of their own without it
(attention_short.py). Matmuls accumulate in float32; softmax and LSE (natural logarithm) are float32, P is rounded to
the tensors' dtype. A head dimension that is no power of two is cut in two, d = D0 + D1: both powers of two, D1 partly
masked, or 0. Every program writes its own rows: bitwise reproducible.

The helpers are shared with the short and the backward kernels.
"""

import triton
import triton.language as tl

from fastvit.kernels._math import keep_mask

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def head_offset(head, H, stride_b, stride_h, UNIT: tl.constexpr):
    """Elements from the start of a [B, N, H, d] tensor to head `head` of B * H, in int64. Strides come in UNITs of 8
    elements where all of them are multiples of 8 (the compiler then sees 16-byte alignment), else of 1."""
    head = head.to(tl.int64)
    return (head // H * stride_b + head % H * stride_h) * UNIT


@triton.jit
def load_tile(
    ptr,
    rows,
    stride,
    limit,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MASKED: tl.constexpr,
):
    """-> [rows, WIDTH], columns FIRST.. of the head at `ptr`; zero beyond HEAD_DIM and, if MASKED, from row `limit`.
    rows: int32 within the tile, ptr: of its first row, so that only the tile's start needs int64."""
    cols = FIRST + tl.arange(0, WIDTH)
    at = ptr + (rows[:, None] * stride + cols[None, :])
    if FIRST + WIDTH > HEAD_DIM:
        if MASKED:
            return tl.load(at, mask=(rows < limit)[:, None] & (cols < HEAD_DIM)[None, :], other=0.0)
        return tl.load(at, mask=(cols < HEAD_DIM)[None, :], other=0.0)
    if MASKED:
        return tl.load(at, mask=(rows < limit)[:, None], other=0.0)
    return tl.load(at)


@triton.jit
def store_tile(
    ptr,
    value,
    rows,
    stride,
    limit,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KEEP_MASK: tl.constexpr = False,
):
    """The counterpart of load_tile, with the conversion to the pointer's dtype; rows from `limit` on are left alone.
    rows: 0, 1, ... of the tile. KEEP_MASK: a load's mask of the same rows is kept for this store, through loops."""
    cols = FIRST + tl.arange(0, WIDTH)
    if not KEEP_MASK:
        limit = tl.minimum(limit, rows.shape[0])  # the same rows by another expression
    mask = (rows < limit)[:, None] & (cols < HEAD_DIM)[None, :]
    tl.store(ptr + rows[:, None] * stride + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def dot_parts(a0, a1, b0, b1, D1: tl.constexpr, PRECISION: tl.constexpr):
    """[M, d] x [N, d] -> a b^T [M, N] f32, summed over both parts of the head dimension."""
    s = tl.dot(a0, tl.trans(b0), input_precision=PRECISION)
    if D1 > 0:
        s = tl.dot(a1, tl.trans(b1), s, input_precision=PRECISION)
    return s


@triton.jit
def load_parts(
    ptr,
    rows,
    stride,
    limit,
    D0: tl.constexpr,
    D1: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Both parts of a tile's head dimension, [rows, D0] and [rows, D1]; the first one twice if D1 is 0."""
    part0 = load_tile(ptr, rows, stride, limit, 0, D0, HEAD_DIM, MASKED)
    if D1 > 0:
        part1 = load_tile(ptr, rows, stride, limit, D0, D1, HEAD_DIM, MASKED)
    else:
        part1 = part0
    return part0, part1


@triton.jit
def log_unit(dtype: tl.constexpr):
    """What the backward kernels multiply exponents with before `exponential`. Base 2 is one FMA and one instruction a
    score. At scores of hundreds, though, its rounding of LSE * log2 e shows in float32, which stays natural."""
    if dtype == tl.float32:
        return 1.0
    else:
        return LOG2E


@triton.jit
def exponential(x, dtype: tl.constexpr):
    """exp(x / log_unit(dtype))"""
    if dtype == tl.float32:
        return tl.exp(x)
    else:
        return tl.exp2(x)


@triton.jit
def scores(
    q0, q1, k_ptr, cols, stride_kn, limit,
    D0: tl.constexpr, D1: tl.constexpr, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """q [M, d] x the keys `cols` of the tile at k_ptr -> [M, cols] f32, unscaled; -inf from key `limit` if MASKED."""
    k0, k1 = load_parts(k_ptr, cols, stride_kn, limit, D0, D1, HEAD_DIM, MASKED)
    s = dot_parts(q0, q1, k0, k1, D1, PRECISION)
    if MASKED:
        s = tl.where((cols < limit)[None, :], s, float("-inf"))
    return s


@triton.jit
def add_values(
    acc0, acc1, p, v_ptr, cols, stride_vn, limit, seed_ptr, rows, first_col, head, dropout_p,
    D0: tl.constexpr, D1: tl.constexpr, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    STEP: tl.constexpr = False
):  # fmt: skip
    """acc + dropout(p) [M, cols] x the values `cols` of the tile at v_ptr, in both parts of the head dimension. STEP:
    they pass through registers first. TF32's wgmma wants them transposed, and a loop that prefetches them straight into
    that order would do so 4 bytes at a time."""
    if seed_ptr is not None:
        keep = keep_mask(tl.load(seed_ptr), rows[:, None], (first_col + cols)[None, :], head, dropout_p)
        p = tl.where(keep, p, 0.0)
    v0, v1 = load_parts(v_ptr, cols, stride_vn, limit, D0, D1, HEAD_DIM, MASKED)
    if STEP:  # adding 0 is a step that no compiler drops: it would turn -0 into 0
        v0 += 0.0
        v1 += 0.0
    p = p.to(v0.dtype)
    acc0 = tl.dot(p, v0, acc0, input_precision=PRECISION)
    if D1 > 0:
        acc1 = tl.dot(p, v1, acc1, input_precision=PRECISION)
    return acc0, acc1


@triton.jit
def _online_step(
    acc0, acc1, m, total, q0, q1, k_ptr, v_ptr, first_col, stride_kn, stride_vn, N,
    scale2, seed_ptr, rows, head, dropout_p,
    WIDTH: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, HEAD_DIM: tl.constexpr,
    MASKED: tl.constexpr, FIRST: tl.constexpr, PRECISION: tl.constexpr,
    STEP: tl.constexpr = False
):  # fmt: skip
    """WIDTH more keys, from k_ptr and v_ptr: updates the running maximum m of the unscaled scores and the running sum
    [M], and the accumulators [M, d]. first_col: the first key's index. FIRST: there is nothing to rescale yet."""
    cols = tl.arange(0, WIDTH)
    limit = N - first_col
    s = scores(q0, q1, k_ptr, cols, stride_kn, limit, D0, D1, HEAD_DIM, MASKED, PRECISION)
    m_new = tl.max(s, 1) if FIRST else tl.maximum(m, tl.max(s, 1))
    p = tl.exp2(s * scale2 - (m_new * scale2)[:, None])
    if FIRST:
        total = tl.sum(p, 1)
    else:
        rescale = tl.exp2((m - m_new) * scale2)
        total = total * rescale + tl.sum(p, 1)
        acc0 *= rescale[:, None]
        if D1 > 0:
            acc1 *= rescale[:, None]
    acc0, acc1 = add_values(
        acc0, acc1, p, v_ptr, cols, stride_vn, limit, seed_ptr, rows, first_col, head, dropout_p,
        D0, D1, HEAD_DIM, MASKED, PRECISION, STEP
    )  # fmt: skip
    return acc0, acc1, m_new, total


@triton.jit
def finish(
    acc0, acc1, m, total, scale, o_ptr, lse_ptr, first_row, rows, N, H, head, has_dropout: tl.constexpr, dropout_p,
    D0: tl.constexpr, D1: tl.constexpr, HEAD_DIM: tl.constexpr
):  # fmt: skip
    """o = acc / total into [B, N, H, d], and LSE into [B, H, N]. m: the maximum of the unscaled scores."""
    norm = 1.0 / total
    if has_dropout:
        norm = norm / (1.0 - dropout_p)
    batch_row = (head // H).to(tl.int64) * N + first_row
    o_ptr += (batch_row * H + head % H) * HEAD_DIM
    stride = H * HEAD_DIM
    limit = N - first_row
    store_tile(o_ptr, acc0 * norm[:, None], rows, stride, limit, 0, D0, HEAD_DIM)
    if D1 > 0:
        store_tile(o_ptr, acc1 * norm[:, None], rows, stride, limit, D0, D1, HEAD_DIM)
    tl.store(lse_ptr + head.to(tl.int64) * N + first_row + rows, m * scale + tl.log2(total) * LN2, mask=rows < limit)


@triton.jit(do_not_specialize=["N", "H"])
def attention_fwd_kernel(
    # inputs
    q_ptr,  # [B, N, H, d] T by stride; likewise k, v
    k_ptr,
    v_ptr,
    seed_ptr,  # [1] int64, or None: no dropout
    # outputs
    o_ptr,  # [B, N, H, d] T, contiguous
    lse_ptr,  # [B, H, N] f32
    # sizes; strides in UNITs of elements, the last dimension is contiguous
    N,
    H,
    stride_qb,
    stride_qn,
    stride_qh,
    stride_kb,
    stride_kn,
    stride_kh,
    stride_vb,
    stride_vn,
    stride_vh,
    scale: tl.float32,  # > 0
    dropout_p: tl.float32,
    UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FULL: tl.constexpr,  # N >= BLOCK_N: there are full tiles
    TAIL_0: tl.constexpr,  # keys behind the last full tile, in up to two narrower ones; 0: none
    TAIL_1: tl.constexpr,
    PRECISION: tl.constexpr,
    VALUES_STEP: tl.constexpr,  # STEP of add_values, in the loop
):
    """One program: BLOCK_M rows of one head, all keys. Only the last key tile is masked."""
    tiles = tl.cdiv(N, BLOCK_M)
    head = tl.program_id(0) // tiles
    first_row = tl.program_id(0) % tiles * BLOCK_M
    stride_qn = stride_qn * UNIT
    stride_kn = stride_kn * UNIT
    stride_vn = stride_vn * UNIT
    q_ptr += head_offset(head, H, stride_qb, stride_qh, UNIT) + first_row.to(tl.int64) * stride_qn
    k_ptr += head_offset(head, H, stride_kb, stride_kh, UNIT)
    v_ptr += head_offset(head, H, stride_vb, stride_vh, UNIT)

    rows = tl.arange(0, BLOCK_M)
    q0, q1 = load_parts(q_ptr, rows, stride_qn, N - first_row, D0, D1, HEAD_DIM, True)
    acc0 = tl.zeros([BLOCK_M, D0], tl.float32)
    acc1 = tl.zeros([BLOCK_M, D1 if D1 > 0 else 1], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    scale2 = scale * LOG2E
    # The narrow tiles come first, and the loop surely runs. Behind a loop, and where it might be skipped, accumulators
    # are moved: up to 30 registers more, and ptxas may wait for every wgmma.
    full = N // BLOCK_N * BLOCK_N
    if TAIL_0 > 0:
        k_tail = k_ptr + tl.cast(stride_kn, tl.int64) * full
        v_tail = v_ptr + tl.cast(stride_vn, tl.int64) * full
        acc0, acc1, m, total = _online_step(
            acc0, acc1, m, total, q0, q1, k_tail, v_tail, full, stride_kn, stride_vn, N,
            scale2, seed_ptr, first_row + rows, head, dropout_p, TAIL_0, D0, D1, HEAD_DIM, TAIL_1 == 0, True, PRECISION
        )  # fmt: skip
        if TAIL_1 > 0:
            k_tail += TAIL_0 * stride_kn
            v_tail += TAIL_0 * stride_vn
            acc0, acc1, m, total = _online_step(
                acc0, acc1, m, total, q0, q1, k_tail, v_tail, full + TAIL_0, stride_kn, stride_vn, N,
                scale2, seed_ptr, first_row + rows, head, dropout_p, TAIL_1, D0, D1, HEAD_DIM, True, False, PRECISION
            )  # fmt: skip
    if FULL:
        if q_ptr.dtype.element_ty != tl.float32:  # whose operands, in registers, would spill
            tl.assume(full > 0)
        for start in tl.range(0, full, BLOCK_N):
            acc0, acc1, m, total = _online_step(
                acc0, acc1, m, total, q0, q1, k_ptr, v_ptr, start, stride_kn, stride_vn, N,
                scale2, seed_ptr, first_row + rows, head, dropout_p, BLOCK_N, D0, D1, HEAD_DIM, False, False, PRECISION,
                VALUES_STEP
            )  # fmt: skip
            k_ptr += BLOCK_N * stride_kn
            v_ptr += BLOCK_N * stride_vn
    finish(
        acc0, acc1, m, total, scale, o_ptr, lse_ptr, first_row, rows, N, H, head, seed_ptr is not None, dropout_p,
        D0, D1, HEAD_DIM
    )  # fmt: skip
