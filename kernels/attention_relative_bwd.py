"""Backward of attention with decomposed relative positions, in two kernels, dQ first, without atomics.

    P = exp(S - LSE),   dV = P^T dO,   dP = dO V^T,   dS = P * (dP - delta),   delta = rowsum(dO * O)
    dQ = scale * dS K,   dK = scale * dS^T Q
    drows[query, r] = sum of dS over the keys in row r,   dcolumns[query, c] = sum over the keys in column c

S and the tiles of keys are those of attention_relative.py. The first kernel owns queries: it computes dQ, drows and
dcolumns, and leaves LSE and delta for the second one. That owns a tile of keys and loops over the queries with the
scores transposed. Sums are float32; P and dS are rounded to T. Every program writes rows of its own: bitwise
reproducible.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from fastvit.kernels import _profiling
from fastvit.kernels._relative import (
    Grid,
    add_rows,
    below,
    column_bias,
    keys_from,
    load_bias,
    multiple_of,
    on_grid,
    one_hot,
    queries_from,
    query_index,
    row_bias,
    store_keys,
    store_queries,
    tile_keys,
)
from fastvit.kernels._softmax import Inputs, Mask, Softmax, exponential, load_queries, log_unit
from fastvit.kernels._tiles import (
    Head,
    Rows,
    Span,
    Tokens,
    Windows,
    add_dot,
    dot,
    in_window,
    is_span,
    load,
    scaled,
    skip,
    span_of_program,
    window_of_program,
    zeros,
)
from fastvit.kernels.attention_relative import RELATIVE_NOT_SPECIALIZED

# ---- dQ, drows and dcolumns ----


@triton.jit
def _dq_step(dq, of_columns, queries, k, v, column_part, rows, drows, index, end, row, column, scale, grid, head):
    """Return dq + dS K, and of_columns + dS, for the tile of keys at (row, column); store its part of drows."""
    T: tl.constexpr = k.ptr.dtype.element_ty
    keys, limit = tile_keys(grid, row, column)
    k, v = load(k, keys, limit, head, not grid.EVEN), load(v, keys, limit, head, not grid.EVEN)
    s, dp = dot(queries.q, k, head) * (scale * log_unit(T)) + column_part, dot(queries.do, v, head)
    of_rows = row_bias(rows, index, end, grid, row) * log_unit(T)
    lse = queries.lse
    if grid.GRID_ROWS == 1:
        lse -= of_rows
    else:
        s = add_rows(s, of_rows, grid)
    ds = exponential(s - lse[:, None], T) * (dp - queries.delta[:, None])
    if grid.GRID_ROWS == 1:
        at, inside, found = drows.ptr + (index * drows.stride + row), index < end, tl.sum(ds, 1)
    else:
        r = tl.arange(0, grid.GRID_ROWS)[None, :]
        at, found = drows.ptr + (index[:, None] * drows.stride + (row + r)), tl.sum(on_grid(ds, grid), 2)
        inside = (index < end)[:, None] & (r < grid.height - row)
    tl.store(at, found.to(drows.ptr.dtype.element_ty), mask=inside)
    return add_dot(dq, ds.to(T), k, head), of_columns + ds


@triton.jit
def _dq(
    x, rows, columns, dq, drows, dcolumns, lse_ptr, statistics_ptr, at, part, scale, grid, head, BLOCK_M: tl.constexpr
):
    """Compute the gradients that BLOCK_M queries of one head own, and store their statistics. part: elements of a part
    of drows."""
    T: tl.constexpr = x.q.ptr.dtype.element_ty
    softmax = Softmax(scale, Mask(None, 0, 0, 0), False, False, False, False, None, 0.0)
    queries = load_queries(x, lse_ptr, at, softmax, head, BLOCK_M)
    query, left = tl.arange(0, BLOCK_M), at.N - at.first
    statistics = statistics_ptr + 2 * at.rows + at.first + query
    tl.store(statistics, queries.lse, mask=query < left)
    tl.store(statistics + at.N, queries.delta, mask=query < left)
    index, end = query_index(at, grid, at.first, BLOCK_M)
    rows, columns = queries_from(rows, at, grid, at.first), queries_from(columns, at, grid, at.first)
    dcolumns = queries_from(dcolumns, at, grid, at.first)
    total = zeros(BLOCK_M, head)
    tl.assume(grid.height > 0)
    for column in range(0, grid.width, grid.GRID_COLUMNS):
        keys = tl.arange(0, grid.KEYS)
        column_part = column_bias(columns, index, end, keys, grid, column) * log_unit(T)
        of_columns = tl.zeros([BLOCK_M, grid.KEYS], tl.float32)
        k, v = keys_from(x.k, at, grid, 0, column), keys_from(x.v, at, grid, 0, column)
        of_part = drows.ptr + column // grid.GRID_COLUMNS * part
        of_rows = queries_from(Tokens(of_part, drows.batch, drows.token, drows.head, drows.UNIT), at, grid, at.first)
        for row in range(0, grid.height, grid.GRID_ROWS):
            total, of_columns = _dq_step(
                total, of_columns, queries, k, v, column_part, rows, of_rows, index, end, row, column, scale, grid,
                head,
            )  # fmt: skip
            k, v = below(k, grid), below(v, grid)
        c = column + tl.arange(0, grid.GRID_COLUMNS)[None, :]
        inside = (index < end)[:, None] & (c < grid.width)
        found = tl.sum(on_grid(of_columns, grid), 1).to(dcolumns.ptr.dtype.element_ty)
        tl.store(dcolumns.ptr + (index[:, None] * dcolumns.stride + c), found, mask=inside)
    store_queries(dq, scaled(total, scale, head), at, grid, head)


@triton.jit(do_not_specialize=RELATIVE_NOT_SPECIALIZED, launch_metadata=_profiling.attention(3))
def attention_relative_bwd_dq_kernel(
    # inputs. With windows, M is a window's tokens. What is [B, M, ...] or [B, height * width, ...] below is then [B,
    # grid_h * grid_w, ...], while lse and statistics have the windows of all samples for B
    q_ptr,  # [B, M, H, d] T by stride
    k_ptr, v_ptr,  # [B, height * width, H, d] T by stride
    o_ptr, do_ptr,  # [B, M, H, d] T by stride
    rows_ptr, columns_ptr,  # [B, M, H, height] and [B, M, H, width] T by stride
    lse_ptr,  # [B, H, M] f32
    # outputs
    dq_ptr,  # [B, M, H, d] T by stride
    drows_ptr,  # [cdiv(width, GRID_COLUMNS), B, M, H, height] f32, parts to be summed, or T if it is one
    dcolumns_ptr,  # [B, M, H, width] T
    statistics_ptr,  # [B, H, 2, M] f32: LSE and delta
    # sizes; strides in UNITs of elements, those of rows and columns in OTHER_UNITs; the last dimension is contiguous
    B, M, H, height, width,
    grid_h, grid_w,  # of the tokens, whose windows are of height x width; None: samples are sequences
    stride_qb, stride_qn, stride_qh,
    stride_kb, stride_kn, stride_kh,
    stride_vb, stride_vn, stride_vh,
    stride_ob, stride_on, stride_oh,
    stride_dob, stride_don, stride_doh,
    stride_dqb, stride_dqn, stride_dqh,
    stride_rowsb, stride_rowsn, stride_rowsh,
    stride_columnsb, stride_columnsn, stride_columnsh,
    scale: tl.float32,
    UNIT: tl.constexpr, OTHER_UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, GRID_ROWS: tl.constexpr, GRID_COLUMNS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Grid: as in `span_of_program`, with blocks of BLOCK_M queries."""
    if grid_w is None:
        at, in_sample = span_of_program(M, H, M, None, BLOCK_M), M
    else:
        at = window_of_program(M, H, Windows(grid_h, grid_w, width, 0, 0), BLOCK_M)
        in_sample = grid_h * grid_w
    columns = multiple_of(width, GRID_COLUMNS, EVEN)
    _dq(
        Inputs(
            Tokens(q_ptr, stride_qb, stride_qn, stride_qh, UNIT),
            Tokens(k_ptr, stride_kb, stride_kn, stride_kh, UNIT),
            Tokens(v_ptr, stride_vb, stride_vn, stride_vh, UNIT),
            Tokens(o_ptr, stride_ob, stride_on, stride_oh, UNIT),
            Tokens(do_ptr, stride_dob, stride_don, stride_doh, UNIT),
        ),
        Tokens(rows_ptr, stride_rowsb, stride_rowsn, stride_rowsh, OTHER_UNIT),
        Tokens(columns_ptr, stride_columnsb, stride_columnsn, stride_columnsh, OTHER_UNIT),
        Tokens(dq_ptr, stride_dqb, stride_dqn, stride_dqh, UNIT),
        Tokens(drows_ptr, tl.cast(in_sample, tl.int64) * H * height, H * height, height, 1),
        Tokens(dcolumns_ptr, tl.cast(in_sample, tl.int64) * H * columns, H * columns, columns, 1),
        lse_ptr,
        statistics_ptr,
        at,
        tl.cast(B, tl.int64) * in_sample * H * height,
        scale,
        Grid(
            height,
            columns,
            multiple_of(width if grid_w is None else grid_w, GRID_COLUMNS, EVEN),
            GRID_ROWS,
            GRID_COLUMNS,
            GRID_ROWS * GRID_COLUMNS,
            EVEN,
        ),
        Head(HEAD_DIM, D0, D1, PRECISION),
        BLOCK_M,
    )


