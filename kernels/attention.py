"""Softmax attention without the M x N matrix in memory (Dao et al. 2022; online softmax: Milakov 2018).

    S = scale * Q K^T + mask,   P = softmax(S),   O = dropout(P) V,   LSE = log(sum(exp(S)))      per batch and head

The kernel loops over key tiles with a running maximum; of causal attention, over those that a query of the program
sees. Heads of q may share those of k and v (Ainslie et al. 2023).
Matmuls accumulate in float32; softmax and LSE (natural logarithm) are float32, P is rounded to the tensors' dtype T.
Every program writes rows of its own: bitwise reproducible. Masks, and LSE with a mask: _softmax.py.
"""

import triton
import triton.language as tl

from fastvit.kernels import _profiling
from fastvit.kernels._softmax import (
    NOT_SPECIALIZED,
    Mask,
    Softmax,
    Tiles,
    add_values,
    factor,
    finish,
    hides,
    is_added,
    keys_seen,
    log2e,
    scores,
)
from fastvit.kernels._tiles import (
    Head,
    Tokens,
    Windows,
    across,
    fill_gaps,
    load,
    rows_of,
    scaled,
    skip,
    span_of_program,
    window_of_program,
    zeros,
)


@triton.jit
def _lowest(mask):
    """Lower bound of the row maximum, so that a fully masked row gives exp(-inf) = 0 and not NaN. With an additive mask
    it is the least float32; otherwise it is later multiplied by log2 e, which must not overflow."""
    if is_added(mask):
        return -3.4028234663852886e38
    else:
        return -1e38


@triton.jit
def _maximum(s, softmax):
    """Maximum of each row of scores [M, keys] -> [M]"""
    m = tl.max(s, 1)
    return tl.maximum(m, _lowest(softmax.mask)) if hides(softmax) else m


@triton.jit
def _exponents(s, m, softmax):
    """S - maximum in base 2, from scores s [M, keys] and their maximum m [M]."""
    if is_added(softmax.mask):
        # Subtract first: near the maximum the difference is exact, while -1e9 * log2 e is rounded.
        return (s - m[:, None]) * log2e()
    else:
        scale2 = factor(softmax) * log2e()
        return s * scale2 - (m * scale2)[:, None]


@triton.jit
def _step(
    state, q, k, v, start, at, at_keys, softmax, head, WIDTH: tl.constexpr, MASKED: tl.constexpr, FIRST: tl.constexpr
):
    """Add WIDTH keys from index `start`, where k and v begin. state: accumulators [M, d], running maximum of the scores
    [M] and running sum [M]. FIRST: there is nothing to rescale yet."""
    acc, m, total = state
    keys = tl.arange(0, WIDTH)
    left = at_keys.N - start
    s = scores(q, load(k, keys, left, head, MASKED), keys, start, at, at_keys, softmax, head, MASKED)
    m_new = _maximum(s, softmax) if FIRST else tl.maximum(m, _maximum(s, softmax))
    p = tl.exp2(_exponents(s, m_new, softmax))
    if FIRST:
        total = tl.sum(p, 1)
    else:
        rescale = tl.exp2((m - m_new) * (factor(softmax) * log2e()))
        total = total * rescale + tl.sum(p, 1)
        acc = scaled(acc, rescale[:, None], head)
    acc = add_values(acc, p, load(v, keys, left, head, MASKED), start + keys, at, softmax, head)
    return acc, m_new, total


