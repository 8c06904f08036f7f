"""Softmax attention, non-causal, without the N x N matrix in memory (Dao et al. 2022; online softmax: Milakov 2018).

    S = scale * Q K^T + mask,   P = softmax(S),   O = dropout(P) V,   LSE = log(sum(exp(S)))      per batch and head

The kernel here loops over key tiles with a running maximum; short sequences have one of their own without it
(attention_short.py), unless there is a mask, or heads of q share those of k and v (Ainslie et al. 2023). Matmuls
accumulate in float32; softmax and LSE (natural logarithm) are float32, P is rounded to the tensors' dtype. Every
program writes its own rows: bitwise reproducible. Tensors and tiles: _tiles.py.

With a mask that is added, LSE is kept as the maximum and the sum of exp(S - maximum): at a maximum of -1e9, which such
a mask gives the rows of padding, one float32 would lose the logarithm of the sum, and P would not sum to 1.

A query that may look at no key has P = 0, as in PyTorch; its LSE or sum is inf, of which the backward kernels make that
again. Only False and -inf exclude a key: finite numbers, however low, do not.
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

# That a size or a stride is 1 or a multiple of 16 is no reason to compile a kernel again: a batch of one has a stride
# of 0, and what matters of strides, UNIT says.
_TENSORS = "q", "k", "v", "o", "do", "dq", "dk", "dv", "mask"
NOT_SPECIALIZED = ["N", "H", "tokens", *(f"stride_{x}{i}" for x in _TENSORS for i in "bnh")]


class Mask(NamedTuple):
    """[B, H, N, N], contiguous along the keys, 0 strides where it is broadcast: bool, True where a query may look, or
    what is added to the scaled scores. Rows have room for a multiple of 16 elements, strides come in units of that.
    ptr: None without. ROWS: queries have a row each, or all of them one."""

    ptr: tl.tensor
    batch: tl.tensor
    query: tl.tensor
    head: tl.tensor
    ROWS: tl.constexpr


class Softmax(NamedTuple):
    """What is between Q K^T and P: the scale, the mask; the dropout's seed, [1] int64 or None without, and probability
    of zero."""

    scale: tl.tensor
    mask: Mask
    seed_ptr: tl.tensor
    dropout_p: tl.tensor


class Tiles(NamedTuple):
    """Scores [BLOCK_M queries, BLOCK_N keys] at a time. The sequence that a program loops along ends in one tile of its
    own width, or two if TAIL_1 is not 0: masked, and never empty. LOOP: there are full ones before; SURELY: for all."""

    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    LOOP: tl.constexpr
    TAIL_0: tl.constexpr
    TAIL_1: tl.constexpr
    SURELY: tl.constexpr


# Not global constants: with those, a kernel's key in Triton's cache depends on which kernel of a process is the first.
@triton.jit
def log2e():
    return 1.4426950408889634


@triton.jit
def ln2():
    return 0.6931471805599453


@triton.jit
def is_added(mask):
    """Whether the mask is one of numbers."""
    if mask.ptr is None:
        return False
    else:
        return mask.ptr.dtype.element_ty != tl.int1


@triton.jit
def lowest(mask):
    """Lower bound of a masked row's maximum, so that a row without keys gives exp(-inf) = 0 and not NaN. Next to
    numbers that are added it is the least float32; else it is scaled by log2 e, which must not overflow."""
    if is_added(mask):
        return -3.4028234663852886e38
    else:
        return -1e38


@triton.jit
def factor(softmax):
    """What makes S of what `masked` returns: the mask is added to scaled scores, without one they are scaled later."""
    if softmax.mask.ptr is None:
        return softmax.scale
    else:
        return 1.0


@triton.jit
def _load_mask(mask, queries, first_query, keys, first_key, at, TAIL: tl.constexpr):
    """A tile, or one row of it for all queries."""
    plane = at.batch.to(tl.int64) * mask.batch + at.head.to(tl.int64) * mask.head
    tile = mask.ptr + (plane + tl.cast(first_query, tl.int64) * mask.query) * 16 + first_key
    inside = keys // 16 * 16 < at.N - first_key if TAIL else keys >= 0  # rows have room: loads of 16 bytes
    if mask.ROWS:
        return tl.load(
            tile + (queries * (mask.query * 16) + keys), mask=(queries < at.N - first_query) & inside, other=0
        )
    else:
        return tl.load(tile + keys, mask=inside, other=0)


@triton.jit
def masked(s, softmax, queries, first_query, keys, first_key, at, TAIL: tl.constexpr):
    """scale * Q K^T + mask; Q K^T itself without one. Indices count from first_query and first_key, and broadcast
    against s, which may be transposed. TAIL: keys may lie beyond N."""
    if softmax.mask.ptr is not None:
        m = _load_mask(softmax.mask, queries, first_query, keys, first_key, at, TAIL)
        if m.dtype == tl.int1:
            s = tl.where(m, s * softmax.scale, float("-inf"))
        else:
            s = s * softmax.scale + m.to(tl.float32)
    return s


@triton.jit
def scores(q, k, keys, start, at, softmax, head, MASKED: tl.constexpr):
    """Q K^T against keys counted from `start`, and whatever else happens to scores in front of the softmax: those from
    N on do not exist if MASKED. The backward kernels' counterpart is `probabilities` in attention_bwd.py."""
    s = dot(q, k, head)
    s = masked(s, softmax, tl.arange(0, s.shape[0])[:, None], at.first, keys[None, :], start, at, MASKED)
    if MASKED:
        s = tl.where((keys < at.N - start)[None, :], s, float("-inf"))
    return s