# ---- dK and dV ----


class QueryRows(NamedTuple):
    """A tile of queries in memory: its rows of q, dO and of the bias, and a pointer to the LSE of its first row. delta
    follows M elements later."""

    q: Rows
    do: Rows
    rows: Rows
    columns: Rows
    lse_ptr: tl.tensor


@triton.jit
def _from(q, do, rows, columns, statistics_ptr, at, grid, first):
    """Return the `QueryRows` from index `first` on."""
    return QueryRows(
        queries_from(q, at, grid, first),
        queries_from(do, at, grid, first),
        queries_from(rows, at, grid, first),
        queries_from(columns, at, grid, first),
        statistics_ptr + 2 * at.rows + first,
    )


@triton.jit
def _after(x, at, COUNT: tl.constexpr):
    """Return the `QueryRows` that begin COUNT queries later."""
    if is_span(at):
        return QueryRows(
            skip(x.q, COUNT), skip(x.do, COUNT), skip(x.rows, COUNT), skip(x.columns, COUNT), x.lse_ptr + COUNT
        )
    else:  # those of a window count from its first token
        return QueryRows(x.q, x.do, x.rows, x.columns, x.lse_ptr + COUNT)


class OneHot(NamedTuple):
    """Where the keys of a tile are in the grid, as factors of `load_bias`: [keys, 16 or more] T. A product with them
    copies numbers exactly. rows is not used for a tile of one grid row."""

    rows: tl.tensor
    columns: tl.tensor


