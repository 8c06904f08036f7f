"""Norms of q and k over the head dimension (LayerNorm, Ba et al. 2016, as in Dehghani et al. 2023, arXiv:2302.05442;
RMSNorm, Zhang & Sennrich 2019, arXiv:1910.07467), with rotary positions R in the same pass. For x = q or k:

    x^ = (x - mean) * rstd, or x * rstd for RMSNorm            out = R (x^ * w + b)
    g = R^T dout,   h = g * w,   dx = rstd * (h - mean(h) - x^ * mean(h * x^)), or without mean(h)
    dw = sum(g * x^),   db = sum(g)                            over tokens and heads

Prefix tokens are normalised, but not rotated. A head is in registers as pairs of elements (_rotation.py): arithmetic is
float32, the variance is that of centred values, and the result is rounded once. The backward pass recomputes the
statistics instead of storing them, and reads x instead of recovering it from out, which is inexact for small weights.
The programs of a persistent grid keep sums over tokens, and column_sum.py adds them up in a fixed order: bitwise
reproducible, no atomics.
"""

import triton
import triton.language as tl

from fastvit.kernels import _profiling
from fastvit.kernels._rotation import load_pairs, load_tables, part, rotate, rows, share, store_pairs


@triton.jit
def _normalised(x1, x2, mask, eps, HEAD_DIM: tl.constexpr, RMS: tl.constexpr):
    """Return x^ as x1, x2, and rstd [BLOCK_N, 1]; zero in rows outside the mask, where eps = 0 would make rstd inf."""
    if not RMS:
        mean = tl.sum(x1 + x2, 1)[:, None] / HEAD_DIM
        inside = tl.arange(0, x1.shape[1])[None, :] < HEAD_DIM // 2
        x1, x2 = tl.where(inside, x1 - mean, 0.0), tl.where(inside, x2 - mean, 0.0)
    variance = tl.sum(x1 * x1 + x2 * x2, 1)[:, None] / HEAD_DIM
    rstd = tl.where(mask, tl.rsqrt(variance + eps), 0.0)
    return x1 * rstd, x2 * rstd, rstd


