"""Backward of softmax attention in two kernels, dQ first, without the N x N matrix in memory (Dao et al. 2022), and
without atomics.

    S = scale * Q K^T + mask,   P = exp(S - LSE),   P~ = dropout(P),   O = P~ V          recomputed tile by tile
    dV = P~^T dO,   dP = dropout(dO V^T),   dS = P * (dP - delta),   delta = rowsum(dO * O)
    dQ = scale * dS K,   dK = scale * dS^T Q                          dmask = dS: attention_bwd_mask.py

The kernel here owns queries: it computes delta, loops over key tiles, and leaves LSE and delta for that of dK and dV
(attention_bwd_dkdv.py). Short sequences have a kernel of their own (attention_bwd_short.py).

Queries beyond N get LSE = inf, so P = 0; keys beyond N are masked in the last key tile only. As in the forward kernel
the narrow last tile comes before the loop over full ones. Sums are float32; P and dS are rounded to T.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from fastvit.kernels import _profiling
from fastvit.kernels._math import keep_mask
from fastvit.kernels._tiles import (
    Head,
    Tokens,
    add_dot,
    dot,
    fill_gaps,
    load,
    of_head,
    place,
    rows_of,
    scaled,
    skip,
    store,
    zeros,
)
from fastvit.kernels.attention import NOT_SPECIALIZED, Mask, Softmax, Tiles, factor, is_added, log2e, masked


class Inputs(NamedTuple):
    q: Tokens
    k: Tokens
    v: Tokens
    o: Tokens
    do: Tokens


class Queries(NamedTuple):
    """A tile of queries: q and dO as parts; LSE * log_unit and delta [M] f32. With a mask that is added, top is the
    maximum of the scores, and lse what `probabilities` makes P of with it; else top is not read."""

    q: tuple
    do: tuple
    top: tl.tensor
    lse: tl.tensor
    delta: tl.tensor


@triton.jit
def log_unit(T: tl.constexpr):
    """What exponents are multiplied with before `exponential`. Base 2 is one FMA and one instruction a score. At scores
    of hundreds, though, its rounding of LSE * log2 e shows in float32, which stays natural."""
    if T == tl.float32:
        return 1.0
    else:
        return log2e()


@triton.jit
def exponential(x, T: tl.constexpr):
    """exp(x / log_unit(T))"""
    if T == tl.float32:
        return tl.exp(x)
    else:
        return tl.exp2(x)


@triton.jit
def probabilities(s, top, lse, keys, limit, softmax, MASKED: tl.constexpr, T: tl.constexpr):
    """P = exp(S - LSE) again of what `masked` returns, the counterpart of `scores` in attention.py. top and lse as in
    `Queries`; they and keys broadcast against s, which may be transposed.

    MASKED: keys from `limit` on do not exist, and their rows of K and V are zeros. With a mask that is added their P is
    0, else a number from 0 to 1, which is as good: it is multiplied with zeros, or is of a row that is not stored. To
    compare an exponent with 0 takes one instruction a score and no register, to compare a key with N both.
    """
    if is_added(softmax.mask):
        if T == tl.float32:
            p = tl.exp(s - top) * lse
        else:
            p = tl.exp2((s - top) * log2e() - lse)
        if MASKED:
            p = tl.where(keys < limit, p, 0.0)
    else:
        exponent = s * (factor(softmax) * log_unit(T)) - lse
        if MASKED:
            exponent = tl.minimum(exponent, 0.0, propagate_nan=tl.PropagateNan.ALL)
        p = exponential(exponent, T)
    return p


@triton.jit
def dropout_factor(queries, keys, at, softmax):
    """What the forward multiplied P with at these indices, which broadcast: 0 or 1 / (1 - p); 1 without dropout."""
    if softmax.seed_ptr is not None:
        keep = keep_mask(tl.load(softmax.seed_ptr), queries, keys, at.plane, softmax.dropout_p)
        return tl.where(keep, 1.0 / (1.0 - softmax.dropout_p), 0.0)
    else:
        return 1.0


@triton.jit
def load_queries(x, lse_ptr, at, softmax, head, BLOCK: tl.constexpr):
    """The BLOCK queries that a program owns, delta computed, from inputs x and LSE as the forward left it."""
    index = tl.arange(0, BLOCK)
    left = at.N - at.first
    do = load(rows_of(x.do, at, at.first), index, left, head, True)
    o = load(rows_of(x.o, at, at.first), index, left, head, True)
    delta = tl.sum(do[0].to(tl.float32) * o[0].to(tl.float32), 1)
    if head.D1 > 0:
        delta += tl.sum(do[1].to(tl.float32) * o[1].to(tl.float32), 1)
    if is_added(softmax.mask):
        at_top = lse_ptr + 2 * at.rows + at.first + index
        top = tl.load(at_top, mask=index < left, other=float("inf"))
        total = tl.load(at_top + at.N, mask=index < left, other=float("inf"))
        lse = 1.0 / total if do[0].dtype == tl.float32 else tl.log2(total)
    else:
        lse = tl.load(lse_ptr + at.rows + at.first + index, mask=index < left, other=float("inf"))
        lse *= log_unit(do[0].dtype)
        top = lse
    q = load(rows_of(x.q, at, at.first), index, left, head, True)
    return Queries(q, do, top, lse, delta)


@triton.jit
def statistics_of(statistics_ptr, at, softmax):
    """Where those of a head begin, for dK and dV: lse and delta of `Queries`; top, too, with a mask that is added."""
    if is_added(softmax.mask):
        return statistics_ptr + 3 * at.rows
    else:
        return statistics_ptr + 2 * at.rows


@triton.jit
def _dq_step(dq, queries, k, v, start, at, softmax, head, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """dQ + dS K for WIDTH keys from index `start`, where k and v begin."""
    keys = tl.arange(0, WIDTH)
    left = at.N - start
    k, v = load(k, keys, left, head, MASKED), load(v, keys, left, head, MASKED)
    s, dp = dot(queries.q, k, head), dot(queries.do, v, head)
    rows = tl.arange(0, s.shape[0])[:, None]
    s = masked(s, softmax, rows, at.first, keys[None, :], start, at, MASKED)
    p = probabilities(s, queries.top[:, None], queries.lse[:, None], keys[None, :], left, softmax, MASKED, k[0].dtype)
    dropped = dropout_factor(at.first + rows, (start + keys)[None, :], at, softmax)
    ds = p * (dp * dropped - queries.delta[:, None])
    return add_dot(dq, ds.to(k[0].dtype), k, head)


@triton.jit
def _dq(x, dq, lse_ptr, statistics_ptr, at, at_keys, softmax, head, tiles):
    """dQ of BLOCK_M queries, and their statistics. Keys are of the head of at_keys."""
    queries = load_queries(x, lse_ptr, at, softmax, head, tiles.BLOCK_M)
    index = tl.arange(0, tiles.BLOCK_M)
    left = at.N - at.first
    statistics = statistics_of(statistics_ptr, at, softmax) + at.first + index
    tl.store(statistics, queries.lse, mask=index < left)
    tl.store(statistics + at.N, queries.delta, mask=index < left)
    if is_added(softmax.mask):
        tl.store(statistics + 2 * at.N, queries.top, mask=index < left)

    total = zeros(tiles.BLOCK_M, head)
    full = (at.N - 1) // tiles.BLOCK_N * tiles.BLOCK_N
    k, v = rows_of(x.k, at_keys, full), rows_of(x.v, at_keys, full)
    total = _dq_step(total, queries, k, v, full, at, softmax, head, tiles.TAIL_0, True)
    if tiles.LOOP:
        if tiles.SURELY:
            tl.assume(full > 0)
        k, v = rows_of(x.k, at_keys, 0), rows_of(x.v, at_keys, 0)
        for start in range(0, full, tiles.BLOCK_N):
            total = _dq_step(total, queries, k, v, start, at, softmax, head, tiles.BLOCK_N, False)
            k, v = skip(k, tiles.BLOCK_N), skip(v, tiles.BLOCK_N)
    store(rows_of(dq, at, at.first), scaled(total, softmax.scale, head), index, left, head)


@triton.jit(do_not_specialize=NOT_SPECIALIZED, launch_metadata=_profiling.of_attention(3))
def attention_bwd_dq_kernel(
    # inputs
    q_ptr, k_ptr, v_ptr, o_ptr, do_ptr,  # [B, N, H, d] T by stride; k and v have H / GROUP heads
    lse_ptr,  # [B, H, N] f32, or sequence by sequence [H, N]; [B, H, 2, N] with a mask that is added
    mask_ptr,  # [B, H, N, N] bool or float by stride, or None
    cu_seqlens_ptr,  # [B + 1] int32 or int64, or None: sequences of N tokens at most lie one behind the other
    seed_ptr,  # [1] int64, or None: no dropout
    # outputs
    dq_ptr,  # [B, N, H, d] T by stride
    statistics_ptr,  # [B, H, 2 or 3, N] f32, or sequence by sequence: `statistics_of`
    # sizes, with `tokens` of all sequences; strides in UNITs of elements, the last dimension is contiguous
    N, H, tokens,
    stride_qb, stride_qn, stride_qh,
    stride_kb, stride_kn, stride_kh,
    stride_vb, stride_vn, stride_vh,
    stride_ob, stride_on, stride_oh,
    stride_dob, stride_don, stride_doh,
    stride_dqb, stride_dqn, stride_dqh,
    stride_maskb, stride_maskn, stride_maskh,  # in units of 16 elements
    scale: tl.float32,  # > 0
    dropout_p: tl.float32,
    UNIT: tl.constexpr, MASK_ROWS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LOOP: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Grid: `place`, of BLOCK_M queries. Tiles along the keys: LOOP is N > BLOCK_N."""
    at = place(N, H, tokens, cu_seqlens_ptr, BLOCK_M)
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
        of_head(at, at.head // GROUP, H // GROUP),
        Softmax(scale, Mask(mask_ptr, stride_maskb, stride_maskn, stride_maskh, MASK_ROWS), seed_ptr, dropout_p),
        Head(HEAD_DIM, D0, D1, PRECISION),
        Tiles(BLOCK_M, BLOCK_N, LOOP, TAIL, 0, cu_seqlens_ptr is None),
    )
