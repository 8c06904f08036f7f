"""Gated linear layers: two matmuls of the same rows, whose results are multiplied while both are in registers.

    gated:       h = act(gate) * value,   gate = x @ wg.T + bg,   value = x @ wv.T + bv     and, in training, pre
    gated_dact:  dh = dy @ w,   dgate = dh * value * act'(gate),   dvalue = dh * act(gate),
                 h = act(gate) * value,   dbias = sums of dgate and dvalue over rows
    gated_act:   h = act(gate) * value   and, given dh, the other results of gated_dact

gated_dact is the backward pass of an MLP's fc2 and of the gate before it; h is recomputed for fc2's weight gradient.
pre holds gate and value next to each other in one row, [M, 2 * N], and so does dpre their gradients: the next product
with them is then one matmul. Accumulation and epilogues are float32. Sums over rows are stored per row tile, and
column_sum.py adds them up in a fixed order: bitwise reproducible, no atomics.
"""

import triton
import triton.language as tl

from fastvit.kernels import _profiling
from fastvit.kernels._math import activate, activate_with_grad, columns_part
from fastvit.kernels.linear import addresses, cols_of, load_columns, matmul_tile, program_tile, rows_of, store


@triton.jit
def _matmul_pair(
    a_ptr,  # [M, K]
    b_ptr, c_ptr,  # [N, K] each; unit strides along K
    rows, cols,
    M, N, K,
    stride_am, stride_bn, stride_cn,
    EVEN_K: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return (A @ B.T)[rows, cols] and (A @ C.T)[rows, cols] as `matmul_tile` does; A is loaded once for both."""
    ks = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + rows * stride_am + ks[None, :]
    b_ptrs = b_ptr + ks[:, None] + cols.to(tl.int64) * stride_bn
    c_ptrs = c_ptr + ks[:, None] + cols.to(tl.int64) * stride_cn
    first = tl.zeros([rows.shape[0], cols.shape[1]], tl.float32)
    second = tl.zeros([rows.shape[0], cols.shape[1]], tl.float32)
    tl.assume(K > 0)  # as in `matmul_tile`
    for k in range(0, K, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptrs, mask=rows < M, other=0.0)
            b = tl.load(b_ptrs, mask=cols < N, other=0.0)
            c = tl.load(c_ptrs, mask=cols < N, other=0.0)
        else:
            a = tl.load(a_ptrs, mask=(rows < M) & (ks[None, :] < K - k), other=0.0)
            b = tl.load(b_ptrs, mask=(cols < N) & (ks[:, None] < K - k), other=0.0)
            c = tl.load(c_ptrs, mask=(cols < N) & (ks[:, None] < K - k), other=0.0)
        first = tl.dot(a, b, first, input_precision=PRECISION)
        second = tl.dot(a, c, second, input_precision=PRECISION)
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K
        c_ptrs += BLOCK_K
    return first, second


@triton.jit
def _gate_with_grad(dh, gate, value, ACTIVATION: tl.constexpr, EXACT: tl.constexpr):
    """Return h, dgate and dvalue."""
    a, grad = activate_with_grad(gate, ACTIVATION, EXACT)
    return a * value, dh * value * grad, dh * a


@triton.jit(do_not_specialize=["M"], launch_metadata=_profiling.matmul("x_ptr", matmuls=2))
def gated_fwd_kernel(
    # inputs
    x_ptr, gate_ptr, value_ptr,  # [M, K], [N, K] and [N, K] T
    gate_bias_ptr, value_bias_ptr,  # [N] or None
    # outputs
    h_ptr,  # [M, N] T
    pre_ptr,  # [M, 2 * N] T or None: gate and value
    # sizes; strides in elements, the last dimension is contiguous
    M, N, K,
    stride_xm, stride_gn, stride_vn,
    ACTIVATION: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    PART: tl.constexpr = 32,  # columns per step of the epilogue
):  # fmt: skip
    """One program computes a BLOCK_M x BLOCK_N tile of h; grid: row tiles x column tiles, flattened."""
    tile_m, tile_n = program_tile(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    rows = rows_of(tile_m, BLOCK_M)
    gates, values = _matmul_pair(
        x_ptr, gate_ptr, value_ptr, rows, cols_of(tile_n, BLOCK_N), M, N, K, stride_xm, stride_gn, stride_vn,
        EVEN_K, BLOCK_K, PRECISION,
    )  # fmt: skip
    PARTS: tl.constexpr = BLOCK_N // PART
    for i in tl.static_range(PARTS):
        gate, value = columns_part(gates, i, PARTS), columns_part(values, i, PARTS)
        cols = cols_of(tile_n * PARTS + i, PART)
        mask = (rows < M) & (cols < N)
        if gate_bias_ptr is not None:
            gate += load_columns(gate_bias_ptr, cols, N)
        if value_bias_ptr is not None:
            value += load_columns(value_bias_ptr, cols, N)
        if pre_ptr is not None:
            store(pre_ptr, gate, tile_m, cols, mask, 2 * N)
            store(pre_ptr + N, value, tile_m, cols, mask, 2 * N)
        h = activate(gate, ACTIVATION, h_ptr.dtype.element_ty == tl.float32) * value
        store(h_ptr, h, tile_m, cols, mask, N)


@triton.jit(do_not_specialize=["M"], launch_metadata=_profiling.matmul("dy_ptr"))
def gated_dact_kernel(
    # inputs
    dy_ptr, w_ptr, pre_ptr,  # [M, K], [K, N] and [M, 2 * N] T
    # outputs
    dpre_ptr, h_ptr,  # [M, 2 * N] and [M, N] T
    partial_ptr,  # [row tiles, 2 * N] f32: dbias
    # sizes; strides in elements, the last dimension is contiguous
    M, N, K,
    stride_dym, stride_wk, stride_pm,
    ACTIVATION: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    PART: tl.constexpr = 32,  # columns per step of the epilogue
):  # fmt: skip
    """Tiles and grid as in gated_fwd_kernel."""
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
        pre = addresses(pre_ptr, tile_m, cols, stride_pm, BLOCK_M)
        gate = tl.load(pre, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(pre + N, mask=mask, other=0.0).to(tl.float32)
        h, dgate, dvalue = _gate_with_grad(dh, gate, value, ACTIVATION, h_ptr.dtype.element_ty == tl.float32)
        store(h_ptr, h, tile_m, cols, mask, N)
        store(dpre_ptr, dgate, tile_m, cols, mask, 2 * N)
        store(dpre_ptr + N, dvalue, tile_m, cols, mask, 2 * N)
        partial = partial_ptr + tile_m * 2 * N + cols
        tl.store(partial, tl.sum(dgate, 0)[None, :], mask=cols < N)
        tl.store(partial + N, tl.sum(dvalue, 0)[None, :], mask=cols < N)


@triton.jit(do_not_specialize=["M"], launch_metadata=_profiling.rows("pre_ptr", columns="N"))
def gated_act_kernel(
    # inputs
    dh_ptr,  # [M, N] T, or None for h alone
    pre_ptr,  # [M, 2 * N] T: gate and value
    # outputs
    dpre_ptr, h_ptr,  # [M, 2 * N] and [M, N] T or None
    partial_ptr,  # [row tiles, 2 * N] f32: dbias, or None
    # sizes; strides in elements, the last dimension is contiguous
    M, N: tl.constexpr,
    stride_dhm: tl.constexpr, stride_pm: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """One program takes STEPS x BLOCK_M rows and BLOCK_N columns of each half; grid: row tiles x column tiles,
    flattened."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile_m = (tl.program_id(0) // tiles_n).to(tl.int64)
    cols = cols_of(tl.program_id(0) % tiles_n, BLOCK_N)
    EXACT: tl.constexpr = pre_ptr.dtype.element_ty == tl.float32
    gate_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    value_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(STEPS):
        tile = tile_m * STEPS + step
        rows = rows_of(tile, BLOCK_M)
        mask = (rows < M) & (cols < N)
        gate = tl.load(pre_ptr + rows * stride_pm + cols, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(pre_ptr + N + rows * stride_pm + cols, mask=mask, other=0.0).to(tl.float32)
        if dh_ptr is None:
            store(h_ptr, activate(gate, ACTIVATION, EXACT) * value, tile, cols, mask, N)
        else:
            dh = tl.load(dh_ptr + rows * stride_dhm + cols, mask=mask, other=0.0).to(tl.float32)
            h, dgate, dvalue = _gate_with_grad(dh, gate, value, ACTIVATION, EXACT)
            store(dpre_ptr, dgate, tile, cols, mask, 2 * N)
            store(dpre_ptr + N, dvalue, tile, cols, mask, 2 * N)
            if h_ptr is not None:
                store(h_ptr, h, tile, cols, mask, N)
            gate_sum += dgate
            value_sum += dvalue
    if dh_ptr is not None:
        partial = partial_ptr + tile_m * 2 * N + cols
        tl.store(partial, tl.sum(gate_sum, 0)[None, :], mask=cols < N)
        tl.store(partial + N, tl.sum(value_sum, 0)[None, :], mask=cols < N)
