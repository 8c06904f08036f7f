"""Matmuls with an epilogue: the output tile is finished while it is in registers.

    linear:       out = residual + row_scale * layer_scale * act(x @ w.T + b)        and, in training, pre = x @ w.T + b
    linear_dact:  dpre = (dy @ w) * act'(pre),   h = act(pre),   dbias = sum(dpre)   over rows
    act_bwd:      dpre = dy * act'(pre),   dbias = sum(dpre)

linear_dact is the backward pass of an MLP's fc2 and of the activation before it; h is recomputed for fc2's weight
gradient. act_bwd does the same after a matmul of the vendor library. Accumulation and epilogues are float32. Sums over
rows are stored per row tile, and column_sum.py adds them up in a fixed order: bitwise reproducible, no atomics.
"""

import triton
import triton.language as tl

from fastvit.kernels import _profiling
from fastvit.kernels._math import activate, activate_with_grad, columns_part


@triton.jit
def tile_of(tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Return the row tile and column tile of a number. Tiles of about the same number share GROUP_M row tiles of A and
    all columns of B, so that both stay in the L2 cache."""
    group = GROUP_M * tl.cdiv(N, BLOCK_N)
    first = tile // group * GROUP_M
    height = min(tl.cdiv(M, BLOCK_M) - first, GROUP_M)
    return (first + tile % group % height).to(tl.int64), tile % group // height


@triton.jit
def program_tile(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Return the row tile and column tile of this program."""
    return tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)


@triton.jit
def rows_of(tile_m, BLOCK_M: tl.constexpr):
    return tile_m * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]  # [BLOCK_M, 1] int64


@triton.jit
def cols_of(tile_n, BLOCK_N: tl.constexpr):
    return tile_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]  # [1, BLOCK_N]


