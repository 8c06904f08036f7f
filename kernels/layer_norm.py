"""LayerNorm (Ba et al. 2016) and RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) over rows, with the residual add,
LayerScale and DropPath in the same pass.

    s = residual + row_scale * layer_scale * branch        (or s = x, the norm alone)
    x^ = (s - mean) * rstd,   y = x^ * w + b               (RMSNorm: mean = 0, b = 0, and no mean(g) below)
    g = dy * w,   ds = rstd * (g - mean(g) - x^ * mean(g * x^)) + dsum
    dw = sum(dy * x^),   db = sum(dy),   dlayer_scale = sum(row_scale * branch * ds),   total = sum(row_scale * dsum)

A program holds whole rows in registers, so every tensor is read or written once. All arithmetic is float32; the
variance is that of centred values, masked lanes excluded. The programs of a persistent grid keep sums over rows, and
column_sum.py adds them up in a fixed order: bitwise reproducible, no atomics. `total` is the column sum of dsum, so
that the gradient of a bias added before the residual needs no extra pass over dsum.

D and the strides are compile-time constants, so that the compiler knows the alignment of any width, not only of
multiples of 16.
"""

import triton
import triton.language as tl

from fastvit.kernels import _profiling


@triton.jit
def _row_tile(pid, M, D, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return row and column indices of a program's tile, and which of its elements exist."""
    rows = pid * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)  # [BLOCK_M]
    cols = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    mask = (rows < M)[:, None] & (cols < D)[None, :]
    return rows, cols, mask


