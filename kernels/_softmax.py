"""Device functions that the attention kernels share: from Q K^T to the probabilities P, in both directions.

    S = scale * Q K^T + mask,   P = softmax(S) = exp(S - LSE),   O = dropout(P) V,   delta = rowsum(dO * O)

The forward kernel computes `scores`, adds P V with `add_values` and ends with `finish`, which stores O and LSE. The
backward kernels start from `load_queries` and recompute P as `probabilities`. All of it is float32; operands of matmuls
are rounded to the tensors' dtype T. Tensors and tiles: _tiles.py.

LSE is the natural logarithm. With an additive mask it is kept as two numbers, the maximum and the sum of
exp(S - maximum): at a maximum of -1e9, usual in rows of padding, a float32 LSE would lose the logarithm of the sum, and
P would not sum to 1.

A query that may attend to no key has P = 0, as in PyTorch. Its LSE (or sum) is inf, from which the backward kernels get
P = 0 again. Only False and -inf exclude a key: finite numbers, however low, do not.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from fastvit.kernels._math import keep_mask
from fastvit.kernels._tiles import Tokens, add_dot, dot, is_span, load, regions, rows_of, scaled, store

# Do not specialise on sizes and strides that are 1 or divisible by 16: batch size 1 would recompile. Alignment is
# passed as UNIT.
_TENSORS = "q", "k", "v", "o", "do", "dq", "dk", "dv", "mask"
_OF_WINDOWS = "grid_h", "grid_w", "window_w", "shift_h", "shift_w"
NOT_SPECIALIZED = [
    *("N", "N_k", "H", "tokens", "tokens_k", *_OF_WINDOWS),
    *(f"stride_{x}{i}" for x in _TENSORS for i in "bnh"),
]


class Mask(NamedTuple):
    """[B, H, M, N] for M queries and N keys, contiguous along the keys, stride 0 along broadcast dimensions: bool, True
    where a query may attend, or a float added to the scaled scores. Of windows, B is how many a sample has. ptr: None
    without a mask. Rows are padded to a multiple of 16 elements, and strides are in units of 16."""

    ptr: tl.tensor
    batch: tl.tensor
    query: tl.tensor
    head: tl.tensor


class Softmax(NamedTuple):
    """How scores become probabilities: the scale, the mask, the dropout seed ([1] int64, or None without dropout) and
    the probability of dropping. MASK_ROWS: each query has a row of the mask of its own; otherwise one row serves all.
    CAUSAL: query i sees keys 0 to i only. EMPTY: there may be sequences without keys. shift_bias: added to the scores
    between different `regions` of a window, or None where a window has one region and all of its tokens exist.

    MASK_ROWS is no field of Mask: in a loop or a branch, triton 3.6 reads a constexpr of a tuple within a tuple as
    None, unless a constexpr of the outer tuple follows."""

    scale: tl.tensor
    mask: Mask
    MASK_ROWS: tl.constexpr
    CAUSAL: tl.constexpr
    EMPTY: tl.constexpr
    shift_bias: tl.tensor
    seed_ptr: tl.tensor
    dropout_p: tl.tensor


class Tiles(NamedTuple):
    """Tiles of [BLOCK_M queries, BLOCK_N keys] scores. The sequence that a program loops over ends in one tile of width
    TAIL_0, or two if TAIL_1 is not 0; the last one is masked, and neither is empty. LOOP: full tiles come before the
    tail. SURELY: they do so in every program."""

    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    LOOP: tl.constexpr
    TAIL_0: tl.constexpr
    TAIL_1: tl.constexpr
    SURELY: tl.constexpr


class Inputs(NamedTuple):
    """The tensors that a backward kernel which owns queries reads."""

    q: Tokens
    k: Tokens
    v: Tokens
    o: Tokens
    do: Tokens


class Queries(NamedTuple):
    """A tile of queries in a backward kernel: parts of q and dO; lse and delta [M] f32, lse multiplied by `log_unit`.
    With an additive mask, top is the maximum of the scores and lse comes from the sum alone, as `probabilities` expects
    it; otherwise top is not read."""

    q: tuple
    do: tuple
    top: tl.tensor
    lse: tl.tensor
    delta: tl.tensor


# Functions, not global constants: with those, the key of a kernel in Triton's cache depends on which kernel the process
# compiles first.
@triton.jit
def log2e():
    return 1.4426950408889634


@triton.jit
def ln2():
    return 0.6931471805599453


@triton.jit
def is_added(mask):
    """Whether there is a mask and it is additive."""
    if mask.ptr is None:
        return False
    else:
        return mask.ptr.dtype.element_ty != tl.int1


@triton.jit
def hides(softmax):
    """Whether a query may see no key of a tile, or none at all."""
    return softmax.mask.ptr is not None or softmax.CAUSAL or softmax.EMPTY or softmax.shift_bias is not None


@triton.jit
def factor(softmax):
    """Multiplier that turns the result of `masked` into S: `masked` scales only where keys may be hidden."""
    if hides(softmax):
        return 1.0
    else:
        return softmax.scale


@triton.jit
def _load_mask(mask, queries, first_query, keys, first_key, at, at_keys, ROWS: tl.constexpr, TAIL: tl.constexpr):
    """Load a tile of the mask, or one row of it for all queries."""
    sequence = at.batch if is_span(at) else at.number
    plane = sequence.to(tl.int64) * mask.batch + at.head.to(tl.int64) * mask.head
    tile = mask.ptr + (plane + tl.cast(first_query, tl.int64) * mask.query) * 16 + first_key
    # up to the padding, so that loads are 16 bytes
    inside = keys // 16 * 16 < at_keys.N - first_key if TAIL else keys >= 0
    if ROWS:
        return tl.load(
            tile + (queries * (mask.query * 16) + keys), mask=(queries < at.N - first_query) & inside, other=0
        )
    else:
        return tl.load(tile + keys, mask=inside, other=0)


@triton.jit
def masked(s, softmax, queries, first_query, keys, first_key, at, at_keys, TAIL: tl.constexpr):
    """scale * Q K^T + mask from s = Q K^T; s itself where no key is hidden. Indices count from first_query and
    first_key and broadcast against s, which may be transposed. at, at_keys: the queries and the keys. TAIL: keys may
    lie beyond the last one."""
    if softmax.mask.ptr is not None:
        m = _load_mask(softmax.mask, queries, first_query, keys, first_key, at, at_keys, softmax.MASK_ROWS, TAIL)
        if m.dtype == tl.int1:
            s = tl.where(m, s * softmax.scale, float("-inf"))
        else:
            s = s * softmax.scale + m.to(tl.float32)
    elif hides(softmax):
        s = s * softmax.scale
    if softmax.CAUSAL:
        s = tl.where(keys + first_key <= queries + first_query, s, float("-inf"))
    if softmax.shift_bias is not None:
        region = regions(at_keys.window, keys + first_key)
        apart = tl.where(region < 0, float("-inf"), softmax.shift_bias)
        s = tl.where(regions(at.window, queries + first_query) == region, s, s + apart)
    return s


@triton.jit
def keys_seen(at, at_keys, softmax, BLOCK: tl.constexpr):
    """Return how many keys the BLOCK queries that a program owns may see: at least 1, so that there is a last one."""
    seen = at_keys.N
    if softmax.CAUSAL:
        seen = tl.minimum(seen, at.first + BLOCK)
    if softmax.EMPTY:
        seen = tl.maximum(seen, 1)
    return seen


# ---- forward ----


@triton.jit
def scores(q, k, keys, start, at, at_keys, softmax, head, MASKED: tl.constexpr):
    """Q K^T, masked: what the softmax takes, up to `factor`. keys count from `start`; MASKED: those after the last one
    are excluded. The backward kernels' counterpart is `probabilities`."""
    s = dot(q, k, head)
    s = masked(s, softmax, tl.arange(0, s.shape[0])[:, None], at.first, keys[None, :], start, at, at_keys, MASKED)
    if MASKED:
        s = tl.where((keys < at_keys.N - start)[None, :], s, float("-inf"))
    return s