@triton.jit(
    do_not_specialize=["N", "P", "H", "steps", "tables", *[f"stride_{x}{i}" for x in "xt" for i in "bnh"]],
    launch_metadata=_profiling.rows("q_ptr", rows="N", columns="H"),
)
def qk_norm_fwd_kernel(
    # inputs
    q_ptr, k_ptr,  # [B, N, H, d] T, with the same strides
    q_weight_ptr, k_weight_ptr,  # [d]
    q_bias_ptr, k_bias_ptr,  # [d] or None
    sin_ptr, cos_ptr,  # [B, N - P, TABLE_HEADS, d] or None
    # outputs
    q_out_ptr, k_out_ptr,  # [B, N, H, d] T, contiguous
    # tokens, P of which are prefix; heads; steps of q; tables: B if each sample has one, otherwise 1
    N, P, H, steps, tables,
    # strides in UNITs of elements: batch, token, head; the last dimension is contiguous
    stride_xb, stride_xn, stride_xh,
    stride_tb, stride_tn, stride_th,
    eps: tl.float32,
    UNIT: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, TABLE_HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr, RMS: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A persistent grid: each program takes its share of all steps (_rotation.py), all of q or all of k."""
    is_q = tl.program_id(0) % 2 == 0
    x_ptr = tl.where(is_q, q_ptr, k_ptr)
    out_ptr = tl.where(is_q, q_out_ptr, k_out_ptr)
    w1, w2 = load_pairs(tl.where(is_q, q_weight_ptr, k_weight_ptr), True, HEAD_DIM, HALF, INTERLEAVED)
    if q_bias_ptr is not None:
        b1, b2 = load_pairs(tl.where(is_q, q_bias_ptr, k_bias_ptr), True, HEAD_DIM, HALF, INTERLEAVED)
    begin, end = share(steps, tl.program_id(0) // 2, tl.num_programs(0) // 2)
    blocks = tl.cdiv(N, BLOCK_N)
    per_block = steps // (blocks * tables)
    for block in range(begin // per_block, tl.cdiv(end, per_block)):
        table, start = block // blocks, block % blocks * BLOCK_N
        tokens = tl.arange(0, BLOCK_N)[:, None]  # [BLOCK_N, 1], counted from start
        within = tokens < N - start
        positioned = within & (tokens >= P - start)
        if sin_ptr is not None and TABLE_HEADS == 1:
            sin1, sin2, cos1, cos2 = load_tables(
                sin_ptr, cos_ptr, table, start - P, 0, tokens, stride_tb, stride_tn, stride_th, positioned,
                UNIT, HEAD_DIM, HALF, INTERLEAVED,
            )  # fmt: skip
        left, right = part(begin, end, block, per_block)
        left, right = left + table * H, right + table * H
        for sample in range(left // H, tl.cdiv(right, H)):
            first, stop = part(left, right, sample, H)
            x_rows = rows(x_ptr, sample, start, first, tokens, stride_xb, stride_xn, stride_xh, UNIT)
            out_rows = rows(out_ptr, sample, start, first, tokens, N * H, H, 1, HEAD_DIM)
            for i in tl.range(0, stop - first, num_stages=STAGES):
                here = x_rows + i * stride_xh.to(tl.int64) * UNIT
                x1, x2 = load_pairs(here, within, HEAD_DIM, HALF, INTERLEAVED)
                y1, y2, _ = _normalised(x1, x2, within, eps, HEAD_DIM, RMS)
                y1, y2 = y1 * w1, y2 * w2
                if q_bias_ptr is not None:
                    y1, y2 = y1 + b1, y2 + b2
                if sin_ptr is not None:
                    if TABLE_HEADS > 1:
                        head = (first + i) % TABLE_HEADS
                        sin1, sin2, cos1, cos2 = load_tables(
                            sin_ptr, cos_ptr, table, start - P, head, tokens, stride_tb, stride_tn, stride_th,
                            positioned, UNIT, HEAD_DIM, HALF, INTERLEAVED,
                        )  # fmt: skip
                    turned1, turned2 = rotate(y1, y2, sin1, sin2, cos1, cos2, False)
                    y1, y2 = tl.where(positioned, turned1, y1), tl.where(positioned, turned2, y2)
                store_pairs(out_rows + i * HEAD_DIM, y1, y2, within, HEAD_DIM, HALF, INTERLEAVED)


@triton.jit(
    do_not_specialize=["N", "P", "H", "steps", "tables", *[f"stride_{x}{i}" for x in "xydt" for i in "bnh"]],
    launch_metadata=_profiling.rows("q_ptr", rows="N", columns="H"),
)
def qk_norm_bwd_kernel(
    # inputs; q and k have the same strides, and so do their gradients
    dq_out_ptr, dk_out_ptr,  # [B, N, H, d] T
    q_ptr, k_ptr,  # [B, N, H, d] T
    q_weight_ptr, k_weight_ptr,  # [d]
    sin_ptr, cos_ptr,  # [B, N - P, TABLE_HEADS, d] or None
    # outputs
    dq_ptr, dk_ptr,  # [B, N, H, d] T; may be dq_out and dk_out themselves
    partial_ptr,  # [2 or 4, programs / 2, d] f32: sums for dw of q and of k, then for db with HAS_BIAS
    # tokens, P of which are prefix; heads; steps of q; tables: B if each sample has one, otherwise 1
    N, P, H, steps, tables,
    # strides in UNITs of elements: batch, token, head; the last dimension is contiguous
    stride_xb, stride_xn, stride_xh,
    stride_yb, stride_yn, stride_yh,
    stride_db, stride_dn, stride_dh,
    stride_tb, stride_tn, stride_th,
    eps: tl.float32,
    UNIT: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, TABLE_HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr, RMS: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid as in qk_norm_fwd_kernel; each program keeps the sums of its share."""
    which = tl.program_id(0) % 2
    programs = tl.num_programs(0) // 2
    is_q = which == 0
    x_ptr = tl.where(is_q, q_ptr, k_ptr)
    dy_ptr = tl.where(is_q, dq_out_ptr, dk_out_ptr)
    dx_ptr = tl.where(is_q, dq_ptr, dk_ptr)
    w1, w2 = load_pairs(tl.where(is_q, q_weight_ptr, k_weight_ptr), True, HEAD_DIM, HALF, INTERLEAVED)
    dw1 = tl.zeros([BLOCK_N, HALF], tl.float32)
    dw2, db1, db2 = dw1, dw1, dw1
    begin, end = share(steps, tl.program_id(0) // 2, programs)
    blocks = tl.cdiv(N, BLOCK_N)
    per_block = steps // (blocks * tables)
    for block in range(begin // per_block, tl.cdiv(end, per_block)):
        table, start = block // blocks, block % blocks * BLOCK_N
        tokens = tl.arange(0, BLOCK_N)[:, None]  # [BLOCK_N, 1], counted from start
        within = tokens < N - start
        positioned = within & (tokens >= P - start)
        if sin_ptr is not None and TABLE_HEADS == 1:
            sin1, sin2, cos1, cos2 = load_tables(
                sin_ptr, cos_ptr, table, start - P, 0, tokens, stride_tb, stride_tn, stride_th, positioned,
                UNIT, HEAD_DIM, HALF, INTERLEAVED,
            )  # fmt: skip
        left, right = part(begin, end, block, per_block)
        left, right = left + table * H, right + table * H
        for sample in range(left // H, tl.cdiv(right, H)):
            first, stop = part(left, right, sample, H)
            x_rows = rows(x_ptr, sample, start, first, tokens, stride_xb, stride_xn, stride_xh, UNIT)
            dy_rows = rows(dy_ptr, sample, start, first, tokens, stride_yb, stride_yn, stride_yh, UNIT)
            dx_rows = rows(dx_ptr, sample, start, first, tokens, stride_db, stride_dn, stride_dh, UNIT)
            for i in tl.range(0, stop - first, num_stages=STAGES):
                here = x_rows + i * stride_xh.to(tl.int64) * UNIT
                x1, x2 = load_pairs(here, within, HEAD_DIM, HALF, INTERLEAVED)
                here = dy_rows + i * stride_yh.to(tl.int64) * UNIT
                g1, g2 = load_pairs(here, within, HEAD_DIM, HALF, INTERLEAVED)
                if sin_ptr is not None:
                    if TABLE_HEADS > 1:
                        head = (first + i) % TABLE_HEADS
                        sin1, sin2, cos1, cos2 = load_tables(
                            sin_ptr, cos_ptr, table, start - P, head, tokens, stride_tb, stride_tn, stride_th,
                            positioned, UNIT, HEAD_DIM, HALF, INTERLEAVED,
                        )  # fmt: skip
                    turned1, turned2 = rotate(g1, g2, sin1, sin2, cos1, cos2, True)
                    g1, g2 = tl.where(positioned, turned1, g1), tl.where(positioned, turned2, g2)
                x1, x2, rstd = _normalised(x1, x2, within, eps, HEAD_DIM, RMS)
                dw1 += g1 * x1
                dw2 += g2 * x2
                if HAS_BIAS:
                    db1 += g1
                    db2 += g2
                g1, g2 = g1 * w1, g2 * w2
                mean_gx = tl.sum(g1 * x1 + g2 * x2, 1)[:, None] / HEAD_DIM
                d1, d2 = g1 - x1 * mean_gx, g2 - x2 * mean_gx
                if not RMS:
                    mean_g = tl.sum(g1 + g2, 1)[:, None] / HEAD_DIM
                    d1, d2 = d1 - mean_g, d2 - mean_g
                here = dx_rows + i * stride_dh.to(tl.int64) * UNIT
                store_pairs(here, d1 * rstd, d2 * rstd, within, HEAD_DIM, HALF, INTERLEAVED)
    partial = partial_ptr + (which * programs + tl.program_id(0) // 2).to(tl.int64) * HEAD_DIM
    store_pairs(partial, tl.sum(dw1, 0)[None, :], tl.sum(dw2, 0)[None, :], True, HEAD_DIM, HALF, INTERLEAVED)
    if HAS_BIAS:
        partial += 2 * programs.to(tl.int64) * HEAD_DIM
        store_pairs(partial, tl.sum(db1, 0)[None, :], tl.sum(db2, 0)[None, :], True, HEAD_DIM, HALF, INTERLEAVED)