@triton.jit
def _dkdv_step(
    dk, dv, k, v, where, queries, start, at, row, column, scale, grid, head, WIDTH: tl.constexpr, MASKED: tl.constexpr
):
    """dK + dS^T Q and dV + P^T dO for WIDTH queries from index `start`. Keys outside of the grid need no mask: each has
    its own row of dK and dV, which is not stored."""
    T: tl.constexpr = k[0].dtype
    COLUMNS: tl.constexpr = where.columns.shape[1]
    index, end = query_index(at, grid, start, WIDTH)
    q, do = load(queries.q, index, end, head, MASKED), load(queries.do, index, end, head, MASKED)
    query = tl.arange(0, WIDTH)
    if MASKED:
        lse = tl.load(queries.lse_ptr + query, mask=index < end, other=float("inf"))
        delta = tl.load(queries.lse_ptr + at.N + query, mask=index < end, other=0.0)
    else:
        lse, delta = tl.load(queries.lse_ptr + query), tl.load(queries.lse_ptr + at.N + query)
    whole: tl.constexpr = grid.EVEN and COLUMNS == grid.GRID_COLUMNS
    columns = load_bias(queries.columns, index, end, column, grid.width, COLUMNS, whole, MASKED)
    bias = tl.dot(where.columns, tl.trans(columns), input_precision=head.PRECISION)  # [keys, queries]
    if grid.GRID_ROWS == 1:
        of_row = queries.rows.ptr + (index * queries.rows.stride + row)
        of_row = tl.load(of_row, mask=index < end, other=0.0) if MASKED else tl.load(of_row)
        lse -= of_row.to(tl.float32) * log_unit(T)
    else:
        rows = load_bias(queries.rows, index, end, row, grid.height, where.rows.shape[1], False, MASKED)
        bias = tl.dot(where.rows, tl.trans(rows), bias, input_precision=head.PRECISION)
    s = dot(k, q, head) * (scale * log_unit(T)) + bias * log_unit(T)
    p = exponential(s - lse[None, :], T)
    dp = dot(v, do, head)
    dv = add_dot(dv, p.to(T), do, head)
    return add_dot(dk, (p * (dp - delta[None, :])).to(T), q, head), dv