@triton.jit
def add_values(acc, p, v, keys, at, softmax, head):
    """acc [M, d] + dropout(p) [M, keys] v, without dropout's factor 1 / (1 - dropout_p). keys: their indices."""
    if softmax.seed_ptr is not None:
        rows = at.first + tl.arange(0, p.shape[0])
        keep = keep_mask(tl.load(softmax.seed_ptr), rows[:, None], keys[None, :], at.plane, softmax.dropout_p)
        p = tl.where(keep, p, 0.0)
    return add_dot(acc, p.to(v[0].dtype), v, head)


@triton.jit
def finish(acc, m, total, o, lse_ptr, at, at_keys, softmax, head):
    """Store o = acc / total, and LSE or its two numbers; NaN if there are more keys than the launch allows. m: maximum
    of the scores; total: sum of the exponentials."""
    empty = total == 0.0  # only where keys are hidden; acc is 0 then
    if hides(softmax):
        total = tl.where(empty, 1.0, total)
    if softmax.EMPTY:
        total = tl.where(at_keys.N < 0, float("nan"), total)
    norm = 1.0 / total
    lse = total if is_added(softmax.mask) else m * factor(softmax) + tl.log2(total) * ln2()
    if hides(softmax):
        lse = tl.where(empty, float("inf"), lse)
    if softmax.EMPTY:
        lse = tl.where(at_keys.N < 0, float("nan"), lse)
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


# ---- backward ----


@triton.jit
def log_unit(T: tl.constexpr):
    """Factor of exponents that go into `exponential`. Base 2 takes one FMA and one instruction a score. In float32,
    though, rounding LSE * log2 e would show at scores of hundreds, so float32 stays natural."""
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
    """Recompute P = exp(S - LSE) from the result of `masked`; the counterpart of `scores`. top and lse as in `Queries`;
    they and keys broadcast against s, which may be transposed.

    MASKED: keys from `limit` on do not exist, and their rows of K and V are zeros. With an additive mask their P is 0.
    Otherwise it is only limited to 1, which is enough: it is multiplied by zeros, or belongs to a row that is not
    stored. Comparing an exponent with 0 takes one instruction a score; comparing a key with N takes a register as well.
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
    """Return the factor of P in the forward pass: 0 or 1 / (1 - p); 1 without dropout. The indices broadcast."""
    if softmax.seed_ptr is not None:
        keep = keep_mask(tl.load(softmax.seed_ptr), queries, keys, at.plane, softmax.dropout_p)
        return tl.where(keep, 1.0 / (1.0 - softmax.dropout_p), 0.0)
    else:
        return 1.0


@triton.jit
def load_queries(x, lse_ptr, at, softmax, head, BLOCK: tl.constexpr):
    """Load the BLOCK queries that a program owns from `Inputs` x and the forward's LSE, and compute their delta.
    Queries from N on get LSE = inf, so P = 0."""
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
    """Pointer to a head's statistics, which the dQ kernel leaves for the other backward kernels: lse and delta of
    `Queries`, N of each, and with an additive mask also top."""
    if is_added(softmax.mask):
        return statistics_ptr + 3 * at.rows
    else:
        return statistics_ptr + 2 * at.rows