@triton.jit
def maximum(s, softmax):
    """Of each row [M]."""
    m = tl.max(s, 1)
    return m if softmax.mask.ptr is None else tl.maximum(m, lowest(softmax.mask))


@triton.jit
def exponents(s, m, softmax):
    """S - maximum in base 2, of scores s [M, keys] and their maximum m [M]."""
    if is_added(softmax.mask):
        # The difference first: it is exact near the maximum, where the product of a maximum of -1e9 and log2 e is not.
        return (s - m[:, None]) * log2e()
    else:
        scale2 = factor(softmax) * log2e()
        return s * scale2 - (m * scale2)[:, None]


@triton.jit
def add_values(acc, p, v, keys, at, softmax, head):
    """acc [M, d] + dropout(p) [M, keys] v, but for the factor 1 / (1 - dropout_p). keys: their indices."""
    if softmax.seed_ptr is not None:
        rows = at.first + tl.arange(0, p.shape[0])
        keep = keep_mask(tl.load(softmax.seed_ptr), rows[:, None], keys[None, :], at.plane, softmax.dropout_p)
        p = tl.where(keep, p, 0.0)
    return add_dot(acc, p.to(v[0].dtype), v, head)


@triton.jit
def finish(acc, m, total, o, lse_ptr, at, softmax, head):
    """o = acc / total, and LSE, or its two numbers. m: the maximum of the scores."""
    empty = total == 0.0  # only with a mask; acc is 0 then
    if softmax.mask.ptr is not None:
        total = tl.where(empty, 1.0, total)
    norm = 1.0 / total
    lse = total if is_added(softmax.mask) else m * factor(softmax) + tl.log2(total) * ln2()
    if softmax.mask.ptr is not None:
        lse = tl.where(empty, float("inf"), lse)
    if softmax.seed_ptr is not None:
        norm = norm / (1.0 - softmax.dropout_p)
    index = tl.arange(0, m.shape[0])
    left = at.N - at.first
    store(rows_of(o, at, at.first), scaled(acc, norm[:, None], head), index, left, head)
    if is_added(softmax.mask):
        top = lse_ptr + 2 * at.rows + at.first + index
        tl.store(top, m, mask=index < left)
        tl.store(top + at.N, lse, mask=index < left)
    else:
        tl.store(lse_ptr + at.rows + at.first + index, lse, mask=index < left)


