"""Device functions for decomposed relative positions: keys on a grid, and what they add to the scores.

    bias[query, r * width + c] = rows[query, r] + columns[query, c]

A tile of keys is aligned with the grid: GRID_ROWS rows of GRID_COLUMNS columns. So the columns' part of the bias is the
same for all tiles below each other, and the rows' part is one number a query and grid row. Where a tile reaches beyond
the grid, both are minus infinity, which is the only mask.

The grid is a sample's, or that of each window of a larger grid of tokens, which its windows fill.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from fastvit.kernels._tiles import Rows, Span, is_span, rows_of, store


class Grid(NamedTuple):
    """The keys' grid; how many tokens further on its next row begins; and the part of it that a tile has, rows, columns
    and keys: powers of two. EVEN: no tile reaches beyond it."""

    height: tl.tensor
    width: tl.tensor
    pitch: tl.tensor
    GRID_ROWS: tl.constexpr
    GRID_COLUMNS: tl.constexpr
    KEYS: tl.constexpr
    EVEN: tl.constexpr


@triton.jit
def tile_keys(grid, row, column):
    """Return the keys of the tile that begins at (row, column), counted from its first one, and their limit: from there
    on they are outside of the grid. [KEYS]"""
    index = tl.arange(0, grid.KEYS)
    r, c = index // grid.GRID_COLUMNS, index % grid.GRID_COLUMNS
    keys = r * grid.pitch + c
    limit = grid.GRID_ROWS * grid.pitch
    if not grid.EVEN:
        keys = tl.where((r < grid.height - row) & (c < grid.width - column), keys, limit)
    return keys, limit


@triton.jit
def keys_from(x, at, grid, row, column):
    """Return the `Rows` of x, which is k or v or a gradient of them, from the key at (row, column) on."""
    index = row * grid.pitch + column
    if is_span(at):
        return rows_of(x, at, index)
    else:
        start = at.window.top * grid.pitch + at.window.left
        return rows_of(x, Span(at.batch, at.head, at.plane, 0, at.N, start, at.before, at.rows), index)


@triton.jit
def queries_from(x, at, grid, first):
    """Return the `Rows` that `query_index` counts from, of x, which has a row for each query: from index `first` on, or
    from a window's first token on."""
    if is_span(at):
        return rows_of(x, at, first)
    else:
        return keys_from(x, at, grid, 0, 0)


@triton.jit
def query_index(at, grid, first, COUNT: tl.constexpr):
    """Return where COUNT queries from index `first` on are in the `Rows` of `queries_from`, and their limit: from there
    on there are none. int32 [COUNT]"""
    index = tl.arange(0, COUNT)
    if is_span(at):
        return index, at.N - first
    else:
        index += first
        return index // grid.width * grid.pitch + index % grid.width, grid.height * grid.pitch


@triton.jit
def below(x, grid):
    """Return the `Rows` of the tile below."""
    return Rows(x.ptr + tl.cast(grid.GRID_ROWS * grid.pitch, tl.int64) * x.stride, x.stride)


@triton.jit
def multiple_of(width, GRID_COLUMNS: tl.constexpr, EVEN: tl.constexpr):
    """Return the width of the grid, or the pitch. If the grid is even, the compiler is told that tiles divide them."""
    if EVEN:
        width = width // GRID_COLUMNS * GRID_COLUMNS
    return width


@triton.jit
def column_bias(columns, queries, left, keys, grid, column):
    """Load the columns' part of the bias [M, keys] for a tile that begins at a column."""
    c = column + (keys if grid.GRID_ROWS == 1 else keys % grid.GRID_COLUMNS)[None, :]
    inside = (queries < left)[:, None]
    if not grid.EVEN:
        inside &= c < grid.width
    bias = tl.load(columns.ptr + (queries[:, None] * columns.stride + c), mask=inside, other=float("-inf"))
    return bias.to(tl.float32)


@triton.jit
def row_bias(rows, queries, left, grid, row):
    """Load the rows' part of the bias: for one grid row [M], or for several [M, GRID_ROWS]."""
    if grid.GRID_ROWS == 1:
        bias = tl.load(rows.ptr + (queries * rows.stride + row), mask=queries < left, other=0.0)
    else:
        r = tl.arange(0, grid.GRID_ROWS)[None, :]
        inside = (queries < left)[:, None] & (r < grid.height - row)
        bias = tl.load(rows.ptr + (queries[:, None] * rows.stride + (row + r)), mask=inside, other=float("-inf"))
    return bias.to(tl.float32)


@triton.jit
def on_grid(x, grid):
    """[M, keys of a tile] -> [M, GRID_ROWS, GRID_COLUMNS]"""
    return tl.reshape(x, [x.shape[0], grid.GRID_ROWS, grid.GRID_COLUMNS])


@triton.jit
def add_rows(s, bias, grid):
    """Add the part of several grid rows [M, GRID_ROWS] to s [M, keys]."""
    return tl.reshape(on_grid(s, grid) + bias[:, :, None], [s.shape[0], s.shape[1]])


@triton.jit
def one_hot(index, WIDTH: tl.constexpr, T: tl.constexpr):
    """Return [len(index), WIDTH] with 1 at `index` of each row."""
    return tl.where(index[:, None] == tl.arange(0, WIDTH)[None, :], 1.0, 0.0).to(T)


@triton.jit
def load_bias(x, queries, left, first, size, WIDTH: tl.constexpr, WHOLE: tl.constexpr, MASKED: tl.constexpr):
    """Load [M, WIDTH] of rows or columns from index `first` on; zero where they end. WHOLE: they do not end before.
    MASKED: queries may lie beyond the last one."""
    i = first + tl.arange(0, WIDTH)[None, :]
    at = x.ptr + (queries[:, None] * x.stride + i)
    if WHOLE and not MASKED:
        return tl.load(at)
    inside = (queries < left)[:, None]
    if not WHOLE:
        inside &= i < size
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def _store_part(x, value, keys, limit, FIRST: tl.constexpr, WIDTH: tl.constexpr, d: tl.constexpr):
    cols = FIRST + tl.arange(0, WIDTH)
    at = x.ptr + (keys[:, None] * x.stride + cols[None, :])
    tl.store(at, value.to(x.ptr.dtype.element_ty), mask=(keys < limit)[:, None] & (cols < d)[None, :])


@triton.jit
def store_keys(x, value, keys, limit, head):
    """Store parts [keys, D0], [keys, D1] into the rows of x at `keys` below the limit."""
    _store_part(x, value[0], keys, limit, 0, head.D0, head.d)
    if head.D1 > 0:
        _store_part(x, value[1], keys, limit, head.D0, head.D1, head.d)


@triton.jit
def store_queries(x, value, at, grid, head):
    """Store parts [M, D0], [M, D1] into the rows of x of the M queries that the program owns."""
    rows = queries_from(x, at, grid, at.first)
    if is_span(at):
        index, end = query_index(at, grid, at.first, value[0].shape[0])
        store(rows, value, index, end, head)
    else:
        # The minimum changes only the expression, as in _tiles.py: otherwise indices stay in registers through a loop
        index, end = query_index(at, grid, tl.minimum(at.first, at.N), value[0].shape[0])
        store_keys(rows, value, index, end, head)
