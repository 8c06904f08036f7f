"""Backward of softmax attention for short sequences: one program per head, five matmuls, no atomics.

The maths is that of attention_bwd.py. Q, dO, LSE and delta of a whole head stay on chip, with dQ in registers; the keys
pass by in tiles, and each tile's dK and dV are complete when it leaves. Every tensor crosses memory once.
"""

import triton
import triton.language as tl

from fastvit.kernels.attention import dot_parts, exponential, head_offset, load_parts, log_unit
from fastvit.kernels.attention_bwd import add_dot, dropout_factor, row_delta, store_parts, zero_parts

# From 3.9 on Triton keeps the addresses of wgmma's operands in registers, and 18 too many of them at 256 x 64 scores. P
# is then kept in 16 bits: a tenth more instructions, but no spills.
LEAN: tl.constexpr = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9))


@triton.jit
def _key_tile(
    q0, q1, do0, do1, lse2, delta, dq0, dq1,
    k_ptr, v_ptr, dk_ptr, dv_ptr, k_stride, v_stride, dk_stride, dv_stride,
    seed_ptr, rows, start, head, scale, dropout_p, N,
    D0: tl.constexpr, D1: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, TIGHT: tl.constexpr,
):  # fmt: skip
    """Writes dK and dV of BLOCK_N keys from index `start`; returns dQ with their part added. The order of the five
    matmuls is chosen: this one neither spills at 256 x 64 scores nor makes ptxas serialise the wgmma pipeline."""
    keys = tl.arange(0, BLOCK_N)
    left = N - start
    k0, k1 = load_parts(k_ptr + start * k_stride, keys, k_stride, left, D0, D1, HEAD_DIM, True)
    v0, v1 = load_parts(v_ptr + start * v_stride, keys, v_stride, left, D0, D1, HEAD_DIM, True)
    s = dot_parts(q0, q1, k0, k1, D1, PRECISION)
    exponent = s * (scale * log_unit(q0.dtype)) - lse2[:, None]
    if TIGHT:
        # keys beyond N are zero, so that what P is there adds nothing to dQ, as long as it is finite
        p = exponential(tl.minimum(exponent, 0.0), q0.dtype).to(q0.dtype)
    else:
        p = tl.where((keys < left)[None, :], exponential(exponent, q0.dtype), 0.0)
    factor = dropout_factor(seed_ptr, rows[:, None], (start + keys)[None, :], head, dropout_p)
    p_t = tl.trans((p * factor).to(do0.dtype))
    dp = dot_parts(do0, do1, v0, v1, D1, PRECISION)
    ds = (p * (dp * factor - delta[:, None])).to(q0.dtype)
    dq0, dq1 = add_dot(dq0, dq1, ds, k0, k1, D1, PRECISION)
    dv0, dv1 = zero_parts(BLOCK_N, D0, D1)
    dv0, dv1 = add_dot(dv0, dv1, p_t, do0, do1, D1, PRECISION)
    dk0, dk1 = zero_parts(BLOCK_N, D0, D1)
    dk0, dk1 = add_dot(dk0, dk1, tl.trans(ds), q0, q1, D1, PRECISION)
    store_parts(dv_ptr + start * dv_stride, dv0, dv1, keys, dv_stride, left, D0, D1, HEAD_DIM)
    store_parts(dk_ptr + start * dk_stride, dk0 * scale, dk1 * scale, keys, dk_stride, left, D0, D1, HEAD_DIM)
    return dq0, dq1


@triton.jit(do_not_specialize=["N", "H"])
def attention_bwd_short_kernel(
    # inputs
    q_ptr, k_ptr, v_ptr,  # [B, N, H, d] T
    o_ptr, do_ptr,  # [B, N, H, d] T
    lse_ptr,  # [B, H, N] f32
    seed_ptr,  # [1] i64, or None without dropout
    # outputs
    dq_ptr, dk_ptr, dv_ptr,  # [B, N, H, d] T
    N, H,
    q_stride_b, q_stride_n, q_stride_h,
    k_stride_b, k_stride_n, k_stride_h,
    v_stride_b, v_stride_n, v_stride_h,
    o_stride_b, o_stride_n, o_stride_h,
    do_stride_b, do_stride_n, do_stride_h,
    dq_stride_b, dq_stride_n, dq_stride_h,
    dk_stride_b, dk_stride_n, dk_stride_h,
    dv_stride_b, dv_stride_n, dv_stride_h,
    scale: tl.float32, dropout_p: tl.float32,
    D0: tl.constexpr, D1: tl.constexpr, HEAD_DIM: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (B * H,). Strides in units of UNIT elements; BLOCK_M >= N."""
    head = tl.program_id(0)
    rows = tl.arange(0, BLOCK_M)
    q_stride, k_stride, v_stride = q_stride_n * UNIT, k_stride_n * UNIT, v_stride_n * UNIT
    o_stride, do_stride, dq_stride = o_stride_n * UNIT, do_stride_n * UNIT, dq_stride_n * UNIT
    dk_stride, dv_stride = dk_stride_n * UNIT, dv_stride_n * UNIT
    q_ptr += head_offset(head, H, q_stride_b, q_stride_h, UNIT)
    k_ptr += head_offset(head, H, k_stride_b, k_stride_h, UNIT)
    v_ptr += head_offset(head, H, v_stride_b, v_stride_h, UNIT)
    o_ptr += head_offset(head, H, o_stride_b, o_stride_h, UNIT)
    do_ptr += head_offset(head, H, do_stride_b, do_stride_h, UNIT)
    dq_ptr += head_offset(head, H, dq_stride_b, dq_stride_h, UNIT)
    dk_ptr += head_offset(head, H, dk_stride_b, dk_stride_h, UNIT)
    dv_ptr += head_offset(head, H, dv_stride_b, dv_stride_h, UNIT)

    do0, do1 = load_parts(do_ptr, rows, do_stride, N, D0, D1, HEAD_DIM, True)
    o0, o1 = load_parts(o_ptr, rows, o_stride, N, D0, D1, HEAD_DIM, True)
    delta = row_delta(do0, do1, o0, o1, D1)
    q0, q1 = load_parts(q_ptr, rows, q_stride, N, D0, D1, HEAD_DIM, True)
    lse2 = tl.load(lse_ptr + head.to(tl.int64) * N + rows, mask=rows < N, other=float("inf")) * log_unit(
        q_ptr.dtype.element_ty
    )
    dq0, dq1 = zero_parts(BLOCK_M, D0, D1)
    TIGHT: tl.constexpr = LEAN and BLOCK_M == 256
    tl.assume(N > 0)
    for start in range(0, N, BLOCK_N):
        dq0, dq1 = _key_tile(
            q0, q1, do0, do1, lse2, delta, dq0, dq1,
            k_ptr, v_ptr, dk_ptr, dv_ptr, k_stride, v_stride, dk_stride, dv_stride,
            seed_ptr, rows, start, head, scale, dropout_p, N,
            D0, D1, HEAD_DIM, BLOCK_N, PRECISION, TIGHT,
        )  # fmt: skip
    store_parts(dq_ptr, dq0 * scale, dq1 * scale, rows, dq_stride, N, D0, D1, HEAD_DIM)