@triton.jit
def _dkdv(
    q, k, v, do, rows, columns, dk, dv, statistics_ptr, at, row, column, scale, grid, head,
    BLOCK_M: tl.constexpr, LOOP: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Compute dK and dV of the tile of keys at (row, column)."""
    keys, limit = tile_keys(grid, row, column)
    its_k = load(keys_from(k, at, grid, row, column), keys, limit, head, not grid.EVEN)
    its_v = load(keys_from(v, at, grid, row, column), keys, limit, head, not grid.EVEN)
    T: tl.constexpr = k.ptr.dtype.element_ty
    tile = tl.arange(0, grid.KEYS)
    where = OneHot(
        one_hot(tile // grid.GRID_COLUMNS, max(grid.GRID_ROWS, 16), T),
        one_hot(tile % grid.GRID_COLUMNS, max(grid.GRID_COLUMNS, 16), T),
    )
    dk_total, dv_total = zeros(keys.shape[0], head), zeros(keys.shape[0], head)
    full = (at.N - 1) // BLOCK_M * BLOCK_M
    queries = _from(q, do, rows, columns, statistics_ptr, at, grid, full)
    dk_total, dv_total = _dkdv_step(
        dk_total, dv_total, its_k, its_v, where, queries, full, at, row, column, scale, grid, head, TAIL, True
    )
    if LOOP:
        tl.assume(full > 0)
        queries = _from(q, do, rows, columns, statistics_ptr, at, grid, 0)
        for start in range(0, full, BLOCK_M):
            dk_total, dv_total = _dkdv_step(
                dk_total, dv_total, its_k, its_v, where, queries, start, at, row, column, scale, grid, head, BLOCK_M,
                False,
            )  # fmt: skip
            queries = _after(queries, at, BLOCK_M)
    store_keys(keys_from(dk, at, grid, row, column), scaled(dk_total, scale, head), keys, limit, head)
    store_keys(keys_from(dv, at, grid, row, column), dv_total, keys, limit, head)


@triton.jit(do_not_specialize=RELATIVE_NOT_SPECIALIZED, launch_metadata=_profiling.attention(4))
def attention_relative_bwd_dkdv_kernel(
    # inputs. With windows, M is a window's tokens. What is [B, M, ...] or [B, height * width, ...] below is then [B,
    # grid_h * grid_w, ...], while lse and statistics have the windows of all samples for B
    q_ptr,  # [B, M, H, d] T by stride
    k_ptr, v_ptr,  # [B, height * width, H, d] T by stride
    do_ptr,  # [B, M, H, d] T by stride
    rows_ptr, columns_ptr,  # [B, M, H, height] and [B, M, H, width] T by stride
    statistics_ptr,  # [B, H, 2, M] f32, from attention_relative_bwd_dq_kernel
    # outputs
    dk_ptr, dv_ptr,  # as k and v
    # sizes; strides in UNITs of elements, those of rows and columns in OTHER_UNITs; the last dimension is contiguous
    M, H, height, width,
    grid_h, grid_w,  # of the tokens, whose windows are of height x width; None: samples are sequences
    stride_qb, stride_qn, stride_qh,
    stride_kb, stride_kn, stride_kh,
    stride_vb, stride_vn, stride_vh,
    stride_dob, stride_don, stride_doh,
    stride_dkb, stride_dkn, stride_dkh,
    stride_dvb, stride_dvn, stride_dvh,
    stride_rowsb, stride_rowsn, stride_rowsh,
    stride_columnsb, stride_columnsn, stride_columnsh,
    scale: tl.float32,
    UNIT: tl.constexpr, OTHER_UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, GRID_ROWS: tl.constexpr, GRID_COLUMNS: tl.constexpr, EVEN: tl.constexpr,
    LOOP: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Grid: (B * windows * H * cdiv(height, GRID_ROWS) * cdiv(width, GRID_COLUMNS),). The queries are in tiles of
    BLOCK_M, the last one TAIL wide; LOOP: there are others before it."""
    across = tl.cdiv(width, GRID_COLUMNS)
    tiles = tl.cdiv(height, GRID_ROWS) * across
    plane, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    if grid_w is None:
        sample = plane // H
        at = Span(sample, plane % H, plane, 0, M, 0, sample.to(tl.int64) * M, plane.to(tl.int64) * M)
    else:
        at = in_window(plane // H, plane % H, 0, M, H, Windows(grid_h, grid_w, width, 0, 0))
    _dkdv(
        Tokens(q_ptr, stride_qb, stride_qn, stride_qh, UNIT),
        Tokens(k_ptr, stride_kb, stride_kn, stride_kh, UNIT),
        Tokens(v_ptr, stride_vb, stride_vn, stride_vh, UNIT),
        Tokens(do_ptr, stride_dob, stride_don, stride_doh, UNIT),
        Tokens(rows_ptr, stride_rowsb, stride_rowsn, stride_rowsh, OTHER_UNIT),
        Tokens(columns_ptr, stride_columnsb, stride_columnsn, stride_columnsh, OTHER_UNIT),
        Tokens(dk_ptr, stride_dkb, stride_dkn, stride_dkh, UNIT),
        Tokens(dv_ptr, stride_dvb, stride_dvn, stride_dvh, UNIT),
        statistics_ptr,
        at,
        tile // across * GRID_ROWS,
        tile % across * GRID_COLUMNS,
        scale,
        Grid(
            height,
            multiple_of(width, GRID_COLUMNS, EVEN),
            multiple_of(width if grid_w is None else grid_w, GRID_COLUMNS, EVEN),
            GRID_ROWS,
            GRID_COLUMNS,
            GRID_ROWS * GRID_COLUMNS,
            EVEN,
        ),
        Head(HEAD_DIM, D0, D1, PRECISION),
        BLOCK_M,
        LOOP,
        TAIL,
    )
