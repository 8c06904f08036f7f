"""Backward of softmax attention for short sequences: one program per head, five matmuls. Equations and conventions:
attention_bwd_dq.py.

Q, dO, LSE and delta of a whole head stay on chip, with dQ in registers. The program loops over tiles of keys; dK and dV
of a tile are complete after its step. Every tensor is read or written once; bitwise reproducible, no atomics.
"""

import triton
import triton.language as tl

from fastvit.kernels import _profiling
from fastvit.kernels._softmax import (
    NOT_SPECIALIZED,
    Inputs,
    Mask,
    Softmax,
    dropout_factor,
    load_queries,
    probabilities,
)
from fastvit.kernels._tiles import (
    Head,
    Tokens,
    add_dot,
    dot,
    load,
    rows_of,
    scaled,
    skip,
    span_of_program,
    store,
    zeros,
)


@triton.jit
def _key_tile(dq_total, queries, k, v, dk, dv, start, at, softmax, head, WIDTH: tl.constexpr):
    """Store dK and dV of WIDTH keys from index `start`; return dQ with their part added. The order of the five matmuls
    matters: this one neither spills at 256 x 64 scores nor makes ptxas serialise the wgmma pipeline."""
    index = tl.arange(0, WIDTH)
    left = at.N - start
    keys, values = load(skip(k, start), index, left, head, True), load(skip(v, start), index, left, head, True)
    s = dot(queries.q, keys, head)
    p = probabilities(s, queries.top[:, None], queries.lse[:, None], index[None, :], left, softmax, True, keys[0].dtype)
    rows = tl.arange(0, s.shape[0])[:, None]
    dropped = dropout_factor(rows, (start + index)[None, :], at, softmax)
    p_t = tl.trans((p * dropped).to(keys[0].dtype))
    dp = dot(queries.do, values, head)
    ds = (p * (dp * dropped - queries.delta[:, None])).to(keys[0].dtype)
    dq_total = add_dot(dq_total, ds, keys, head)
    dv_tile = add_dot(zeros(WIDTH, head), p_t, queries.do, head)
    dk_tile = add_dot(zeros(WIDTH, head), tl.trans(ds), queries.q, head)
    store(skip(dv, start), dv_tile, index, left, head)
    store(skip(dk, start), scaled(dk_tile, softmax.scale, head), index, left, head)
    return dq_total


@triton.jit
def _gradients(x, dq, dk, dv, lse_ptr, at, softmax, head, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Compute dQ, dK and dV of a whole head."""
    queries = load_queries(x, lse_ptr, at, softmax, head, BLOCK_M)
    k, v = rows_of(x.k, at, 0), rows_of(x.v, at, 0)
    dk_rows, dv_rows = rows_of(dk, at, 0), rows_of(dv, at, 0)
    total = zeros(BLOCK_M, head)
    tl.assume(at.N > 0)
    for start in range(0, at.N, BLOCK_N):
        total = _key_tile(total, queries, k, v, dk_rows, dv_rows, start, at, softmax, head, BLOCK_N)
    store(rows_of(dq, at, 0), scaled(total, softmax.scale, head), tl.arange(0, BLOCK_M), at.N, head)


@triton.jit(do_not_specialize=NOT_SPECIALIZED, launch_metadata=_profiling.attention(5))
def attention_bwd_short_kernel(
    # inputs
    q_ptr, k_ptr, v_ptr, o_ptr, do_ptr,  # [B, N, H, d] T by stride
    lse_ptr,  # [B, H, N] f32
    seed_ptr,  # [1] int64, or None: no dropout
    # outputs
    dq_ptr, dk_ptr, dv_ptr,  # [B, N, H, d] T by stride
    # sizes; strides in UNITs of elements, the last dimension is contiguous
    N, H,
    stride_qb, stride_qn, stride_qh,
    stride_kb, stride_kn, stride_kh,
    stride_vb, stride_vn, stride_vh,
    stride_ob, stride_on, stride_oh,
    stride_dob, stride_don, stride_doh,
    stride_dqb, stride_dqn, stride_dqh,
    stride_dkb, stride_dkn, stride_dkh,
    stride_dvb, stride_dvn, stride_dvh,
    scale: tl.float32,  # > 0
    dropout_p: tl.float32,
    UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (B * H,); BLOCK_M >= N."""
    _gradients(
        Inputs(
            Tokens(q_ptr, stride_qb, stride_qn, stride_qh, UNIT),
            Tokens(k_ptr, stride_kb, stride_kn, stride_kh, UNIT),
            Tokens(v_ptr, stride_vb, stride_vn, stride_vh, UNIT),
            Tokens(o_ptr, stride_ob, stride_on, stride_oh, UNIT),
            Tokens(do_ptr, stride_dob, stride_don, stride_doh, UNIT),
        ),
        Tokens(dq_ptr, stride_dqb, stride_dqn, stride_dqh, UNIT),
        Tokens(dk_ptr, stride_dkb, stride_dkn, stride_dkh, UNIT),
        Tokens(dv_ptr, stride_dvb, stride_dvn, stride_dvh, UNIT),
        lse_ptr,
        span_of_program(N, H, N, None, BLOCK_M),
        Softmax(scale, Mask(None, 0, 0, 0), False, False, False, None, seed_ptr, dropout_p),
        Head(HEAD_DIM, D0, D1, PRECISION),
        BLOCK_M,
        BLOCK_N,
    )
