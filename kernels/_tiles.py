"""Tiles of [B, N, H, d] tensors: what the attention kernels load, multiply and store.

Kernel signatures are flat, because that launches faster. Kernels group their arguments first: a tensor with its strides
is `Tokens`, and `span_of_program` tells a program which rows it owns. Groups are made in the call that takes them: as a
local variable they would become tensors, constexprs included.

A tile of rows is a pair of parts of the head dimension, [rows, D0] and [rows, D1] with D0 + D1 >= d. Both are powers of
two and the columns from d on are masked, so that d = 80 takes 64 + 16 and not 128. D1 is 0 where one part is enough;
the second part is then the first again and is not used.
"""

from typing import NamedTuple

import triton
import triton.language as tl


class Tokens(NamedTuple):
    """A [B, N, H, d] tensor, contiguous along d. Strides are in UNITs of 8 elements if all of them are multiples of 8
    (the compiler then sees 16-byte alignment), otherwise of 1."""

    ptr: tl.tensor
    batch: tl.tensor
    token: tl.tensor
    head: tl.tensor
    UNIT: tl.constexpr


class Windows(NamedTuple):
    """How a sample, a grid of tokens, is cut into windows of N / window_w x window_w tokens: rolled up and to the left
    by the shift, then from the top left on. At the border of the grid, windows may reach beyond it."""

    grid_h: tl.tensor
    grid_w: tl.tensor
    window_w: tl.tensor
    shift_h: tl.tensor
    shift_w: tl.tensor


class Window(NamedTuple):
    """A window: its top left corner in the rolled grid. Indices count its tokens, row by row, from `first` on."""

    first: tl.tensor
    top: tl.tensor
    left: tl.tensor
    grid_h: tl.tensor
    grid_w: tl.tensor
    window_w: tl.tensor
    shift_h: tl.tensor
    shift_w: tl.tensor


class Rows(NamedTuple):
    """Tokens of one head: pointer to the first one, and elements from one to the next."""

    ptr: tl.tensor
    stride: tl.tensor


class WindowRows(NamedTuple):
    """Tokens of a window and one head: pointer to the sample's first one."""

    ptr: tl.tensor
    stride: tl.tensor
    window: Window


class Span(NamedTuple):
    """The rows that a program owns: from `first` on, of N rows of one sequence and head. plane: sequence and head as
    one index, sequence * H + head.

    Sequences are the samples of a batch, or they are packed in one sample (variable length). Packed, `start` is the
    sequence's first token and the stride of `batch` is 0. before: tokens in all earlier sequences. rows: offset of the
    first LSE of this sequence and head; LSE is stored sequence by sequence, [H, N] each. int64."""

    batch: tl.tensor
    head: tl.tensor
    plane: tl.tensor
    first: tl.tensor
    N: tl.tensor
    start: tl.tensor
    before: tl.tensor
    rows: tl.tensor


class WindowSpan(NamedTuple):
    """The rows that a program owns where sequences are windows of a sample, `batch`: a `Span`, the `window`, and its
    number in the sample."""

    batch: tl.tensor
    head: tl.tensor
    plane: tl.tensor
    first: tl.tensor
    N: tl.tensor
    start: tl.tensor
    before: tl.tensor
    rows: tl.tensor
    window: Window
    number: tl.tensor


class Head(NamedTuple):
    """The head dimension d, its parts, and the precision of matmuls over it."""

    d: tl.constexpr
    D0: tl.constexpr
    D1: tl.constexpr
    PRECISION: tl.constexpr


# Tuples are told apart by their lengths, because triton 3.6 cannot return None in one.


@triton.jit
def is_span(at):
    """Whether `at` is a `Span`, not a `WindowSpan`."""
    return len(at) == 8


@triton.jit
def is_rows(x):
    """Whether x is `Rows`, not `WindowRows`."""
    return len(x) == 2