@triton.jit
def _load_rows(ptr, rows, cols, mask, stride):
    """Load [BLOCK_M, BLOCK_D] f32, zero outside the mask."""
    return tl.load(ptr + rows[:, None] * stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _load_columns(ptr, cols, D):
    """Load [1, BLOCK_D] f32."""
    return tl.load(ptr + cols, mask=cols < D, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _store_rows(ptr, value, rows, cols, mask, D):
    tl.store(ptr + rows[:, None] * D + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _sample_scales(row_scale_ptr, rows, M, rows_per_sample, HAS_ROW_SCALE: tl.constexpr):
    """Return the row_scale of each row's sample, or 1 without: [BLOCK_M, 1] f32."""
    row_scale = tl.full([rows.shape[0], 1], 1.0, tl.float32)
    if HAS_ROW_SCALE:
        sample = rows // rows_per_sample
        row_scale = tl.load(row_scale_ptr + sample, mask=rows < M, other=0.0).to(tl.float32)[:, None]
    return row_scale


@triton.jit(do_not_specialize=["M"], launch_metadata=_profiling.rows("s_ptr"))
def layer_norm_fwd_kernel(
    # inputs; s is x or, with a branch, the residual
    s_ptr,  # [M, D] T
    branch_ptr,  # [M, D] T or None
    w_ptr,  # [D]
    b_ptr,  # [D] or None
    layer_scale_ptr,  # [D] or None
    row_scale_ptr,  # [M / rows_per_sample] or None
    # outputs
    sum_ptr,  # [M, D] T, with a branch
    y_ptr,  # [M, D]
    mean_ptr,  # [M] f32; None: RMSNorm
    rstd_ptr,  # [M] f32
    # sizes; strides in elements, the last dimension is contiguous
    M, D: tl.constexpr, rows_per_sample,
    stride_sm: tl.constexpr, stride_bm: tl.constexpr,
    eps: tl.float32,
    HAS_ROW_SCALE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A persistent grid: each program normalises every num_programs-th row tile and loads the parameters once."""
    cols = tl.arange(0, BLOCK_D)
    w = _load_columns(w_ptr, cols, D)
    if b_ptr is not None:
        b = _load_columns(b_ptr, cols, D)
    layer_scale = tl.full([1, BLOCK_D], 1.0, tl.float32)
    if layer_scale_ptr is not None:
        layer_scale = _load_columns(layer_scale_ptr, cols, D)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        rows, cols, mask = _row_tile(tile, M, D, BLOCK_M, BLOCK_D)
        s = _load_rows(s_ptr, rows, cols, mask, stride_sm)
        if branch_ptr is not None:
            row_scale = _sample_scales(row_scale_ptr, rows, M, rows_per_sample, HAS_ROW_SCALE)
            s += row_scale * layer_scale * _load_rows(branch_ptr, rows, cols, mask, stride_bm)
            _store_rows(sum_ptr, s, rows, cols, mask, D)
            s = s.to(sum_ptr.dtype.element_ty).to(tl.float32)  # what the backward pass will read

        if mean_ptr is not None:
            mean = tl.sum(s, 1)[:, None] / D
            s = tl.where(mask, s - mean, 0.0)
            tl.store(mean_ptr + rows[:, None], mean, mask=(rows < M)[:, None])
        rstd = tl.rsqrt(tl.sum(s * s, 1)[:, None] / D + eps)
        y = s * (rstd * w)  # (s * rstd) * w spills 8 bytes on sm_90 in RMSNorm
        if b_ptr is not None:
            y += b

        _store_rows(y_ptr, y, rows, cols, mask, D)
        tl.store(rstd_ptr + rows[:, None], rstd, mask=(rows < M)[:, None])


@triton.jit(do_not_specialize=["M"], launch_metadata=_profiling.rows("s_ptr"))
def layer_norm_bwd_kernel(
    # inputs
    dy_ptr,  # [M, D]
    dsum_ptr,  # [M, D] or None: gradient of s from its other use, the residual path
    s_ptr,  # [M, D]
    mean_ptr,  # [M] f32; None: RMSNorm
    rstd_ptr,  # [M] f32
    w_ptr,  # [D]
    b_ptr,  # [D] or None, to recompute y
    branch_ptr,  # [M, D] or None, with layer_scale
    layer_scale_ptr,  # [D] or None
    row_scale_ptr,  # [M / rows_per_sample] or None
    # outputs
    ds_ptr,  # [M, D]
    dbranch_ptr,  # [M, D] or None
    y_ptr,  # [M, D] or None: y recomputed, for the weight gradient of the next matmul
    partial_ptr,  # [1 to 4, programs, D] f32: dw; db, not for RMSNorm; dlayer_scale and total if wanted
    # sizes; strides in elements, the last dimension is contiguous
    M, D: tl.constexpr, rows_per_sample,
    stride_dym: tl.constexpr, stride_dsm: tl.constexpr, stride_sm: tl.constexpr, stride_bm: tl.constexpr,
    WANT_TOTAL: tl.constexpr, HAS_ROW_SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A persistent grid: each program takes every num_programs-th row tile and keeps partial column sums."""
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    cols = tl.arange(0, BLOCK_D)
    w = _load_columns(w_ptr, cols, D)
    if b_ptr is not None:
        b = _load_columns(b_ptr, cols, D)
    layer_scale = tl.full([1, BLOCK_D], 1.0, tl.float32)
    if layer_scale_ptr is not None:
        layer_scale = _load_columns(layer_scale_ptr, cols, D)
    dw = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    db = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dlayer_scale = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    for tile in tl.range(pid, tl.cdiv(M, BLOCK_M), programs, num_stages=STAGES):
        rows, cols, mask = _row_tile(tile, M, D, BLOCK_M, BLOCK_D)
        s = _load_rows(s_ptr, rows, cols, mask, stride_sm)
        dy = _load_rows(dy_ptr, rows, cols, mask, stride_dym)
        if mean_ptr is not None:
            s -= tl.load(mean_ptr + rows, mask=rows < M, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)[:, None]

        normalised = s * rstd
        if y_ptr is not None:
            y = normalised * w
            if b_ptr is not None:
                y += b
            _store_rows(y_ptr, y, rows, cols, mask, D)
        g = dy * w
        if mean_ptr is not None:
            # both sums over a row at once: half the barriers
            mean_g, mean_gx = (tl.sum(tl.join(g, g * normalised), 1) / D)[:, None, :].split()
            ds = rstd * (g - mean_g - normalised * mean_gx)
        else:
            ds = rstd * (g - normalised * (tl.sum(g * normalised, 1) / D)[:, None])
        row_scale = _sample_scales(row_scale_ptr, rows, M, rows_per_sample, HAS_ROW_SCALE)
        if dsum_ptr is not None:
            dsum = _load_rows(dsum_ptr, rows, cols, mask, stride_dsm)
            ds += dsum
            if WANT_TOTAL:
                total += row_scale * dsum
        _store_rows(ds_ptr, ds, rows, cols, mask, D)
        dw += dy * normalised
        if mean_ptr is not None:
            db += dy

        if dbranch_ptr is not None:
            ds *= row_scale
            _store_rows(dbranch_ptr, ds * layer_scale, rows, cols, mask, D)
            if layer_scale_ptr is not None:
                dlayer_scale += ds * _load_rows(branch_ptr, rows, cols, mask, stride_bm)

    # The wanted partial sums are stored one after another.
    partial = partial_ptr + pid.to(tl.int64) * D + cols
    tl.store(partial, tl.sum(dw, 0), mask=cols < D)
    if mean_ptr is not None:
        partial += programs.to(tl.int64) * D
        tl.store(partial, tl.sum(db, 0), mask=cols < D)
    if layer_scale_ptr is not None:
        partial += programs.to(tl.int64) * D
        tl.store(partial, tl.sum(dlayer_scale, 0), mask=cols < D)
    if WANT_TOTAL:
        partial += programs.to(tl.int64) * D
        tl.store(partial, tl.sum(total, 0), mask=cols < D)
