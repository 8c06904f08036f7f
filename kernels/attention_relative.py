"""Softmax attention with decomposed relative positions (Li et al. 2022), without a bias of the size of the scores.

    S = scale * Q K^T + rows + columns,   O = softmax(S) V,   LSE = log(sum(exp(S)))      per batch and head

Keys lie on a grid of `height` rows and `width` columns: key r * width + c gets rows[query, r] + columns[query, c]. The
kernel loops over tiles of keys that are aligned with the grid (_relative.py), with a running maximum. The grid is a
sample's, or that of each window of it, whose tokens are then read where they are. Softmax is
float32, P is rounded to the tensors' dtype T. Every program writes rows of its own: bitwise reproducible.
"""

import triton
import triton.language as tl

from fastvit.kernels import _profiling
from fastvit.kernels._relative import (
    Grid,
    add_rows,
    below,
    column_bias,
    keys_from,
    multiple_of,
    queries_from,
    query_index,
    row_bias,
    store_queries,
    tile_keys,
)
from fastvit.kernels._softmax import exponential, ln2, log_unit
from fastvit.kernels._tiles import (
    Head,
    Tokens,
    Windows,
    add_dot,
    dot,
    load,
    scaled,
    span_of_program,
    window_of_program,
    zeros,
)

RELATIVE_NOT_SPECIALIZED = [
    "B", "M", "H", "height", "width", "grid_h", "grid_w",
    *(f"stride_{x}{i}" for x in ("q", "k", "v", "o", "do", "dq", "dk", "dv", "rows", "columns") for i in "bnh"),
]  # fmt: skip


@triton.jit
def _step(state, q, k, v, column_part, rows, index, end, row, column, scale, grid, head):
    """Add the tile of keys at (row, column), where k and v begin. state: accumulators [M, d], and the running maximum
    and sum [M]. index, end: the queries. The maximum, column_part and scale are multiplied by `log_unit`."""
    acc, m, total = state
    T: tl.constexpr = k.ptr.dtype.element_ty
    keys, limit = tile_keys(grid, row, column)
    s = dot(q, load(k, keys, limit, head, not grid.EVEN), head) * scale + column_part
    of_rows = row_bias(rows, index, end, grid, row) * log_unit(T)
    if grid.GRID_ROWS == 1:
        m_new = tl.maximum(m, tl.max(s, 1) + of_rows)
        shift = m_new - of_rows
    else:
        s = add_rows(s, of_rows, grid)
        m_new = tl.maximum(m, tl.max(s, 1))
        shift = m_new
    p = exponential(s - shift[:, None], T)
    rescale = exponential(m - m_new, T)
    total = total * rescale + tl.sum(p, 1)
    v = load(v, keys, limit, head, not grid.EVEN)
    acc = add_dot(scaled(acc, rescale[:, None], head), p.to(v[0].dtype), v, head)
    return acc, m_new, total


@triton.jit
def _attend(q, k, v, rows, columns, o, lse_ptr, at, scale, grid, head, BLOCK_M: tl.constexpr):
    """Compute BLOCK_M rows of one head over all keys."""
    index, end = query_index(at, grid, at.first, BLOCK_M)
    queries = load(queries_from(q, at, grid, at.first), index, end, head, True)
    rows, columns = queries_from(rows, at, grid, at.first), queries_from(columns, at, grid, at.first)
    T: tl.constexpr = q.ptr.dtype.element_ty
    # finite, so that a tile whose keys are all hidden by minus infinity adds nothing
    state = zeros(BLOCK_M, head), tl.full([BLOCK_M], -1e38, tl.float32), tl.zeros([BLOCK_M], tl.float32)
    tl.assume(grid.height > 0)
    for column in range(0, grid.width, grid.GRID_COLUMNS):
        keys = tl.arange(0, grid.KEYS)
        column_part = column_bias(columns, index, end, keys, grid, column) * log_unit(T)
        at_k, at_v = keys_from(k, at, grid, 0, column), keys_from(v, at, grid, 0, column)
        for row in range(0, grid.height, grid.GRID_ROWS):
            state = _step(
                state, queries, at_k, at_v, column_part, rows, index, end, row, column, scale * log_unit(T), grid, head
            )
            at_k, at_v = below(at_k, grid), below(at_v, grid)
    acc, m, total = state
    query, left = tl.arange(0, BLOCK_M), at.N - at.first
    total = tl.where(query < left, total, 1.0)
    store_queries(o, scaled(acc, (1.0 / total)[:, None], head), at, grid, head)
    lse = m * (1.0 / log_unit(T)) + tl.log2(total) * ln2()
    tl.store(lse_ptr + at.rows + at.first + query, lse, mask=query < left)


@triton.jit(do_not_specialize=RELATIVE_NOT_SPECIALIZED, launch_metadata=_profiling.attention(2))
def attention_relative_fwd_kernel(
    # inputs. With windows, M is a window's tokens. What is [B, M, ...] or [B, height * width, ...] below is then [B,
    # grid_h * grid_w, ...], while lse and statistics have the windows of all samples for B
    q_ptr,  # [B, M, H, d] T by stride
    k_ptr, v_ptr,  # [B, height * width, H, d] T by stride
    rows_ptr, columns_ptr,  # [B, M, H, height] and [B, M, H, width] T by stride
    # outputs
    o_ptr,  # [B, M, H, d] T, contiguous
    lse_ptr,  # [B, H, M] f32
    # sizes; strides in UNITs of elements, those of rows and columns in OTHER_UNITs; the last dimension is contiguous
    M, H, height, width,
    grid_h, grid_w,  # of the tokens, whose windows are of height x width; None: samples are sequences
    stride_qb, stride_qn, stride_qh,
    stride_kb, stride_kn, stride_kh,
    stride_vb, stride_vn, stride_vh,
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
    stride_ob = tl.cast(in_sample, tl.int64) * H * HEAD_DIM
    _attend(
        Tokens(q_ptr, stride_qb, stride_qn, stride_qh, UNIT),
        Tokens(k_ptr, stride_kb, stride_kn, stride_kh, UNIT),
        Tokens(v_ptr, stride_vb, stride_vn, stride_vh, UNIT),
        Tokens(rows_ptr, stride_rowsb, stride_rowsn, stride_rowsh, OTHER_UNIT),
        Tokens(columns_ptr, stride_columnsb, stride_columnsn, stride_columnsh, OTHER_UNIT),
        Tokens(o_ptr, stride_ob, H * HEAD_DIM, HEAD_DIM, 1),
        lse_ptr,
        at,
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
    )
