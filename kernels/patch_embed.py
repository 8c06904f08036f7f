"""Patch embedding of NCHW images as an implicit GEMM (Dosovitskiy et al. 2021). Gradients: patch_embed_bwd.py.

    out[b, P + t, :] = W x(b, t) + bias + pos[t],   out[b, :P, :] = prefix

with x(b, t) the C * PH * PW pixels of patch t, k = (c, i, j). No matrix of patches exists in memory: tiles are gathered
from the image by address. A GEMM row is a token, prefix tokens included: these have no pixels and take their value in
the epilogue, so one launch writes whole rows of the token buffer. Matmuls accumulate in float32.

PH and PW are compile-time, so the compiler sees the runs of PW contiguous pixels: with PW a multiple of 8, 16-bit
images are read 16 bytes at a time; rows of 14 pixels (28 bytes) allow 4. A tile of many patches reads the adjacent
runs of neighbouring patches together.
"""

import triton
import triton.language as tl

from fastvit.kernels import _profiling
from fastvit.kernels._math import columns_part


@triton.jit
def reciprocal_of(d):
    return (tl.full([], 0xFFFFFFFF, tl.int64) // d).to(tl.uint32)


@triton.jit
def _divide(x, d, reciprocal):
    """x // d and x % d for x >= 0: the estimate by the reciprocal is at most one too small. A third of the
    instructions of a division, which would outweigh the matmul where every step of a loop divides."""
    q = tl.umulhi(x.to(tl.uint32), reciprocal).to(tl.int32)
    r = x - q * d
    return tl.where(r >= d, q + 1, q), tl.where(r >= d, r - d, r)


@triton.jit
def token_of(row, M, N, P, reciprocal):
    """Token `row` of [B, N]: image, patch (negative for a prefix token), and whether it is a patch that exists."""
    b, n = _divide(row, N, reciprocal)
    return b, n - P, (row < M) & (n >= P)


@triton.jit
def patch_origin(
    b, t, exists, grid_w, reciprocal, stride_b, stride_h, PH: tl.constexpr, PW: tl.constexpr, UNIT: tl.constexpr
):
    """Offset of the first pixel of patch t of image b, in int64; 0 for no patch. Strides come in UNITs of elements: a
    power of two that divides all of them, so that the compiler knows alignments that it would not specialise on."""
    # chosen before the multiplications: behind a choice, triton 3.9 no longer knows what divides an offset
    b, t = tl.where(exists, b, 0), tl.where(exists, t, 0)
    ty, tx = _divide(t, grid_w, reciprocal)
    return (b.to(tl.int64) * stride_b + ty.to(tl.int64) * (PH * stride_h)) * UNIT + tx * PW


@triton.jit
def pixel_offset(k, stride_c, stride_h, PH: tl.constexpr, PW: tl.constexpr, UNIT: tl.constexpr):
    """Offset of pixel k = (c, i, j) from its patch's first. In int32, which the launcher checks to suffice: int64
    would make the compiler divide in 64 bits."""
    c = k // (PH * PW)
    i = k // PW % PH
    return (c * stride_c + i * stride_h) * UNIT + k % PW


@triton.jit
def load_pixels(
    image_ptr, normalize_ptr,
    origin, k,
    in_patch,  # whether k < K
    stride_c, stride_h,
    C: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """-> [rows, k] in T, normalised if wanted; 0 where not in the patch."""
    at = origin[:, None] + pixel_offset(k, stride_c, stride_h, PH, PW, UNIT)[None, :]
    x = tl.load(image_ptr + at, mask=in_patch[None, :], other=0)
    if normalize_ptr is not None:
        c = k // (PH * PW)
        scale = tl.load(normalize_ptr + c, mask=in_patch, other=0.0)
        shift = tl.load(normalize_ptr + C + c, mask=in_patch, other=0.0)
        # Changes nothing but the layout: without it bytes are loaded in the matmul's, 8 instead of 16 at a time.
        shift = tl.where(k < C * PH * PW, shift, 0.0)
        x = x.to(tl.float32) * scale[None, :] + shift[None, :]
        if x.dtype == T and PRECISION == "ieee":
            # the sum of one element, which is not elementwise: behind elementwise steps alone, triton finds that x was
            # loaded in few bits, and multiplies in TF32 on sm_100 (github.com/triton-lang/triton/issues/10176)
            x = tl.sum(x[:, :, None], 2)
    return x.to(T)


@triton.jit
def _store_tokens(acc, out_ptr, bias_ptr, pos_ptr, prefix_ptr, row, t, exists, col, M, P, D):
    """Patches: bias and position added. Prefix tokens: copied."""
    in_d = (col < D)[None, :]
    out = out_ptr + row[:, None].to(tl.int64) * D + col[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + col, mask=col < D, other=0.0).to(tl.float32)[None, :]
    if pos_ptr is not None:
        at = t[:, None].to(tl.int64) * D + col[None, :]
        acc += tl.load(pos_ptr + at, mask=exists[:, None] & in_d, other=0.0).to(tl.float32)
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=exists[:, None] & in_d)
    if prefix_ptr is not None:
        at = (t + P)[:, None].to(tl.int64) * D + col[None, :]
        wanted = ((row < M) & (t < 0))[:, None] & in_d
        prefix = tl.load(prefix_ptr + at, mask=wanted, other=0.0)
        tl.store(out, prefix.to(out_ptr.dtype.element_ty), mask=wanted)


@triton.jit(do_not_specialize=["M", "stride_b"], launch_metadata=_profiling.of_patches("weight_ptr"))
def patch_embed_fwd_kernel(
    # inputs
    image_ptr,  # [B, C, H, W] float or uint8, pixels of a row contiguous
    weight_ptr,  # [D, K] T, K = C * PH * PW
    bias_ptr,  # [D] or None
    pos_ptr, prefix_ptr,  # [N - P, D] and [P, D], or None
    normalize_ptr,  # [2, C] f32: scale and shift of a channel, or None
    # output
    out_ptr,  # [B, N, D]
    # sizes, M = B * N, grid_w patches in a row of the image; image strides in UNITs of elements
    M, N, P, D, grid_w,
    stride_b, stride_c, stride_h,
    C: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_M tokens x BLOCK_D features. Neighbours share the tokens: the image is read from
    memory once, the weight stays in the L2 cache."""
    K: tl.constexpr = C * PH * PW
    tiles_d = tl.cdiv(D, BLOCK_D)
    row = tl.program_id(0) // tiles_d * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.program_id(0) % tiles_d * BLOCK_D + tl.arange(0, BLOCK_D)
    b, t, exists = token_of(row, M, N, P, reciprocal_of(N))
    # what comes of rows and columns that do not exist is not stored: they load others' values, without a mask
    origin = patch_origin(b, t, exists, grid_w, reciprocal_of(grid_w), stride_b, stride_h, PH, PW, UNIT)
    weight = weight_ptr + tl.where(col < D, col, 0)[None, :].to(tl.int64) * K

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        in_patch = (k < K) | (K % BLOCK_K == 0)
        w = tl.load(weight + k[:, None], mask=in_patch[:, None], other=0.0)  # [BLOCK_K, BLOCK_D]
        x = load_pixels(
            image_ptr, normalize_ptr, origin, k, in_patch, stride_c, stride_h, C, PH, PW, UNIT, PRECISION, w.dtype
        )  # fmt: skip
        acc = tl.dot(x, w, acc, input_precision=PRECISION)

    for i in tl.static_range(2):
        col = tl.program_id(0) % tiles_d * BLOCK_D + i * (BLOCK_D // 2) + tl.arange(0, BLOCK_D // 2)
        part = columns_part(acc, i, 2)
        _store_tokens(part, out_ptr, bias_ptr, pos_ptr, prefix_ptr, row, t, exists, col, M, P, D)
