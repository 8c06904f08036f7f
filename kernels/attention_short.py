"""Softmax attention over short sequences, forward. Equations and conventions: attention.py.

A program holds the scores of its rows against all keys at once, so that the softmax needs neither a running maximum
nor rescaling. The keys come in up to three chunks, powers of two of falling size (197 keys: 128 + 64 + 16, of which 11
are padding), so that few scores are padding, and only the last chunk is masked.
"""

import triton
import triton.language as tl

from fastvit.kernels import _profiling
from fastvit.kernels._softmax import NOT_SPECIALIZED, Mask, Softmax, add_values, finish, log2e, scores
from fastvit.kernels._tiles import Head, Tokens, load, place, rows_of, zeros


@triton.jit
def _chunk_scores(q, k, at, softmax, head, FIRST: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """Return the scores [M, WIDTH] against keys from FIRST on, unscaled, and their maximum [M]."""
    keys = FIRST + tl.arange(0, WIDTH)
    s = scores(q, load(k, keys, at.N, head, MASKED), keys, 0, at, softmax, head, MASKED)
    return s, tl.max(s, 1)


@triton.jit
def _add_chunk(acc, total, s, scale2, shift, v, at, softmax, head, FIRST: tl.constexpr, MASKED: tl.constexpr):
    """Return acc and total (the sum of exponentials) with the keys from FIRST on added, whose scores are s."""
    keys = FIRST + tl.arange(0, s.shape[1])
    p = tl.exp2(s * scale2 - shift)
    acc = add_values(acc, p, load(v, keys, at.N, head, MASKED), keys, at, softmax, head)
    return acc, total + tl.sum(p, 1)


@triton.jit
def _attend(
    q, k, v, o, lse_ptr, at, softmax, head,
    BLOCK_M: tl.constexpr, KEYS_0: tl.constexpr, KEYS_1: tl.constexpr, KEYS_2: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M rows of one head over all keys."""
    rows = load(rows_of(q, at, at.first), tl.arange(0, BLOCK_M), at.N - at.first, head, True)
    keys, values = rows_of(k, at, 0), rows_of(v, at, 0)
    s0, m = _chunk_scores(rows, keys, at, softmax, head, 0, KEYS_0, KEYS_1 == 0)
    if KEYS_1 > 0:
        s1, m1 = _chunk_scores(rows, keys, at, softmax, head, KEYS_0, KEYS_1, KEYS_2 == 0)
        m = tl.maximum(m, m1)
    if KEYS_2 > 0:
        s2, m2 = _chunk_scores(rows, keys, at, softmax, head, KEYS_0 + KEYS_1, KEYS_2, True)
        m = tl.maximum(m, m2)

    scale2 = softmax.scale * log2e()
    shift = (m * scale2)[:, None]
    acc, total = zeros(BLOCK_M, head), tl.zeros([BLOCK_M], tl.float32)
    acc, total = _add_chunk(acc, total, s0, scale2, shift, values, at, softmax, head, 0, KEYS_1 == 0)
    if KEYS_1 > 0:
        acc, total = _add_chunk(acc, total, s1, scale2, shift, values, at, softmax, head, KEYS_0, KEYS_2 == 0)
    if KEYS_2 > 0:
        acc, total = _add_chunk(acc, total, s2, scale2, shift, values, at, softmax, head, KEYS_0 + KEYS_1, True)
    finish(acc, m, total, o, lse_ptr, at, softmax, head)


@triton.jit(do_not_specialize=NOT_SPECIALIZED, launch_metadata=_profiling.attention(2))
def attention_short_fwd_kernel(
    # inputs
    q_ptr, k_ptr, v_ptr,  # [B, N, H, d] T by stride
    seed_ptr,  # [1] int64, or None: no dropout
    # outputs
    o_ptr,  # [B, N, H, d] T, contiguous
    lse_ptr,  # [B, H, N] f32
    # sizes; strides in UNITs of elements, the last dimension is contiguous
    N, H,
    stride_qb, stride_qn, stride_qh,
    stride_kb, stride_kn, stride_kh,
    stride_vb, stride_vn, stride_vh,
    scale: tl.float32,  # > 0
    dropout_p: tl.float32,
    UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, KEYS_0: tl.constexpr, KEYS_1: tl.constexpr, KEYS_2: tl.constexpr,
):  # fmt: skip
    """Grid (B * H * cdiv(N, BLOCK_M),). KEYS_i: widths of the chunks, together >= N; 0: no such chunk."""
    _attend(
        Tokens(q_ptr, stride_qb, stride_qn, stride_qh, UNIT),
        Tokens(k_ptr, stride_kb, stride_kn, stride_kh, UNIT),
        Tokens(v_ptr, stride_vb, stride_vn, stride_vh, UNIT),
        Tokens(o_ptr, tl.cast(N, tl.int64) * H * HEAD_DIM, H * HEAD_DIM, HEAD_DIM, 1),
        lse_ptr,
        place(N, H, N, None, BLOCK_M),
        Softmax(scale, Mask(None, 0, 0, 0, False), seed_ptr, dropout_p),
        Head(HEAD_DIM, D0, D1, PRECISION),
        BLOCK_M,
        KEYS_0,
        KEYS_1,
        KEYS_2,
    )
