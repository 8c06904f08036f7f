"""Backward of softmax attention, the gradient of an additive mask. Equations and conventions: attention_bwd_dq.py.

    dmask = sum of dS over the samples and heads that share the mask

A program owns a tile of the gradient and adds up dS of the samples and heads that share it, in float32 and in their
order. Where one program per tile would leave most of a GPU idle, several programs take a share of them each, and
column_sum.py adds up their partial sums: bitwise reproducible, no atomics, and no other dS in memory.
"""

import triton
import triton.language as tl

from fastvit.kernels import _profiling
from fastvit.kernels._softmax import (
    NOT_SPECIALIZED,
    Mask,
    Softmax,
    dropout_factor,
    masked,
    probabilities,
    statistics_of,
)
from fastvit.kernels._tiles import Head, Span, Tokens, Windows, across, dot, in_window, load, rows_of


@triton.jit
def _ds(q, k, v, do, statistics_ptr, at, at_keys, first, softmax, head, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Compute dS [BLOCK_M queries, BLOCK_N keys from index `first`] of one head. at_keys: all keys."""
    rows, keys = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    rows_left, left = at.N - at.first, at_keys.N - first
    queries = load(rows_of(q, at, at.first), rows, rows_left, head, True)
    do = load(rows_of(do, at, at.first), rows, rows_left, head, True)
    k = load(rows_of(k, at_keys, first), keys, left, head, True)
    v = load(rows_of(v, at_keys, first), keys, left, head, True)
    lse_ptr = statistics_of(statistics_ptr, at, softmax) + at.first + rows
    lse = tl.load(lse_ptr, mask=rows < rows_left, other=0.0)
    delta = tl.load(lse_ptr + at.N, mask=rows < rows_left, other=0.0)
    top = tl.load(lse_ptr + 2 * at.N, mask=rows < rows_left, other=float("inf"))
    s = masked(dot(queries, k, head), softmax, rows[:, None], at.first, keys[None, :], first, at, at_keys, True)
    p = probabilities(s, top[:, None], lse[:, None], keys[None, :], left, softmax, True, k[0].dtype)
    dropped = dropout_factor((at.first + rows)[:, None], (first + keys)[None, :], at, softmax)
    return p * (dot(do, v, head) * dropped - delta[:, None])


@triton.jit
def _dmask(
    q, k, v, do, statistics_ptr, dmask_ptr, N, N_k, H, samples, mask_heads, planes, share, windows, softmax, head,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute a tile of the gradient, or of one of the partial sums."""
    keys_in_all = N if N_k is None else N_k
    rows, columns = tl.cdiv(N, BLOCK_M), tl.cdiv(keys_in_all, BLOCK_N)
    out = tl.program_id(0) // (rows * columns)
    first_query = tl.program_id(0) // columns % rows * BLOCK_M
    first_key = tl.program_id(0) % columns * BLOCK_N
    plane = out % planes
    sharing = H // mask_heads  # heads of a sample: 1 or all
    start = out // planes * share
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i in range(start, tl.minimum(start + share, samples * sharing)):
        sample, of_sample = plane // mask_heads + i // sharing, plane % mask_heads + i % sharing
        if windows.grid_h is None:
            in_batch = sample * H + of_sample
            before, rows_before = sample.to(tl.int64) * N, in_batch.to(tl.int64) * N
            at = Span(sample, of_sample, in_batch, first_query, N, 0, before, rows_before)
        else:
            # those that share a mask are as far apart as there are masks, one for all windows or one for each
            sequence = plane // mask_heads + i // sharing * (planes // mask_heads)
            at = in_window(sequence, of_sample, first_query, N, H, windows)
        at_keys = across(at, of_sample // GROUP, H // GROUP, N_k, 0, None)
        total += _ds(q, k, v, do, statistics_ptr, at, at_keys, first_key, softmax, head, BLOCK_M, BLOCK_N)
    queries = tl.arange(0, BLOCK_M)[:, None]
    keys = tl.arange(0, BLOCK_N)[None, :]
    width = tl.cdiv(keys_in_all, 16) * 16
    tile = dmask_ptr + (out.to(tl.int64) * N + first_query) * width + first_key
    # rows are padded, as a mask's are
    inside = (queries < N - first_query) & (keys // 16 * 16 < keys_in_all - first_key)
    tl.store(tile + (queries * width + keys), total.to(dmask_ptr.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize=[*NOT_SPECIALIZED, "samples", "mask_heads", "planes", "share"],
    launch_metadata=_profiling.attention(2),
)
def attention_bwd_mask_kernel(
    # inputs
    q_ptr, k_ptr, v_ptr, do_ptr,  # [B, N, H, d] T by stride; k and v have H / GROUP heads, and N_k tokens
    statistics_ptr,  # [B, H, 3, N] f32, from attention_bwd_dq_kernel
    mask_ptr,  # [B, H, N, N_k] float by stride
    seed_ptr,  # [1] int64, or None: no dropout
    # output
    dmask_ptr,  # [cdiv(samples * H / mask_heads, share), planes, N, cdiv(N_k, 16) * 16]: rows are padded as a mask's
    # sizes. N_k: None if k has as many tokens as q; samples: how many share a mask, B or 1; mask_heads: H or 1; planes:
    # B / samples * mask_heads; share: how many of the samples * H / mask_heads that share a plane one program adds up.
    # Windows count as samples, B is the windows of all, and a mask is of one window of each sample or of all windows
    N, N_k, H, samples, mask_heads, planes, share,
    grid_h, grid_w, window_w, shift_h, shift_w,  # `Windows`; None: samples are sequences
    shift_bias,  # of `Softmax`, a float or None
    # strides in UNITs of elements, the last dimension is contiguous
    stride_qb, stride_qn, stride_qh,
    stride_kb, stride_kn, stride_kh,
    stride_vb, stride_vn, stride_vh,
    stride_dob, stride_don, stride_doh,
    stride_maskb, stride_maskn, stride_maskh,  # in units of 16 elements
    scale: tl.float32,  # > 0
    dropout_p: tl.float32,
    UNIT: tl.constexpr, MASK_ROWS: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program computes a BLOCK_M x BLOCK_N tile of dmask; grid: planes of dmask x row tiles x column tiles,
    flattened."""
    _dmask(
        Tokens(q_ptr, stride_qb, stride_qn, stride_qh, UNIT),
        Tokens(k_ptr, stride_kb, stride_kn, stride_kh, UNIT),
        Tokens(v_ptr, stride_vb, stride_vn, stride_vh, UNIT),
        Tokens(do_ptr, stride_dob, stride_don, stride_doh, UNIT),
        statistics_ptr,
        dmask_ptr,
        N, N_k, H, samples, mask_heads, planes, share,
        Windows(grid_h, grid_w, window_w, shift_h, shift_w),
        Softmax(
            scale, Mask(mask_ptr, stride_maskb, stride_maskn, stride_maskh), MASK_ROWS, CAUSAL, False, shift_bias,
            seed_ptr, dropout_p,
        ),
        Head(HEAD_DIM, D0, D1, PRECISION),
        GROUP, BLOCK_M, BLOCK_N,
    )  # fmt: skip