@triton.jit
def _attend(q, k, v, o, lse_ptr, at, at_keys, softmax, head, tiles):
    """Compute BLOCK_M rows of one head over the keys of at_keys. Only the last key tile is masked."""
    rows = load(rows_of(q, at, at.first), tl.arange(0, tiles.BLOCK_M), at.N - at.first, head, True)
    minus_infinity = tl.full([tiles.BLOCK_M], float("-inf"), tl.float32)
    state = zeros(tiles.BLOCK_M, head), minus_infinity, tl.zeros([tiles.BLOCK_M], tl.float32)
    # The narrow tiles come first, and the compiler is told that the loop runs. After a loop, or with one that may not
    # run, accumulators are moved: up to 30 more registers, and ptxas may wait for every wgmma.
    full = (keys_seen(at, at_keys, softmax, tiles.BLOCK_M) - 1) // tiles.BLOCK_N * tiles.BLOCK_N
    keys, values = rows_of(k, at_keys, full), rows_of(v, at_keys, full)
    state = _step(state, rows, keys, values, full, at, at_keys, softmax, head, tiles.TAIL_0, tiles.TAIL_1 == 0, True)
    if tiles.TAIL_1 > 0:
        start = full + tiles.TAIL_0
        keys, values = skip(keys, tiles.TAIL_0), skip(values, tiles.TAIL_0)
        state = _step(state, rows, keys, values, start, at, at_keys, softmax, head, tiles.TAIL_1, True, False)
    if tiles.LOOP:
        if tiles.SURELY:
            tl.assume(full > 0)
        keys, values = rows_of(k, at_keys, 0), rows_of(v, at_keys, 0)
        for start in tl.range(0, full, tiles.BLOCK_N):
            state = _step(state, rows, keys, values, start, at, at_keys, softmax, head, tiles.BLOCK_N, False, False)
            keys, values = skip(keys, tiles.BLOCK_N), skip(values, tiles.BLOCK_N)
    acc, m, total = state
    finish(acc, m, total, o, lse_ptr, at, at_keys, softmax, head)


@triton.jit(do_not_specialize=NOT_SPECIALIZED, launch_metadata=_profiling.attention(2))
def attention_fwd_kernel(
    # inputs
    q_ptr, k_ptr, v_ptr,  # [B, N, H, d] T by stride; k and v have H / GROUP heads, and N_k tokens
    mask_ptr,  # [B, H, N, N_k] bool or float by stride, or None
    cu_seqlens_ptr,  # [B + 1] int32 or int64: bounds of packed sequences of at most N tokens; None: samples of N
    cu_seqlens_k_ptr,  # the same of k and v; None: as of q, or samples
    seed_ptr,  # [1] int64, or None: no dropout
    # outputs
    o_ptr,  # [B, N, H, d] T, contiguous
    lse_ptr,  # [B, H, N] f32, or [H, N] per packed sequence; [B, H, 2, N] with an additive mask
    # sizes. N_k: None if k has as many tokens as q. tokens: of all packed sequences, or of a grid; tokens_k: the same
    # of k, or None
    N, N_k, H, tokens, tokens_k,
    grid_h, grid_w, window_w, shift_h, shift_w,  # `Windows`; None: samples are sequences
    shift_bias,  # of `Softmax`, a float or None
    # strides in UNITs of elements, the last dimension is contiguous
    stride_qb, stride_qn, stride_qh,
    stride_kb, stride_kn, stride_kh,
    stride_vb, stride_vn, stride_vh,
    stride_maskb, stride_maskn, stride_maskh,  # in units of 16 elements
    scale: tl.float32,  # > 0
    dropout_p: tl.float32,
    UNIT: tl.constexpr, MASK_ROWS: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LOOP: tl.constexpr, TAIL_0: tl.constexpr, TAIL_1: tl.constexpr,
):  # fmt: skip
    """Grid: as in `span_of_program`, with blocks of BLOCK_M queries. LOOP, TAIL_0, TAIL_1: `Tiles` along the keys."""
    if grid_h is None:
        at = span_of_program(N, H, tokens, cu_seqlens_ptr, BLOCK_M)
    else:
        at = window_of_program(N, H, Windows(grid_h, grid_w, window_w, shift_h, shift_w), BLOCK_M)
    in_sample = N if grid_h is None else tokens
    stride_ob = tl.cast(in_sample, tl.int64) * H * HEAD_DIM if cu_seqlens_ptr is None else 0
    if cu_seqlens_ptr is not None:
        fill_gaps(
            Tokens(o_ptr, stride_ob, H * HEAD_DIM, HEAD_DIM, 1),
            at, N, H, tokens, cu_seqlens_ptr, Head(HEAD_DIM, D0, D1, PRECISION), BLOCK_M,
        )  # fmt: skip
        if at.first >= at.N:
            return
    _attend(
        Tokens(q_ptr, stride_qb, stride_qn, stride_qh, UNIT),
        Tokens(k_ptr, stride_kb, stride_kn, stride_kh, UNIT),
        Tokens(v_ptr, stride_vb, stride_vn, stride_vh, UNIT),
        Tokens(o_ptr, stride_ob, H * HEAD_DIM, HEAD_DIM, 1),
        lse_ptr,
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
        Tiles(BLOCK_M, BLOCK_N, LOOP, TAIL_0, TAIL_1, cu_seqlens_ptr is None and not CAUSAL),
    )