@triton.jit
def _step(state, q, k, v, start, at, softmax, head, WIDTH: tl.constexpr, MASKED: tl.constexpr, FIRST: tl.constexpr):
    """WIDTH more keys from index `start`, where k and v begin. state: the accumulators [M, d], the running maximum of
    the scores and the running sum [M]. FIRST: there is nothing to rescale yet."""
    acc, m, total = state
    keys = tl.arange(0, WIDTH)
    left = at.N - start
    s = scores(q, load(k, keys, left, head, MASKED), keys, start, at, softmax, head, MASKED)
    m_new = maximum(s, softmax) if FIRST else tl.maximum(m, maximum(s, softmax))
    p = tl.exp2(exponents(s, m_new, softmax))
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
    """BLOCK_M rows of one head, all keys, which are of the head of at_keys. Only the last key tile is masked."""
    rows = load(rows_of(q, at, at.first), tl.arange(0, tiles.BLOCK_M), at.N - at.first, head, True)
    minus_infinity = tl.full([tiles.BLOCK_M], float("-inf"), tl.float32)
    state = zeros(tiles.BLOCK_M, head), minus_infinity, tl.zeros([tiles.BLOCK_M], tl.float32)
    # The narrow tiles come first, and the loop surely runs. Behind a loop, and where it might be skipped, accumulators
    # are moved: up to 30 registers more, and ptxas may wait for every wgmma.
    full = (at.N - 1) // tiles.BLOCK_N * tiles.BLOCK_N
    keys, values = rows_of(k, at_keys, full), rows_of(v, at_keys, full)
    state = _step(state, rows, keys, values, full, at, softmax, head, tiles.TAIL_0, tiles.TAIL_1 == 0, True)
    if tiles.TAIL_1 > 0:
        start = full + tiles.TAIL_0
        keys, values = skip(keys, tiles.TAIL_0), skip(values, tiles.TAIL_0)
        state = _step(state, rows, keys, values, start, at, softmax, head, tiles.TAIL_1, True, False)
    if tiles.LOOP:
        if tiles.SURELY:
            tl.assume(full > 0)
        keys, values = rows_of(k, at_keys, 0), rows_of(v, at_keys, 0)
        for start in tl.range(0, full, tiles.BLOCK_N):
            state = _step(state, rows, keys, values, start, at, softmax, head, tiles.BLOCK_N, False, False)
            keys, values = skip(keys, tiles.BLOCK_N), skip(values, tiles.BLOCK_N)
    acc, m, total = state
    finish(acc, m, total, o, lse_ptr, at, softmax, head)


@triton.jit(do_not_specialize=NOT_SPECIALIZED, launch_metadata=_profiling.of_attention(2))
def attention_fwd_kernel(
    # inputs
    q_ptr, k_ptr, v_ptr,  # [B, N, H, d] T by stride; k and v have H / GROUP heads
    mask_ptr,  # [B, H, N, N] bool or float by stride, or None
    cu_seqlens_ptr,  # [B + 1] int32 or int64, or None: sequences of N tokens at most lie one behind the other
    seed_ptr,  # [1] int64, or None: no dropout
    # outputs
    o_ptr,  # [B, N, H, d] T, contiguous
    lse_ptr,  # [B, H, N] f32, or sequence by sequence [H, N]; [B, H, 2, N] with a mask that is added
    # sizes, with `tokens` of all sequences; strides in UNITs of elements, the last dimension is contiguous
    N, H, tokens,
    stride_qb, stride_qn, stride_qh,
    stride_kb, stride_kn, stride_kh,
    stride_vb, stride_vn, stride_vh,
    stride_maskb, stride_maskn, stride_maskh,  # in units of 16 elements
    scale: tl.float32,  # > 0
    dropout_p: tl.float32,
    UNIT: tl.constexpr, MASK_ROWS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LOOP: tl.constexpr, TAIL_0: tl.constexpr, TAIL_1: tl.constexpr,
):  # fmt: skip
    """Grid: `place`, of BLOCK_M queries. Tiles along the keys: LOOP is N > BLOCK_N."""
    at = place(N, H, tokens, cu_seqlens_ptr, BLOCK_M)
    stride_ob = tl.cast(N, tl.int64) * H * HEAD_DIM if cu_seqlens_ptr is None else 0
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
        of_head(at, at.head // GROUP, H // GROUP),
        Softmax(scale, Mask(mask_ptr, stride_maskb, stride_maskn, stride_maskh, MASK_ROWS), seed_ptr, dropout_p),
        Head(HEAD_DIM, D0, D1, PRECISION),
        Tiles(BLOCK_M, BLOCK_N, LOOP, TAIL_0, TAIL_1, cu_seqlens_ptr is None),
    )