@triton.jit
def matmul_tile(
    a_ptr,  # [M, K], unit stride along K
    b_ptr,  # [K, N] by strides
    rows, cols,
    M, N, K,
    stride_am, stride_bk, stride_bn,
    EVEN_K: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return (A @ B)[rows, cols] f32, zero outside M x N. EVEN_K: BLOCK_K divides K, so that K needs no mask.
    PRECISION: tl.dot's input_precision."""
    ks = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + rows * stride_am + ks[None, :]
    b_ptrs = b_ptr + ks[:, None].to(tl.int64) * stride_bk + cols.to(tl.int64) * stride_bn
    acc = tl.zeros([rows.shape[0], cols.shape[1]], tl.float32)
    tl.assume(K > 0)  # a loop that may not run costs registers and moves: its result is either zeros or wgmma's
    for k in range(0, K, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptrs, mask=rows < M, other=0.0)
            b = tl.load(b_ptrs, mask=cols < N, other=0.0)
        else:
            a = tl.load(a_ptrs, mask=(rows < M) & (ks[None, :] < K - k), other=0.0)
            b = tl.load(b_ptrs, mask=(cols < N) & (ks[:, None] < K - k), other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K * stride_bk
    return acc


@triton.jit
def load_columns(ptr, cols, N):
    """Load [1, BLOCK_N] f32."""
    return tl.load(ptr + cols, mask=cols < N, other=0.0).to(tl.float32)


@triton.jit
def described_tile(
    a, b,  # descriptors of [M, K] and of [N, K]
    bias_ptr,  # [N] or None
    tile_m, tile_n, N, K,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return a tile of A @ B.T + bias, f32. TMA copies the operands to shared memory: no thread computes an address,
    and beyond the ends it fills in zeros. The sum starts at the bias, which is loaded while the first copies run."""
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if bias_ptr is not None:
        acc += load_columns(bias_ptr, cols_of(tile_n, BLOCK_N), N)
    tl.assume(K > 0)
    for k in range(0, K, BLOCK_K):
        x = a.load([tile_m.to(tl.int32) * BLOCK_M, k])
        acc = tl.dot(x, b.load([tile_n * BLOCK_N, k]).T, acc, input_precision=PRECISION)
    return acc


@triton.jit
def addresses(ptr, tile_m, cols, stride, BLOCK_M: tl.constexpr):
    """Return pointers to columns of row tile `tile_m`. Offsets count from its first row: 32 bits take fewer
    registers."""
    return ptr + tile_m * BLOCK_M * stride + (tl.arange(0, BLOCK_M)[:, None] * stride + cols)


@triton.jit
def store(ptr, value, tile_m, cols, mask, N):
    tl.store(addresses(ptr, tile_m, cols, N, value.shape[0]), value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def finish_tile(
    acc, tile_m, tile_n,  # [BLOCK_M, BLOCK_N] f32
    bias_ptr, layer_scale_ptr, row_scale_ptr, residual_ptr, out_ptr, pre_ptr,
    M, N, rows_per_sample, stride_rm,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Store a tile of linear_fwd_kernel's results from its sums, PART columns per step. A residual is loaded a step
    ahead."""
    PARTS: tl.constexpr = BLOCK_N // PART
    rows = rows_of(tile_m, BLOCK_M)
    if row_scale_ptr is not None:
        # Sample of each row. It counts from the tile's first sample, so that the division is one of 32-bit numbers.
        start = tile_m * BLOCK_M
        sample = (rows - start + start % rows_per_sample).to(tl.int32) // rows_per_sample + start // rows_per_sample
        row_scale = tl.load(row_scale_ptr + sample, mask=rows < M, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        cols = cols_of(tile_n * PARTS, PART)
        ahead = tl.load(addresses(residual_ptr, tile_m, cols, stride_rm, BLOCK_M), (rows < M) & (cols < N), 0.0)
    for i in tl.static_range(PARTS):
        y = columns_part(acc, i, PARTS)
        cols = cols_of(tile_n * PARTS + i, PART)
        mask = (rows < M) & (cols < N)
        if residual_ptr is not None:
            residual = ahead.to(tl.float32)
            if i + 1 < PARTS:
                after = cols + PART
                ahead = tl.load(
                    addresses(residual_ptr, tile_m, after, stride_rm, BLOCK_M), (rows < M) & (after < N), 0.0
                )
        if bias_ptr is not None:
            y += load_columns(bias_ptr, cols, N)
        if pre_ptr is not None:
            store(pre_ptr, y, tile_m, cols, mask, N)
        y = activate(y, ACTIVATION, out_ptr.dtype.element_ty == tl.float32)
        if layer_scale_ptr is not None:
            y *= load_columns(layer_scale_ptr, cols, N)
        if row_scale_ptr is not None:
            y *= row_scale
        if residual_ptr is not None:
            y += residual
        store(out_ptr, y, tile_m, cols, mask, N)


@triton.jit(do_not_specialize=["M"], launch_metadata=_profiling.matmul("x_ptr"))
def linear_fwd_kernel(
    # inputs
    x_ptr, w_ptr,  # [M, K] and [N, K] T
    bias_ptr, layer_scale_ptr,  # [N] or None
    row_scale_ptr,  # [M / rows_per_sample] or None
    residual_ptr,  # [M, N] or None
    # outputs
    out_ptr,  # [M, N]
    pre_ptr,  # [M, N] or None: the activation's input
    # sizes; strides in elements, the last dimension is contiguous
    M, N, K, rows_per_sample,
    stride_xm, stride_wn, stride_rm,
    TMA: tl.constexpr,
    ACTIVATION: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    PART: tl.constexpr = 32,  # columns per step of the epilogue
):  # fmt: skip
    """Tiles of BLOCK_M x BLOCK_N of the output, one for each program; grid: row tiles x column tiles, flattened.

    TMA: the grid is persistent, and each program computes every num_programs-th tile, so that it describes the operands
    only once. x, w and their rows begin at multiples of 16 bytes. EVEN_K is not used."""
    if TMA:
        x = tl.make_tensor_descriptor(x_ptr, [M, K], [stride_xm, 1], [BLOCK_M, BLOCK_K])
        w = tl.make_tensor_descriptor(w_ptr, [N, K], [stride_wn, 1], [BLOCK_N, BLOCK_K])
        tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
        # addresses that are hoisted out of the loop would take registers in all of it
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), disable_licm=True):
            tile_m, tile_n = tile_of(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
            acc = described_tile(x, w, bias_ptr, tile_m, tile_n, N, K, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K)
            finish_tile(
                acc, tile_m, tile_n, None, layer_scale_ptr, row_scale_ptr, residual_ptr, out_ptr, pre_ptr,
                M, N, rows_per_sample, stride_rm, ACTIVATION, BLOCK_M, BLOCK_N, PART,
            )  # fmt: skip
    else:
        tile_m, tile_n = program_tile(M, N, BLOCK_M, BLOCK_N, GROUP_M)
        acc = matmul_tile(
            x_ptr, w_ptr, rows_of(tile_m, BLOCK_M), cols_of(tile_n, BLOCK_N), M, N, K, stride_xm, 1, stride_wn,
            EVEN_K, BLOCK_K, PRECISION,
        )  # fmt: skip
        finish_tile(
            acc, tile_m, tile_n, bias_ptr, layer_scale_ptr, row_scale_ptr, residual_ptr, out_ptr, pre_ptr,
            M, N, rows_per_sample, stride_rm, ACTIVATION, BLOCK_M, BLOCK_N, PART,
        )  # fmt: skip


@triton.jit(do_not_specialize=["M"], launch_metadata=_profiling.matmul("dy_ptr"))
def linear_dact_kernel(
    # inputs
    dy_ptr, w_ptr, pre_ptr,  # [M, K], [K, N] and [M, N] T
    # outputs
    dpre_ptr, h_ptr,  # [M, N] T
    partial_ptr,  # [row tiles, N] f32: dbias
    # sizes; strides in elements, the last dimension is contiguous
    M, N, K,
    stride_dym, stride_wk, stride_pm,
    ACTIVATION: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    PART: tl.constexpr = 32,  # columns per step of the epilogue
):  # fmt: skip
    """Tiles and grid as in linear_fwd_kernel, without TMA."""
    tile_m, tile_n = program_tile(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    rows = rows_of(tile_m, BLOCK_M)
    acc = matmul_tile(
        dy_ptr, w_ptr, rows, cols_of(tile_n, BLOCK_N), M, N, K, stride_dym, stride_wk, 1, EVEN_K, BLOCK_K, PRECISION
    )
    PARTS: tl.constexpr = BLOCK_N // PART
    for i in tl.static_range(PARTS):
        cols = cols_of(tile_n * PARTS + i, PART)
        mask = (rows < M) & (cols < N)
        dh = columns_part(acc, i, PARTS)
        pre = tl.load(addresses(pre_ptr, tile_m, cols, stride_pm, BLOCK_M), mask=mask, other=0.0).to(tl.float32)
        h, grad = activate_with_grad(pre, ACTIVATION, h_ptr.dtype.element_ty == tl.float32)
        dpre = dh * grad
        store(h_ptr, h, tile_m, cols, mask, N)
        store(dpre_ptr, dpre, tile_m, cols, mask, N)
        tl.store(partial_ptr + tile_m * N + cols, tl.sum(dpre, 0)[None, :], mask=cols < N)


@triton.jit(do_not_specialize=["M"], launch_metadata=_profiling.rows("pre_ptr", columns="N"))
def act_bwd_kernel(
    # inputs
    dy_ptr, pre_ptr,  # [M, N]
    # outputs
    dpre_ptr,  # [M, N]
    h_ptr,  # [M, N] or None: act(pre)
    partial_ptr,  # [row tiles, N] f32: dbias
    # sizes; strides in elements, the last dimension is contiguous
    M, N: tl.constexpr,
    stride_dym: tl.constexpr, stride_pm: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """One program takes STEPS x BLOCK_M rows and BLOCK_N columns; grid: row tiles x column tiles, flattened."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile_m = (tl.program_id(0) // tiles_n).to(tl.int64)
    cols = cols_of(tl.program_id(0) % tiles_n, BLOCK_N)
    dbias = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(STEPS):
        rows = rows_of(tile_m * STEPS + step, BLOCK_M)
        mask = (rows < M) & (cols < N)
        dy = tl.load(dy_ptr + rows * stride_dym + cols, mask=mask, other=0.0).to(tl.float32)
        pre = tl.load(pre_ptr + rows * stride_pm + cols, mask=mask, other=0.0).to(tl.float32)
        h, grad = activate_with_grad(pre, ACTIVATION, dpre_ptr.dtype.element_ty == tl.float32)
        dpre = dy * grad
        store(dpre_ptr, dpre, tile_m * STEPS + step, cols, mask, N)
        if h_ptr is not None:
            store(h_ptr, h, tile_m * STEPS + step, cols, mask, N)
        dbias += dpre
    tl.store(partial_ptr + tile_m * N + cols, tl.sum(dbias, 0)[None, :], mask=cols < N)
