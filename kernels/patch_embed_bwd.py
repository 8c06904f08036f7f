"""Gradients of the patch embedding, implicit GEMMs like the forward pass (patch_embed.py).

    dW = sum over b, t of dout x^T,   dx = W^T dout

The gradient of the image is scattered by address; patches do not overlap, so no two programs write the same pixel. The
gradient of the weight is split over rows into float32 partial sums, which are then added up in a fixed order. Matmuls
accumulate in float32: bitwise reproducible, no atomics.
"""

import triton
import triton.language as tl

from fastvit.kernels import _profiling
from fastvit.kernels._math import columns_part
from fastvit.kernels.patch_embed import load_pixels, patch_origin, pixel_offset, reciprocal_of, token_of


@triton.jit(do_not_specialize=["M", "stride_b"], launch_metadata=_profiling.patches("dout_ptr"))
def patch_embed_bwd_weight_kernel(
    # inputs
    dout_ptr,  # [M, D] T, M = B * N
    image_ptr,  # [B, C, H, W] or [B, C / PT, T, H, W], T or uint8, pixels of a row contiguous
    normalize_ptr,  # [2, C or C / PT] f32, or None
    # output
    partial_ptr,  # [splits, D, K] f32, or T for one split
    # sizes; image strides in UNITs of elements
    M, N, P, D, grid_w,
    rows_per_split,  # a multiple of BLOCK_M
    stride_dm, stride_b, stride_c, stride_h,
    grid_h, stride_t,  # of a video; 1 and 0 for images
    C: tl.constexpr, PT: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,  # PT: 0 for images
    UNIT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program sums a BLOCK_D x BLOCK_K tile of dW over the rows of one split. Neighbours share the rows."""
    K: tl.constexpr = C * PH * PW
    tiles_k = tl.cdiv(K, BLOCK_K)
    tiles = tl.cdiv(D, BLOCK_D) * tiles_k
    split = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    col = tile // tiles_k * BLOCK_D + tl.arange(0, BLOCK_D)
    k = tile % tiles_k * BLOCK_K + tl.arange(0, BLOCK_K)

    in_patch = (k < K) | (K % BLOCK_K == 0)
    reciprocal_n, reciprocal_w, reciprocal_h = reciprocal_of(N), reciprocal_of(grid_w), reciprocal_of(grid_h)

    acc = tl.zeros([BLOCK_D, BLOCK_K], tl.float32)
    first = split * rows_per_split
    stop = tl.minimum(first + rows_per_split, M)
    tl.assume(first < stop)  # with a loop that may not run, ptxas 12.8 serialises wgmma
    for start in range(first, stop, BLOCK_M):
        row = start + tl.arange(0, BLOCK_M)
        b, t, exists = token_of(row, M, N, P, reciprocal_n)
        at = row[:, None].to(tl.int64) * stride_dm + col[None, :]
        # Rows without a patch add nothing: dout is 0 there, and the pixels are those of the first patch.
        dout = tl.load(dout_ptr + at, mask=exists[:, None] & (col < D)[None, :], other=0.0)
        origin = patch_origin(
            b, t, exists, grid_w, reciprocal_w, grid_h, reciprocal_h, stride_b, stride_h, stride_t, PT, PH, PW, UNIT
        )
        x = load_pixels(
            image_ptr, normalize_ptr, origin, k, in_patch, stride_c, stride_h, stride_t,
            C, PT, PH, PW, UNIT, PRECISION, dout.dtype,
        )  # fmt: skip
        acc = tl.dot(tl.trans(dout), x, acc, input_precision=PRECISION)

    at = (split.to(tl.int64) * D + col)[:, None] * K + k[None, :]
    tl.store(partial_ptr + at, acc.to(partial_ptr.dtype.element_ty), mask=(col < D)[:, None] & (k < K)[None, :])


@triton.jit
def _store_pixels(
    x, dimage_ptr, origin, exists, k, stride_c, stride_h, stride_t,
    C: tl.constexpr, PT: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    at = origin[:, None] + pixel_offset(k, stride_c, stride_h, stride_t, PT, PH, PW, UNIT)[None, :]
    tl.store(dimage_ptr + at, x.to(dimage_ptr.dtype.element_ty), mask=exists[:, None] & (k < C * PH * PW)[None, :])


@triton.jit(do_not_specialize=["M", "stride_b"], launch_metadata=_profiling.patches("weight_ptr"))
def patch_embed_bwd_image_kernel(
    # inputs
    dout_ptr,  # [M, D], M = B * N
    weight_ptr,  # [D, K] T
    # output
    dimage_ptr,  # [B, C, H, W] or [B, C / PT, T, H, W] float, pixels of a row contiguous
    # sizes; image strides in UNITs of elements
    M, N, P, D, grid_w,
    stride_dm, stride_b, stride_c, stride_h,
    grid_h, stride_t,  # of a video; 1 and 0 for images
    C: tl.constexpr, PT: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,  # PT: 0 for images
    UNIT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_K pixels of each of BLOCK_M patches."""
    K: tl.constexpr = C * PH * PW
    tiles_k = tl.cdiv(K, BLOCK_K)
    row = tl.program_id(0) // tiles_k * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.program_id(0) % tiles_k * BLOCK_K + tl.arange(0, BLOCK_K)
    dout_row = dout_ptr + row[:, None].to(tl.int64) * stride_dm
    weight = tl.arange(0, BLOCK_D)[:, None] * K + k[None, :]  # fits int32, which the launcher checks

    acc = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for start in range(0, D, BLOCK_D):
        col = start + tl.arange(0, BLOCK_D)
        dout = tl.load(dout_row + col[None, :], mask=(row < M)[:, None] & (col < D)[None, :], other=0.0)
        w = tl.load(weight_ptr + weight, mask=(col < D)[:, None] & (k < K)[None, :], other=0.0)  # [BLOCK_D, BLOCK_K]
        acc = tl.dot(dout, w, acc, input_precision=PRECISION)
        weight_ptr += BLOCK_D * K

    # Computed after the loop: before it, it would hold registers throughout.
    b, t, exists = token_of(row, M, N, P, reciprocal_of(N))
    origin = patch_origin(
        b, t, exists, grid_w, reciprocal_of(grid_w), grid_h, reciprocal_of(grid_h), stride_b, stride_h, stride_t,
        PT, PH, PW, UNIT,
    )  # fmt: skip
    for i in tl.static_range(2):
        part = columns_part(acc, i, 2)
        k = tl.program_id(0) % tiles_k * BLOCK_K + i * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
        _store_pixels(part, dimage_ptr, origin, exists, k, stride_c, stride_h, stride_t, C, PT, PH, PW, UNIT)
