"""Backward of softmax attention, dK and dV. Equations and conventions: attention_bwd_dq.py.

    dV = P~^T dO,   dK = scale * dS^T Q

A program owns keys and loops over query tiles with the scores transposed, so that P~^T and dS^T are already in the
layout that the tensor cores want. It goes through all heads of queries that share its keys, one after another: bitwise
reproducible, no atomics.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from fastvit.kernels import _profiling
from fastvit.kernels._softmax import (
    NOT_SPECIALIZED,
    Mask,
    Softmax,
    Tiles,
    dropout_factor,
    is_added,
    masked,
    probabilities,
    statistics_of,
)
from fastvit.kernels._tiles import (
    Head,
    Rows,
    Tokens,
    Windows,
    across,
    add_dot,
    dot,
    fill_gaps,
    load,
    rows_of,
    scaled,
    skip,
    span_of_program,
    store,
    window_of_program,
    zeros,
)


class QueryRows(NamedTuple):
    """A tile of queries in memory: its rows of q and dO, and a pointer to the LSE of its first row. delta follows N
    elements later, and with an additive mask the maximum after another N."""

    q: Rows
    do: Rows
    lse_ptr: tl.tensor


@triton.jit
def _statistics(lse_ptr, N, softmax, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Load LSE, delta and, with an additive mask, the maximum [WIDTH] of queries that all exist.

    They are loaded as one tile [WIDTH, COLUMNS] with several copies of each number, so that every thread loads one
    element. If a load has fewer elements than there are threads, Triton 3.6 gives it the layout of the scores: 24
    copies per thread and tile.
    """
    column = tl.arange(0, COLUMNS)[None, :]
    which = column % 2
    if is_added(softmax.mask):
        which = tl.where(column % 4 == 2, 2, which)
    found = tl.load(lse_ptr + (which * N + tl.arange(0, WIDTH)[:, None]))
    if COLUMNS >= 16:
        found = _halves(found)[0]
    if COLUMNS >= 8:
        found = _halves(found)[0]
    left, right = _halves(found)
    lse, delta = left.split()
    return lse, delta, right.split()[0]


