"""Backward of softmax attention in two kernels, without the N x N matrix in memory or atomics (Dao et al. 2022).

    S = scale * Q K^T,   P = exp(S - LSE),   P~ = dropout(P),   O = P~ V          recomputed tile by tile
    dV = P~^T dO,   dP = dropout(dO V^T),   dS = P * (dP - delta),   delta = rowsum(dO * O)
    dQ = scale * dS K,   dK = scale * dS^T Q

`attention_bwd_dq_kernel` owns query rows: it computes delta, loops over key tiles, and leaves (LSE * log2 e, delta) for
`attention_bwd_dkdv_kernel`, which owns keys and loops over query tiles with the scores transposed, so that P~^T and
dS^T are already where the tensor cores want them. Short sequences have a kernel of their own (attention_bwd_short.py).

Queries beyond N get LSE = inf, so P = 0; keys beyond N are masked in the last key tile only. The last tile has its own
size (TAIL, 0 if the tiles fit), and comes before the loop over full ones (FULL, if there are any), as in the
forward kernel, but for tiles that would spill registers so. Sums are float32; P and dS are rounded to T.
"""

import triton
import triton.language as tl

from fastvit.kernels._math import keep_mask
from fastvit.kernels.attention import dot_parts, exponential, head_offset, load_parts, log_unit, store_tile


@triton.jit
def zero_parts(ROWS: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr):
    """float32 accumulators [ROWS, D0] and [ROWS, D1]; the first one twice if D1 is 0."""
    part0 = tl.zeros([ROWS, D0], tl.float32)
    if D1 > 0:
        part1 = tl.zeros([ROWS, D1], tl.float32)
    else:
        part1 = part0
    return part0, part1


@triton.jit
def add_dot(acc0, acc1, a, b0, b1, D1: tl.constexpr, PRECISION: tl.constexpr):
    """acc [M, d] += a [M, N] b [N, d], both parts of the head dimension."""
    acc0 = tl.dot(a, b0, acc0, input_precision=PRECISION)
    if D1 > 0:
        acc1 = tl.dot(a, b1, acc1, input_precision=PRECISION)
    return acc0, acc1


@triton.jit
def store_parts(
    ptr,
    value0,
    value1,
    rows,
    stride,
    limit,
    D0: tl.constexpr,
    D1: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KEEP_MASK: tl.constexpr = False,
):
    store_tile(ptr, value0, rows, stride, limit, 0, D0, HEAD_DIM, KEEP_MASK)
    if D1 > 0:
        store_tile(ptr, value1, rows, stride, limit, D0, D1, HEAD_DIM, KEEP_MASK)


@triton.jit
def row_delta(do0, do1, o0, o1, D1: tl.constexpr):
    """rowsum(dO * O), [rows] f32"""
    delta = tl.sum(do0.to(tl.float32) * o0.to(tl.float32), 1)
    if D1 > 0:
        delta += tl.sum(do1.to(tl.float32) * o1.to(tl.float32), 1)
    return delta


@triton.jit
def dropout_factor(seed_ptr, rows, cols, head, dropout_p):
    """What the forward multiplied P with at query indices `rows` and key indices `cols`, which broadcast: 0 or
    1 / (1 - dropout_p); 1 without a seed."""
    if seed_ptr is not None:
        keep = keep_mask(tl.load(seed_ptr), rows, cols, head, dropout_p)
        return tl.where(keep, 1.0 / (1.0 - dropout_p), 0.0)
    else:
        return 1.0


