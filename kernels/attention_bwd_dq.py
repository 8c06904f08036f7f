"""Backward of softmax attention in two kernels, dQ first, without the N x N matrix in memory (Dao et al. 2022), and
without atomics.

    S = scale * Q K^T + mask,   P = exp(S - LSE),   P~ = dropout(P),   O = P~ V          recomputed tile by tile
    dV = P~^T dO,   dP = dropout(dO V^T),   dS = P * (dP - delta),   delta = rowsum(dO * O)
    dQ = scale * dS K,   dK = scale * dS^T Q                          dmask = dS: attention_bwd_mask.py

The kernel here owns queries: it computes delta, loops over key tiles, and leaves LSE and delta for the kernel of dK and
dV (attention_bwd_dkdv.py). Short sequences have a kernel of their own (attention_bwd_short.py).

Queries beyond N get LSE = inf, so P = 0; keys beyond N are masked in the last key tile only. As in the forward kernel
the narrow last tile comes before the loop over full ones. Sums are float32; P and dS are rounded to T. Every program
writes rows of its own: bitwise reproducible.
"""

import triton
import triton.language as tl

from fastvit.kernels import _profiling
from fastvit.kernels._softmax import (
    NOT_SPECIALIZED,
    Inputs,
    Mask,
    Softmax,
    Tiles,
    dropout_factor,
    is_added,
    keys_seen,
    load_queries,
    masked,
    probabilities,
    statistics_of,
)
from fastvit.kernels._tiles import (
    Head,
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


@triton.jit
def _dq_step(dq, queries, k, v, start, at, at_keys, softmax, head, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """Return dq + dS K over WIDTH keys from index `start`, where k and v begin."""
    keys = tl.arange(0, WIDTH)
    left = at_keys.N - start
    k, v = load(k, keys, left, head, MASKED), load(v, keys, left, head, MASKED)
    s, dp = dot(queries.q, k, head), dot(queries.do, v, head)
    rows = tl.arange(0, s.shape[0])[:, None]
    s = masked(s, softmax, rows, at.first, keys[None, :], start, at, at_keys, MASKED)
    p = probabilities(s, queries.top[:, None], queries.lse[:, None], keys[None, :], left, softmax, MASKED, k[0].dtype)
    dropped = dropout_factor(at.first + rows, (start + keys)[None, :], at, softmax)
    ds = p * (dp * dropped - queries.delta[:, None])
    return add_dot(dq, ds.to(k[0].dtype), k, head)


@triton.jit
def _dq(x, dq, lse_ptr, statistics_ptr, at, at_keys, softmax, head, tiles):
    """Compute dQ of BLOCK_M queries, and store their statistics. at_keys: the keys."""
    queries = load_queries(x, lse_ptr, at, softmax, head, tiles.BLOCK_M)
    index = tl.arange(0, tiles.BLOCK_M)
    left = at.N - at.first
    statistics = statistics_of(statistics_ptr, at, softmax) + at.first + index
    tl.store(statistics, queries.lse, mask=index < left)
    tl.store(statistics + at.N, queries.delta, mask=index < left)
    if is_added(softmax.mask):
        tl.store(statistics + 2 * at.N, queries.top, mask=index < left)

    total = zeros(tiles.BLOCK_M, head)
    full = (keys_seen(at, at_keys, softmax, tiles.BLOCK_M) - 1) // tiles.BLOCK_N * tiles.BLOCK_N
    k, v = rows_of(x.k, at_keys, full), rows_of(x.v, at_keys, full)
    total = _dq_step(total, queries, k, v, full, at, at_keys, softmax, head, tiles.TAIL_0, True)
    if tiles.LOOP:
        if tiles.SURELY:
            tl.assume(full > 0)
        k, v = rows_of(x.k, at_keys, 0), rows_of(x.v, at_keys, 0)
        for start in range(0, full, tiles.BLOCK_N):
            total = _dq_step(total, queries, k, v, start, at, at_keys, softmax, head, tiles.BLOCK_N, False)
            k, v = skip(k, tiles.BLOCK_N), skip(v, tiles.BLOCK_N)
    store(rows_of(dq, at, at.first), scaled(total, softmax.scale, head), index, left, head)


@triton.jit(do_not_specialize=NOT_SPECIALIZED, launch_metadata=_profiling.attention(3))
def attention_bwd_dq_kernel(
    # inputs
    q_ptr, k_ptr, v_ptr, o_ptr, do_ptr,  # [B, N, H, d] T by stride; k and v have H / GROUP heads, and N_k tokens
    lse_ptr,  # [B, H, N] f32, or [H, N] per packed sequence; [B, H, 2, N] with an additive mask
    mask_ptr,  # [B, H, N, N_k] bool or float by stride, or None
    cu_seqlens_ptr,  # [B + 1] int32 or int64: bounds of packed sequences of at most N tokens; None: samples of N
    cu_seqlens_k_ptr,  # the same of k and v; None: as of q, or samples
    seed_ptr,  # [1] int64, or None: no dropout
    # outputs
    dq_ptr,  # [B, N, H, d] T by stride
    statistics_ptr,  # [B, H, 2 or 3, N] f32, or [H, 2 or 3, N] per packed sequence: `statistics_of`
    # sizes. N_k: None if k has as many tokens as q. tokens: of all packed sequences, or of a grid; tokens_k: the same
    # of k, or None
    N, N_k, H, tokens, tokens_k,
    grid_h, grid_w, window_w, shift_h, shift_w,  # `Windows`; None: samples are sequences
    shift_bias,  # of `Softmax`, a float or None
    # strides in UNITs of elements, the last dimension is contiguous
    stride_qb, stride_qn, stride_qh,
    stride_kb, stride_kn, stride_kh,
    stride_vb, stride_vn, stride_vh,
    stride_ob, stride_on, stride_oh,
    stride_dob, stride_don, stride_doh,
    stride_dqb, stride_dqn, stride_dqh,
    stride_maskb, stride_maskn, stride_maskh,  # in units of 16 elements
    scale: tl.float32,  # > 0
    dropout_p: tl.float32,
    UNIT: tl.constexpr, MASK_ROWS: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LOOP: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Grid: as in `span_of_program`, with blocks of BLOCK_M queries. LOOP, TAIL: `Tiles` along the keys."""
    if grid_h is None:
        at = span_of_program(N, H, tokens, cu_seqlens_ptr, BLOCK_M)
    else:
        at = window_of_program(N, H, Windows(grid_h, grid_w, window_w, shift_h, shift_w), BLOCK_M)
    if cu_seqlens_ptr is not None:
        fill_gaps(
            Tokens(dq_ptr, stride_dqb, stride_dqn, stride_dqh, UNIT),
            at, N, H, tokens, cu_seqlens_ptr, Head(HEAD_DIM, D0, D1, PRECISION), BLOCK_M,
        )  # fmt: skip
        if at.first >= at.N:
            return
    _dq(
        Inputs(
            Tokens(q_ptr, stride_qb, stride_qn, stride_qh, UNIT),
            Tokens(k_ptr, stride_kb, stride_kn, stride_kh, UNIT),
            Tokens(v_ptr, stride_vb, stride_vn, stride_vh, UNIT),
            Tokens(o_ptr, stride_ob, stride_on, stride_oh, UNIT),
            Tokens(do_ptr, stride_dob, stride_don, stride_doh, UNIT),
        ),
        Tokens(dq_ptr, stride_dqb, stride_dqn, stride_dqh, UNIT),
        lse_ptr,
        statistics_ptr,
        at,
        across(at, at.head // GROUP, H // GROUP, N_k, tokens_k, cu_seqlens_k_ptr),
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
    )