@triton.jit
def _halves(x):
    """Return the left and the right half of the columns."""
    return x.reshape(x.shape[0], 2, x.shape[1] // 2).permute(0, 2, 1).split()


@triton.jit
def _dkdv_step(
    dk, dv, k, v, queries, start, at, at_keys, softmax, head,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dK + dS^T Q and dV + P~^T dO for WIDTH queries from index `start`. at: the queries. Keys after the last one need
    no mask: each has its own row of dK and dV, which is not stored."""
    index = tl.arange(0, WIDTH)
    left = at.N - start
    q, do = load(queries.q, index, left, head, MASKED), load(queries.do, index, left, head, MASKED)
    if MASKED:
        none = 0.0 if is_added(softmax.mask) else float("inf")
        lse = tl.load(queries.lse_ptr + index, mask=index < left, other=none)
        delta = tl.load(queries.lse_ptr + at.N + index, mask=index < left, other=0.0)
        top = lse
        if is_added(softmax.mask):
            top = tl.load(queries.lse_ptr + 2 * at.N + index, mask=index < left, other=float("inf"))
    else:
        lse, delta, top = _statistics(queries.lse_ptr, at.N, softmax, WIDTH, COLUMNS)
    s = dot(k, q, head)  # [keys, queries]
    keys = tl.arange(0, s.shape[0])[:, None]
    s = masked(s, softmax, index[None, :], start, keys, at_keys.first, at, at_keys, True)
    p = probabilities(s, top[None, :], lse[None, :], keys, at_keys.N, softmax, False, q[0].dtype)
    dp = dot(v, do, head)
    dropped = dropout_factor((start + index)[None, :], at_keys.first + keys, at, softmax)
    dv = add_dot(dv, (p * dropped).to(do[0].dtype), do, head)
    ds = p * (dp * dropped - delta[None, :])
    return add_dot(dk, ds.to(q[0].dtype), q, head), dv


@triton.jit
def _add_queries(dk, dv, k, v, q, do, statistics_ptr, at, at_keys, softmax, head, tiles, COLUMNS: tl.constexpr):
    """Return dk and dv with the contributions of all queries of one head added, except those that see no key of the
    program's."""
    lse_ptr = statistics_of(statistics_ptr, at, softmax)
    count = at.N
    if softmax.EMPTY:
        count = tl.maximum(count, 1)
    full = (count - 1) // tiles.BLOCK_M * tiles.BLOCK_M
    queries = QueryRows(rows_of(q, at, full), rows_of(do, at, full), lse_ptr + full)
    dk, dv = _dkdv_step(dk, dv, k, v, queries, full, at, at_keys, softmax, head, tiles.TAIL_0, 0, True)
    if tiles.LOOP:
        if tiles.SURELY:
            tl.assume(full > 0)
        first = 0
        if softmax.CAUSAL:
            first = at_keys.first // tiles.BLOCK_M * tiles.BLOCK_M
        queries = QueryRows(rows_of(q, at, first), rows_of(do, at, first), lse_ptr + first)
        for start in range(first, full, tiles.BLOCK_M):
            dk, dv = _dkdv_step(dk, dv, k, v, queries, start, at, at_keys, softmax, head, tiles.BLOCK_M, COLUMNS, False)
            queries = QueryRows(
                skip(queries.q, tiles.BLOCK_M),
                skip(queries.do, tiles.BLOCK_M),
                queries.lse_ptr + tiles.BLOCK_M,
            )
    return dk, dv


@triton.jit
def _dkdv(
    q, k, v, do, dk, dv, statistics_ptr, at, N, tokens, cu_seqlens_ptr, softmax, head, tiles, H,
    GROUP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute dK and dV of BLOCK_N keys, which GROUP of the H heads of queries share. N, tokens, cu_seqlens_ptr: of the
    queries, as in `across`."""
    index = tl.arange(0, tiles.BLOCK_N)
    left = at.N - at.first
    keys = load(rows_of(k, at, at.first), index, left, head, True)
    values = load(rows_of(v, at, at.first), index, left, head, True)
    dk_total, dv_total = zeros(tiles.BLOCK_N, head), zeros(tiles.BLOCK_N, head)
    if GROUP == 1:
        at_queries = at if N is None else across(at, at.head, H, N, tokens, cu_seqlens_ptr)
        dk_total, dv_total = _add_queries(
            dk_total, dv_total, keys, values, q, do, statistics_ptr, at_queries, at, softmax, head, tiles, COLUMNS
        )
    else:
        for i in range(GROUP):
            at_queries = across(at, at.head * GROUP + i, H, N, tokens, cu_seqlens_ptr)
            dk_total, dv_total = _add_queries(
                dk_total, dv_total, keys, values, q, do, statistics_ptr, at_queries, at, softmax, head, tiles, COLUMNS
            )
    if softmax.EMPTY:
        too_long = across(at, 0, H, N, tokens, cu_seqlens_ptr).N < 0  # the forward kernel did not take these queries
        gap = tl.where(too_long, float("nan"), 0.0)
        dk_total = dk_total[0] + gap, dk_total[1] + gap
        dv_total = dv_total[0] + gap, dv_total[1] + gap
    store(rows_of(dk, at, at.first), scaled(dk_total, softmax.scale, head), index, left, head)
    store(rows_of(dv, at, at.first), dv_total, index, left, head)


@triton.jit(do_not_specialize=NOT_SPECIALIZED, launch_metadata=_profiling.attention(4))
def attention_bwd_dkdv_kernel(
    # inputs
    q_ptr, k_ptr, v_ptr, do_ptr,  # [B, N, H, d] T by stride; k and v have H / GROUP heads, and N_k tokens
    statistics_ptr,  # [B, H, 2 or 3, N] f32, from attention_bwd_dq_kernel
    mask_ptr,  # [B, H, N, N_k] bool or float by stride, or None
    cu_seqlens_ptr,  # [B + 1] int32 or int64: bounds of packed sequences of at most N tokens; None: samples of N
    cu_seqlens_k_ptr,  # the same of k and v; None: as of q, or samples
    seed_ptr,  # [1] int64, or None: no dropout
    # outputs
    dk_ptr, dv_ptr,  # [B, N_k, H / GROUP, d] T by stride
    # sizes. N_k: None if k has as many tokens as q. tokens: of all packed sequences, or of a grid; tokens_k: the same
    # of k, or None
    N, N_k, H, tokens, tokens_k,
    grid_h, grid_w, window_w, shift_h, shift_w,  # `Windows`; None: samples are sequences
    shift_bias,  # of `Softmax`, a float or None
    # strides in UNITs of elements, the last dimension is contiguous
    stride_qb, stride_qn, stride_qh,
    stride_kb, stride_kn, stride_kh,
    stride_vb, stride_vn, stride_vh,
    stride_dob, stride_don, stride_doh,
    stride_dkb, stride_dkn, stride_dkh,
    stride_dvb, stride_dvn, stride_dvh,
    stride_maskb, stride_maskn, stride_maskh,  # in units of 16 elements
    scale: tl.float32,  # > 0
    dropout_p: tl.float32,
    UNIT: tl.constexpr, MASK_ROWS: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LOOP: tl.constexpr, TAIL: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid: as in `span_of_program`, with blocks of BLOCK_N keys and H / GROUP heads. LOOP, TAIL: `Tiles` along the
    queries. COLUMNS: of `_statistics`, 4, 8 or 16."""
    if N_k is None:
        keys, tokens_of_keys, ends = N, tokens, cu_seqlens_ptr
    else:
        keys, tokens_of_keys, ends = N_k, tokens_k, cu_seqlens_k_ptr
    if grid_h is None:
        at = span_of_program(keys, H // GROUP, tokens_of_keys, ends, BLOCK_N)
    else:
        at = window_of_program(N, H, Windows(grid_h, grid_w, window_w, shift_h, shift_w), BLOCK_N)
    if cu_seqlens_ptr is not None:
        fill_gaps(
            Tokens(dk_ptr, stride_dkb, stride_dkn, stride_dkh, UNIT),
            at, keys, H // GROUP, tokens_of_keys, ends, Head(HEAD_DIM, D0, D1, PRECISION), BLOCK_N,
        )  # fmt: skip
        fill_gaps(
            Tokens(dv_ptr, stride_dvb, stride_dvn, stride_dvh, UNIT),
            at, keys, H // GROUP, tokens_of_keys, ends, Head(HEAD_DIM, D0, D1, PRECISION), BLOCK_N,
        )  # fmt: skip
        if at.first >= at.N:
            return
    _dkdv(
        Tokens(q_ptr, stride_qb, stride_qn, stride_qh, UNIT),
        Tokens(k_ptr, stride_kb, stride_kn, stride_kh, UNIT),
        Tokens(v_ptr, stride_vb, stride_vn, stride_vh, UNIT),
        Tokens(do_ptr, stride_dob, stride_don, stride_doh, UNIT),
        Tokens(dk_ptr, stride_dkb, stride_dkn, stride_dkh, UNIT),
        Tokens(dv_ptr, stride_dvb, stride_dvn, stride_dvh, UNIT),
        statistics_ptr,
        at,
        None if N_k is None else N,
        tokens,
        cu_seqlens_ptr,
        Softmax(
            scale,
            Mask(mask_ptr, stride_maskb, stride_maskn, stride_maskh),
            MASK_ROWS,
            CAUSAL,
            cu_seqlens_k_ptr is not None,
            shift_bias,
            seed_ptr,
            dropout_p,
        ),
        Head(HEAD_DIM, D0, D1, PRECISION),
        Tiles(BLOCK_M, BLOCK_N, LOOP, TAIL, 0, cu_seqlens_ptr is None and not CAUSAL),
        H,
        GROUP,
        COLUMNS,
    )