@triton.jit
def _dq_step(
    q0, q1, do0, do1, lse2, delta, dq0, dq1,
    k_ptr, v_ptr, k_stride, v_stride, seed_ptr, rows, start, head, scale2, dropout_p, N,
    D0: tl.constexpr, D1: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ += dS K for BLOCK_N keys from index `start`, which is where k_ptr and v_ptr point."""
    keys = tl.arange(0, BLOCK_N)
    k0, k1 = load_parts(k_ptr, keys, k_stride, N - start, D0, D1, HEAD_DIM, MASKED)
    v0, v1 = load_parts(v_ptr, keys, v_stride, N - start, D0, D1, HEAD_DIM, MASKED)
    s = dot_parts(q0, q1, k0, k1, D1, PRECISION)
    dp = dot_parts(do0, do1, v0, v1, D1, PRECISION)
    p = exponential(s * scale2 - lse2[:, None], q0.dtype)
    if MASKED:
        p = tl.where((keys < N - start)[None, :], p, 0.0)
    factor = dropout_factor(seed_ptr, rows[:, None], (start + keys)[None, :], head, dropout_p)
    ds = p * (dp * factor - delta[:, None])
    return add_dot(dq0, dq1, ds.to(k0.dtype), k0, k1, D1, PRECISION)


@triton.jit(do_not_specialize=["N", "H"])
def attention_bwd_dq_kernel(
    # inputs
    q_ptr, k_ptr, v_ptr,  # [B, N, H, d] T
    o_ptr, do_ptr,  # [B, N, H, d] T
    lse_ptr,  # [B, H, N] f32
    seed_ptr,  # [1] i64, or None without dropout
    # outputs
    dq_ptr,  # [B, N, H, d] T
    lse2_ptr, delta_ptr,  # [B, H, N] f32: LSE * log_unit, rowsum(dO * O)
    N, H,
    q_stride_b, q_stride_n, q_stride_h,
    k_stride_b, k_stride_n, k_stride_h,
    v_stride_b, v_stride_n, v_stride_h,
    o_stride_b, o_stride_n, o_stride_h,
    do_stride_b, do_stride_n, do_stride_h,
    dq_stride_b, dq_stride_n, dq_stride_h,
    scale: tl.float32, dropout_p: tl.float32,
    D0: tl.constexpr, D1: tl.constexpr, HEAD_DIM: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FULL: tl.constexpr, TAIL: tl.constexpr,
    RELOAD: tl.constexpr, KEEP_MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (B * H * cdiv(N, BLOCK_M),). Strides in units of UNIT elements; FULL: N >= BLOCK_N; TAIL >= N % BLOCK_N.
    RELOAD reads q and do in every step: for matmuls that take operands from registers, which cannot hold the tiles.
    KEEP_MASK: see store_tile."""
    tiles = tl.cdiv(N, BLOCK_M)
    head = tl.program_id(0) // tiles
    first = tl.program_id(0) % tiles * BLOCK_M
    tile = tl.arange(0, BLOCK_M)
    left = N - first
    q_stride, k_stride, v_stride = q_stride_n * UNIT, k_stride_n * UNIT, v_stride_n * UNIT
    o_stride, do_stride, dq_stride = o_stride_n * UNIT, do_stride_n * UNIT, dq_stride_n * UNIT
    q_ptr += head_offset(head, H, q_stride_b, q_stride_h, UNIT) + first.to(tl.int64) * q_stride
    o_ptr += head_offset(head, H, o_stride_b, o_stride_h, UNIT) + first.to(tl.int64) * o_stride
    do_ptr += head_offset(head, H, do_stride_b, do_stride_h, UNIT) + first.to(tl.int64) * do_stride
    dq_ptr += head_offset(head, H, dq_stride_b, dq_stride_h, UNIT) + first.to(tl.int64) * dq_stride
    k_ptr += head_offset(head, H, k_stride_b, k_stride_h, UNIT)
    v_ptr += head_offset(head, H, v_stride_b, v_stride_h, UNIT)
    row = head.to(tl.int64) * N + first

    do0, do1 = load_parts(do_ptr, tile, do_stride, left, D0, D1, HEAD_DIM, True)
    o0, o1 = load_parts(o_ptr, tile, o_stride, left, D0, D1, HEAD_DIM, True)
    delta = row_delta(do0, do1, o0, o1, D1)
    lse2 = tl.load(lse_ptr + row + tile, mask=tile < left, other=float("inf")) * log_unit(q_ptr.dtype.element_ty)
    tl.store(delta_ptr + row + tile, delta, mask=tile < left)
    tl.store(lse2_ptr + row + tile, lse2, mask=tile < left)

    q0, q1 = load_parts(q_ptr, tile, q_stride, left, D0, D1, HEAD_DIM, True)
    dq0, dq1 = zero_parts(BLOCK_M, D0, D1)
    rows = first + tile
    scale2 = scale * log_unit(q_ptr.dtype.element_ty)
    full = N // BLOCK_N * BLOCK_N
    if TAIL > 0:
        dq0, dq1 = _dq_step(
            q0, q1, do0, do1, lse2, delta, dq0, dq1,
            k_ptr + tl.cast(k_stride, tl.int64) * full, v_ptr + tl.cast(v_stride, tl.int64) * full,
            k_stride, v_stride, seed_ptr, rows, full, head, scale2, dropout_p, N,
            D0, D1, HEAD_DIM, TAIL, True, PRECISION,
        )  # fmt: skip
    if FULL:
        tl.assume(full > 0)
        for start in range(0, full, BLOCK_N):
            if RELOAD:
                q0, q1 = load_parts(q_ptr, tile, q_stride, left, D0, D1, HEAD_DIM, True)
                do0, do1 = load_parts(do_ptr, tile, do_stride, left, D0, D1, HEAD_DIM, True)
            dq0, dq1 = _dq_step(
                q0, q1, do0, do1, lse2, delta, dq0, dq1,
                k_ptr, v_ptr, k_stride, v_stride, seed_ptr, rows, start, head, scale2, dropout_p, N,
                D0, D1, HEAD_DIM, BLOCK_N, False, PRECISION,
            )  # fmt: skip
            k_ptr += tl.cast(k_stride, tl.int64) * BLOCK_N
            v_ptr += tl.cast(v_stride, tl.int64) * BLOCK_N
    store_parts(dq_ptr, dq0 * scale, dq1 * scale, tile, dq_stride, left, D0, D1, HEAD_DIM, KEEP_MASK)


@triton.jit
def _dkdv_step(
    k0, k1, v0, v1, dk0, dk1, dv0, dv1,
    q_ptr, do_ptr, lse2_ptr, delta_ptr, q_stride, do_stride, seed_ptr, start, keys, head, scale2, dropout_p, N,
    D0: tl.constexpr, D1: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dV += P~^T dO, dK += dS^T Q for BLOCK_M queries from index `start`, which is where the pointers point."""
    rows = tl.arange(0, BLOCK_M)
    q0, q1 = load_parts(q_ptr, rows, q_stride, N - start, D0, D1, HEAD_DIM, MASKED)
    do0, do1 = load_parts(do_ptr, rows, do_stride, N - start, D0, D1, HEAD_DIM, MASKED)
    if MASKED:
        lse2 = tl.load(lse2_ptr + rows, mask=rows < N - start, other=float("inf"))
        delta = tl.load(delta_ptr + rows, mask=rows < N - start, other=0.0)
    else:
        lse2 = tl.load(lse2_ptr + rows)
        delta = tl.load(delta_ptr + rows)
    s = dot_parts(k0, k1, q0, q1, D1, PRECISION)  # [BLOCK_N, BLOCK_M], transposed
    p = exponential(s * scale2 - lse2[None, :], q0.dtype)
    dp = dot_parts(v0, v1, do0, do1, D1, PRECISION)
    factor = dropout_factor(seed_ptr, (start + rows)[None, :], keys[:, None], head, dropout_p)
    dv0, dv1 = add_dot(dv0, dv1, (p * factor).to(do0.dtype), do0, do1, D1, PRECISION)
    ds = p * (dp * factor - delta[None, :])
    dk0, dk1 = add_dot(dk0, dk1, ds.to(q0.dtype), q0, q1, D1, PRECISION)
    return dk0, dk1, dv0, dv1


@triton.jit(do_not_specialize=["N", "H"])
def attention_bwd_dkdv_kernel(
    # inputs
    q_ptr, k_ptr, v_ptr,  # [B, N, H, d] T
    do_ptr,  # [B, N, H, d] T
    lse2_ptr, delta_ptr,  # [B, H, N] f32, of attention_bwd_dq_kernel
    seed_ptr,  # [1] i64, or None without dropout
    # outputs
    dk_ptr, dv_ptr,  # [B, N, H, d] T
    N, H,
    q_stride_b, q_stride_n, q_stride_h,
    k_stride_b, k_stride_n, k_stride_h,
    v_stride_b, v_stride_n, v_stride_h,
    do_stride_b, do_stride_n, do_stride_h,
    dk_stride_b, dk_stride_n, dk_stride_h,
    dv_stride_b, dv_stride_n, dv_stride_h,
    scale: tl.float32, dropout_p: tl.float32,
    D0: tl.constexpr, D1: tl.constexpr, HEAD_DIM: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FULL: tl.constexpr, TAIL: tl.constexpr,
    RELOAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (B * H * cdiv(N, BLOCK_N),). Strides in units of UNIT elements; FULL: N >= BLOCK_M; TAIL >= N % BLOCK_M.
    RELOAD as above, of k and v. Keys beyond N need no mask: each has its own row of dK and dV, which is not stored."""
    tiles = tl.cdiv(N, BLOCK_N)
    head = tl.program_id(0) // tiles
    first = tl.program_id(0) % tiles * BLOCK_N
    tile = tl.arange(0, BLOCK_N)
    left = N - first
    q_stride, k_stride, v_stride = q_stride_n * UNIT, k_stride_n * UNIT, v_stride_n * UNIT
    do_stride, dk_stride, dv_stride = do_stride_n * UNIT, dk_stride_n * UNIT, dv_stride_n * UNIT
    k_ptr += head_offset(head, H, k_stride_b, k_stride_h, UNIT) + first.to(tl.int64) * k_stride
    v_ptr += head_offset(head, H, v_stride_b, v_stride_h, UNIT) + first.to(tl.int64) * v_stride
    dk_ptr += head_offset(head, H, dk_stride_b, dk_stride_h, UNIT) + first.to(tl.int64) * dk_stride
    dv_ptr += head_offset(head, H, dv_stride_b, dv_stride_h, UNIT) + first.to(tl.int64) * dv_stride
    q_ptr += head_offset(head, H, q_stride_b, q_stride_h, UNIT)
    do_ptr += head_offset(head, H, do_stride_b, do_stride_h, UNIT)
    lse2_ptr += head.to(tl.int64) * N
    delta_ptr += head.to(tl.int64) * N

    k0, k1 = load_parts(k_ptr, tile, k_stride, left, D0, D1, HEAD_DIM, True)
    v0, v1 = load_parts(v_ptr, tile, v_stride, left, D0, D1, HEAD_DIM, True)
    dk0, dk1 = zero_parts(BLOCK_N, D0, D1)
    dv0, dv1 = zero_parts(BLOCK_N, D0, D1)
    keys = first + tile
    scale2 = scale * log_unit(q_ptr.dtype.element_ty)
    full = N // BLOCK_M * BLOCK_M
    # wgmma's widest tiles fill the registers, and take more of them if the tail comes first, if the loop surely runs,
    # or if anything is moved out of it; operands that are loaded again fill them if the loop surely runs
    WIDE: tl.constexpr = D0 + D1 > 128 and BLOCK_M > 16
    if TAIL > 0 and not WIDE:
        dk0, dk1, dv0, dv1 = _dkdv_step(
            k0, k1, v0, v1, dk0, dk1, dv0, dv1,
            q_ptr + tl.cast(q_stride, tl.int64) * full, do_ptr + tl.cast(do_stride, tl.int64) * full,
            lse2_ptr + full, delta_ptr + full, q_stride, do_stride, seed_ptr, full, keys, head, scale2, dropout_p, N,
            D0, D1, HEAD_DIM, TAIL, True, PRECISION,
        )  # fmt: skip
    if FULL:
        if not WIDE and not RELOAD:
            tl.assume(full > 0)
        for start in tl.range(0, full, BLOCK_M, disable_licm=WIDE):
            if RELOAD:
                k0, k1 = load_parts(k_ptr, tile, k_stride, left, D0, D1, HEAD_DIM, True)
                v0, v1 = load_parts(v_ptr, tile, v_stride, left, D0, D1, HEAD_DIM, True)
            dk0, dk1, dv0, dv1 = _dkdv_step(
                k0, k1, v0, v1, dk0, dk1, dv0, dv1,
                q_ptr, do_ptr, lse2_ptr, delta_ptr, q_stride, do_stride, seed_ptr, start, keys, head,
                scale2, dropout_p, N,
                D0, D1, HEAD_DIM, BLOCK_M, False, PRECISION,
            )  # fmt: skip
            q_ptr += tl.cast(q_stride, tl.int64) * BLOCK_M
            do_ptr += tl.cast(do_stride, tl.int64) * BLOCK_M
            lse2_ptr += BLOCK_M
            delta_ptr += BLOCK_M
    if TAIL > 0 and WIDE:
        if full < N:  # always
            dk0, dk1, dv0, dv1 = _dkdv_step(
                k0, k1, v0, v1, dk0, dk1, dv0, dv1,
                q_ptr, do_ptr, lse2_ptr, delta_ptr, q_stride, do_stride, seed_ptr, full, keys, head,
                scale2, dropout_p, N,
                D0, D1, HEAD_DIM, TAIL, True, PRECISION,
            )  # fmt: skip
    store_parts(dk_ptr, dk0 * scale, dk1 * scale, tile, dk_stride, left, D0, D1, HEAD_DIM)
    store_parts(dv_ptr, dv0, dv1, tile, dv_stride, left, D0, D1, HEAD_DIM)
