"""Softmax attention over short sequences, forward: the equations and conventions of attention.py.

A program holds the scores of its rows against all keys at once, so that the softmax needs neither a running maximum
nor a rescale. The keys come in up to three power-of-two chunks, falling in size (197 = 128 + 64 + 16 less 11), so that
few scores are padding, and only the last chunk is masked.
"""

import triton
import triton.language as tl

from fastvit.kernels.attention import LOG2E, add_values, finish, head_offset, load_parts, scores


@triton.jit(do_not_specialize=["N", "H"])
def attention_short_fwd_kernel(
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
    KEYS_0: tl.constexpr,  # chunks of keys, together >= N; 0: none
    KEYS_1: tl.constexpr,
    KEYS_2: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: BLOCK_M rows of one head, all keys."""
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
    cols0 = tl.arange(0, KEYS_0)
    s0 = scores(q0, q1, k_ptr, cols0, stride_kn, N, D0, D1, HEAD_DIM, KEYS_1 == 0, PRECISION)
    m = tl.max(s0, 1)
    if KEYS_1 > 0:
        cols1 = KEYS_0 + tl.arange(0, KEYS_1)
        s1 = scores(q0, q1, k_ptr, cols1, stride_kn, N, D0, D1, HEAD_DIM, KEYS_2 == 0, PRECISION)
        m = tl.maximum(m, tl.max(s1, 1))
    if KEYS_2 > 0:
        cols2 = KEYS_0 + KEYS_1 + tl.arange(0, KEYS_2)
        s2 = scores(q0, q1, k_ptr, cols2, stride_kn, N, D0, D1, HEAD_DIM, True, PRECISION)
        m = tl.maximum(m, tl.max(s2, 1))

    scale2 = scale * LOG2E
    shift = (m * scale2)[:, None]
    acc0 = tl.zeros([BLOCK_M, D0], tl.float32)
    acc1 = tl.zeros([BLOCK_M, D1 if D1 > 0 else 1], tl.float32)
    p0 = tl.exp2(s0 * scale2 - shift)
    total = tl.sum(p0, 1)
    acc0, acc1 = add_values(
        acc0, acc1, p0, v_ptr, cols0, stride_vn, N, seed_ptr, first_row + rows, 0, head, dropout_p,
        D0, D1, HEAD_DIM, KEYS_1 == 0, PRECISION
    )  # fmt: skip
    if KEYS_1 > 0:
        p1 = tl.exp2(s1 * scale2 - shift)
        total += tl.sum(p1, 1)
        acc0, acc1 = add_values(
            acc0, acc1, p1, v_ptr, cols1, stride_vn, N, seed_ptr, first_row + rows, 0, head, dropout_p,
            D0, D1, HEAD_DIM, KEYS_2 == 0, PRECISION
        )  # fmt: skip
    if KEYS_2 > 0:
        p2 = tl.exp2(s2 * scale2 - shift)
        total += tl.sum(p2, 1)
        acc0, acc1 = add_values(
            acc0, acc1, p2, v_ptr, cols2, stride_vn, N, seed_ptr, first_row + rows, 0, head, dropout_p,
            D0, D1, HEAD_DIM, True, PRECISION
        )  # fmt: skip
    finish(
        acc0, acc1, m, total, scale, o_ptr, lse_ptr, first_row, rows, N, H, head, seed_ptr is not None, dropout_p,
        D0, D1, HEAD_DIM
    )  # fmt: skip