@triton.jit
def span_of_program(N, H, tokens, cu_seqlens_ptr, BLOCK: tl.constexpr):
    """Return the `Span` of this program. Grid (B * H * cdiv(N, BLOCK),): a program owns BLOCK rows of one head.
    cu_seqlens_ptr: None if each sequence is a sample of N rows.

    Otherwise [B + 1]: where packed sequences of at most N tokens begin and end, out of `tokens` in all, and the grid is
    ((B + 1) * H * cdiv(N, BLOCK),). Programs that own nothing have first >= N: those past the end of a shorter
    sequence, all of a sequence that is longer than N, and the last H * cdiv(N, BLOCK), which belong to no sequence
    (`fill_gaps`). Offsets are clamped, so that no value makes a program leave the tokens."""
    tiles = tl.cdiv(N, BLOCK)
    plane = tl.program_id(0) // tiles
    sequence, head, first = plane // H, plane % H, tl.program_id(0) % tiles * BLOCK
    if cu_seqlens_ptr is None:
        return Span(sequence, head, plane, first, N, 0, sequence.to(tl.int64) * N, plane.to(tl.int64) * N)
    else:
        start = _end(cu_seqlens_ptr, sequence, tokens)
        after = tl.minimum(sequence + 1, tl.num_programs(0) // (tiles * H) - 1)
        length = tl.maximum(_end(cu_seqlens_ptr, after, tokens) - start, 0)
        length = tl.where(length > N, 0, length)
        start = start.to(tl.int64)
        return Span(sequence, head, plane, first, length, start, start, start * H + head * length)


@triton.jit
def window_of_program(N, H, windows, BLOCK: tl.constexpr):
    """Return the `Span` of this program where the sequences are `Windows` of N tokens. Grid (B * windows of a sample *
    H * cdiv(N, BLOCK),)."""
    tiles = tl.cdiv(N, BLOCK)
    plane = tl.program_id(0) // tiles
    return in_window(plane // H, plane % H, tl.program_id(0) % tiles * BLOCK, N, H, windows)


@triton.jit
def in_window(sequence, head, first, N, H, windows):
    """Return the `Span` from index `first` on of a window, `sequence`, and one of H heads."""
    window_h = N // windows.window_w
    across = tl.cdiv(windows.grid_w, windows.window_w)
    of_sample = tl.cdiv(windows.grid_h, window_h) * across
    number = sequence % of_sample
    plane = sequence * H + head
    window = Window(
        0, number // across * window_h, number % across * windows.window_w, windows.grid_h, windows.grid_w,
        windows.window_w, windows.shift_h, windows.shift_w,
    )  # fmt: skip
    before, rows = sequence.to(tl.int64) * N, plane.to(tl.int64) * N
    return WindowSpan(sequence // of_sample, head, plane, first, N, 0, before, rows, window, number)


@triton.jit
def _further(w, count):
    """Return the window with indices that count from `count` tokens later on."""
    return Window(w.first + count, w.top, w.left, w.grid_h, w.grid_w, w.window_w, w.shift_h, w.shift_w)


@triton.jit
def _tokens(window, index):
    """Return which tokens of the grid have these indices in a window, and whether they exist."""
    i = window.first + index
    y, x = window.top + i // window.window_w, window.left + i % window.window_w
    exists = (y < window.grid_h) & (x < window.grid_w)
    y, x = y + window.shift_h, x + window.shift_w
    y, x = tl.where(y >= window.grid_h, y - window.grid_h, y), tl.where(x >= window.grid_w, x - window.grid_w, x)
    return y * window.grid_w + x, exists


@triton.jit
def regions(window, index):
    """Return numbers that are equal for tokens of a window that were neighbours before the roll: int32. Tokens outside
    of the grid have one of their own."""
    i = window.first + index
    y, x = window.top + i // window.window_w, window.left + i % window.window_w
    below, right = y >= window.grid_h - window.shift_h, x >= window.grid_w - window.shift_w
    exists = (y < window.grid_h) & (x < window.grid_w)
    return tl.where(exists, below.to(tl.int32) * 2 + right.to(tl.int32), -1)


@triton.jit
def _end(cu_seqlens_ptr, sequence, tokens):
    """Load where a sequence begins, which is where the one before it ends: int32, clamped to the tokens."""
    end = tl.load(cu_seqlens_ptr + sequence)
    return tl.minimum(tl.maximum(end, 0), tokens).to(tl.int32)


@triton.jit
def fill_gaps(x, at, N, H, tokens, cu_seqlens_ptr, head, BLOCK: tl.constexpr):
    """Store NaN in the rows of x, an output or a gradient, that no program's span has: those of a sequence longer
    than N, those before the first sequence and those after the last. Programs that own nothing fill them; in all
    others the loops are empty. There is no early return instead: with a branch that returns after a loop, matmuls get
    no tensor-core instructions on gfx942."""
    tiles = tl.cdiv(N, BLOCK)
    sequences = tl.num_programs(0) // (tiles * H) - 1
    if at.batch == sequences:
        _fill(x, at, 0, _end(cu_seqlens_ptr, 0, tokens), tiles, BLOCK, head)
        _fill(x, at, at.start, tokens, tiles, BLOCK, head)
    else:
        end = _end(cu_seqlens_ptr, at.batch + 1, tokens)
        _fill(x, at, at.start, tl.where(end - at.start > N, end, at.start), tiles, BLOCK, head)


@triton.jit
def _fill(x, at, first, last, tiles, BLOCK: tl.constexpr, head):
    """Store NaN in every `tiles`-th token from index `first` plus the program's number up to `last`. Row by row: it is
    seldom needed, and tiles would take registers."""
    for row in range(first + at.first // BLOCK, last, tiles):
        at_row = rows_of(x, at, row - at.start).ptr
        cols = tl.arange(0, head.D0)
        tl.store(at_row + cols, float("nan"), mask=cols < head.d)
        if head.D1 > 0:
            cols = head.D0 + tl.arange(0, head.D1)
            tl.store(at_row + cols, float("nan"), mask=cols < head.d)


@triton.jit
def with_head(at, head, H):
    """Return the same rows of another one of H heads."""
    rows = at.before * H + head * at.N
    return Span(at.batch, head, at.batch * H + head, at.first, at.N, at.start, at.before, rows)


@triton.jit
def across(at, head, H, N, tokens, cu_seqlens_ptr):
    """Return all rows on the other side of the scores in the program's sequence: the keys of its queries, or the
    queries of its keys, in one of H heads. N: how many there are, or the most in a packed sequence; None: as many as on
    this side. tokens, cu_seqlens_ptr: as in `span_of_program`, of the other side. A sequence longer than N has -1
    rows."""
    if N is None:
        if is_span(at):
            return with_head(at, head, H)
        else:  # heads of windows share no keys
            return at
    else:
        plane = at.batch * H + head
        if cu_seqlens_ptr is None:
            return Span(at.batch, head, plane, 0, N, 0, at.batch.to(tl.int64) * N, plane.to(tl.int64) * N)
        else:
            start = _end(cu_seqlens_ptr, at.batch, tokens)
            length = tl.maximum(_end(cu_seqlens_ptr, at.batch + 1, tokens) - start, 0)
            length = tl.where(length > N, -1, length)
            start = start.to(tl.int64)
            return Span(at.batch, head, plane, 0, length, start, start, start * H + head * length)


@triton.jit
def rows_of(x, at, first):
    """Return the `Rows` of x from index `first` on, in the program's sequence and head. Offsets are int64 here, and
    int32 within a tile."""
    offset = (at.batch.to(tl.int64) * x.batch + at.head.to(tl.int64) * x.head) * x.UNIT
    stride = x.token * x.UNIT
    if is_span(at):
        return Rows(x.ptr + offset + tl.cast(stride, tl.int64) * (at.start + first), stride)
    else:
        return WindowRows(x.ptr + offset, stride, _further(at.window, first))


@triton.jit
def skip(x, count: tl.constexpr):
    """Return the `Rows` that begin `count` rows later."""
    if is_rows(x):
        return Rows(x.ptr + count * x.stride, x.stride)
    else:
        return WindowRows(x.ptr, x.stride, _further(x.window, count))


@triton.jit
def _load_part(x, index, limit, FIRST: tl.constexpr, WIDTH: tl.constexpr, d: tl.constexpr, MASKED: tl.constexpr):
    cols = FIRST + tl.arange(0, WIDTH)
    if not is_rows(x):
        tokens, inside = _tokens(x.window, index)
        if MASKED:
            inside &= index < limit
        inside = inside[:, None] & (cols < d)[None, :] if FIRST + WIDTH > d else inside[:, None]
        return tl.load(x.ptr + (tokens.to(tl.int64) * x.stride)[:, None] + cols[None, :], mask=inside, other=0.0)
    at = x.ptr + (index[:, None] * x.stride + cols[None, :])
    if FIRST + WIDTH > d:
        if MASKED:
            return tl.load(at, mask=(index < limit)[:, None] & (cols < d)[None, :], other=0.0)
        return tl.load(at, mask=(cols < d)[None, :], other=0.0)
    if MASKED:
        return tl.load(at, mask=(index < limit)[:, None], other=0.0)
    return tl.load(at)


@triton.jit
def load(x, index, limit, head, MASKED: tl.constexpr):
    """Load rows `index` (int32, within a tile) -> parts [rows, D0], [rows, D1]; zero from column d on and, if MASKED,
    from row `limit` on."""
    part0 = _load_part(x, index, limit, 0, head.D0, head.d, MASKED)
    if head.D1 > 0:
        part1 = _load_part(x, index, limit, head.D0, head.D1, head.d, MASKED)
    else:
        part1 = part0
    return part0, part1


@triton.jit
def _store_part(x, value, index, limit, FIRST: tl.constexpr, WIDTH: tl.constexpr, d: tl.constexpr):
    cols = FIRST + tl.arange(0, WIDTH)
    # The minimum does not change the mask, only the expression: otherwise the compiler reuses the mask of an earlier
    # load of the same rows, and keeps it in registers through the loop in between.
    mask = (index < tl.minimum(limit, index.shape[0]))[:, None] & (cols < d)[None, :]
    if is_rows(x):
        tl.store(x.ptr + index[:, None] * x.stride + cols[None, :], value.to(x.ptr.dtype.element_ty), mask=mask)
    else:
        tokens, exists = _tokens(x.window, index)
        at = x.ptr + (tokens.to(tl.int64) * x.stride)[:, None] + cols[None, :]
        tl.store(at, value.to(x.ptr.dtype.element_ty), mask=mask & exists[:, None])


@triton.jit
def store(x, value, index, limit, head):
    """Store parts [rows, D0], [rows, D1] into rows 0, 1, ... of x, converted to its dtype. Rows from `limit` on are
    left alone. The counterpart of `load`."""
    _store_part(x, value[0], index, limit, 0, head.D0, head.d)
    if head.D1 > 0:
        _store_part(x, value[1], index, limit, head.D0, head.D1, head.d)


@triton.jit
def zeros(ROWS: tl.constexpr, head):
    """Return float32 zeros [ROWS, d], as parts."""
    part0 = tl.zeros([ROWS, head.D0], tl.float32)
    if head.D1 > 0:
        part1 = tl.zeros([ROWS, head.D1], tl.float32)
    else:
        part1 = part0
    return part0, part1


@triton.jit
def scaled(x, factor, head):
    """Multiply both parts by a scalar or a column [rows, 1]."""
    part0 = x[0] * factor
    if head.D1 > 0:
        part1 = x[1] * factor
    else:
        part1 = part0
    return part0, part1


@triton.jit
def dot(a, b, head):
    """[M, d] x [N, d] -> a b^T [M, N] f32"""
    s = tl.dot(a[0], tl.trans(b[0]), input_precision=head.PRECISION)
    if head.D1 > 0:
        s = tl.dot(a[1], tl.trans(b[1]), s, input_precision=head.PRECISION)
    return s


@triton.jit
def _add_product(acc, a, b, PRECISION: tl.constexpr):
    """acc + a b. In float32 a tile's products are summed first: one chain over all of 4,097 keys had three times the
    error of cuBLAS, which splits sums. As a sum instead of tl.fma, Triton would turn it into the one chain again."""
    if a.dtype == tl.float32 and PRECISION == "ieee":
        return tl.fma(tl.dot(a, b, input_precision=PRECISION), 1.0, acc)
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def add_dot(acc, a, b, head):
    """acc [M, d] + a [M, N] b [N, d]"""
    part0 = _add_product(acc[0], a, b[0], head.PRECISION)
    if head.D1 > 0:
        part1 = _add_product(acc[1], a, b[1], head.PRECISION)
    else:
        part1 = part0
    return part0, part1
