"""Patch embedding of NCHW images as an implicit GEMM (Dosovitskiy et al. 2021), and of NCTHW videos, whose patches are
tubelets of PT frames (Arnab et al. 2021, arXiv:2103.15691). Gradients: patch_embed_bwd.py.

    out[b, P + t, :] = W x(b, t) + bias + pos[t],   out[b, :P, :] = prefix

where x(b, t) is the C * PH * PW pixels of patch t, with index k = (c, i, j). A tubelet is a patch of C = PT * channels
planes, with c = (channel, frame). Patches are numbered row by row, tubelets frame by frame. The matrix of patches never
exists in memory: tiles are gathered from the image by address. A GEMM row is a token, prefix tokens included: they have
no pixels and get their value in the epilogue, so that one launch writes the whole token buffer. Matmuls accumulate in
float32. Every program writes a tile of its own: bitwise reproducible.

PH and PW are compile-time constants, so that the compiler sees runs of PW contiguous pixels: with PW a multiple of 8,
16-bit images are read 16 bytes at a time; rows of 14 pixels (28 bytes) allow 4. A tile of many patches reads the
adjacent runs of neighbouring patches together.
"""

import triton
import triton.language as tl

from fastvit.kernels import _profiling
from fastvit.kernels._math import columns_part


@triton.jit
def reciprocal_of(d):
    """Return floor((2^32 - 1) / d) as uint32, for `_divide`."""
    return (tl.full([], 0xFFFFFFFF, tl.int64) // d).to(tl.uint32)


@triton.jit
def _divide(x, d, reciprocal):
    """Return x // d and x % d for x >= 0. The estimate from the reciprocal is at most one too small. Takes a third of
    the instructions of a division, which would cost more than the matmul where every step of a loop divides."""
    q = tl.umulhi(x.to(tl.uint32), reciprocal).to(tl.int32)
    r = x - q * d
    return tl.where(r >= d, q + 1, q), tl.where(r >= d, r - d, r)


@triton.jit
def token_of(row, M, N, P, reciprocal):
    """Return image and patch of token `row` of [B, N] (negative for a prefix token), and whether there is such a
    patch."""
    b, n = _divide(row, N, reciprocal)
    return b, n - P, (row < M) & (n >= P)


@triton.jit
def patch_origin(
    b, t, exists, grid_w, reciprocal_w, grid_h, reciprocal_h, stride_b, stride_h, stride_t,
    PT: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Return the int64 offset of the first pixel of patch t of image b; 0 where there is no patch. Strides are in UNITs
    of elements: a power of two that divides all of them, from which the compiler knows alignments that it would not
    specialise on."""
    # tl.where comes before the multiplications: after it, triton 3.9 no longer knows the divisors of an offset.
    b, t = tl.where(exists, b, 0), tl.where(exists, t, 0)
    ty, tx = _divide(t, grid_w, reciprocal_w)
    first = b.to(tl.int64) * stride_b
    if PT > 0:
        tt, ty = _divide(ty, grid_h, reciprocal_h)
        first += tt.to(tl.int64) * (PT * stride_t)
    return (first + ty.to(tl.int64) * (PH * stride_h)) * UNIT + tx * PW


@triton.jit
def pixel_offset(
    k, stride_c, stride_h, stride_t, PT: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, UNIT: tl.constexpr
):
    """Return the offset of pixel k = (c, i, j) from the first one of its patch. int32, which the launcher checks to be
    enough: with int64 the compiler would divide in 64 bits."""
    c = k // (PH * PW)
    i = k // PW % PH
    if PT > 0:
        plane = c // PT * stride_c + c % PT * stride_t
    else:
        plane = c * stride_c
    return (plane + i * stride_h) * UNIT + k % PW


@triton.jit
def load_pixels(
    image_ptr, normalize_ptr,
    origin, k,
    in_patch,  # whether k < K
    stride_c, stride_h, stride_t,
    C: tl.constexpr, PT: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, UNIT: tl.constexpr,
    PRECISION: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Load pixels [rows, k] as T, normalised if normalize_ptr is given; 0 outside in_patch."""
    at = origin[:, None] + pixel_offset(k, stride_c, stride_h, stride_t, PT, PH, PW, UNIT)[None, :]
    x = tl.load(image_ptr + at, mask=in_patch[None, :], other=0)
    if normalize_ptr is not None:
        frames: tl.constexpr = PT if PT > 0 else 1
        c = k // (frames * PH * PW)
        scale = tl.load(normalize_ptr + c, mask=in_patch, other=0.0)
        shift = tl.load(normalize_ptr + C // frames + c, mask=in_patch, other=0.0)
        # Changes the layout only: without it, bytes are loaded in the layout of the matmul, 8 instead of 16 at a time.
        shift = tl.where(k < C * PH * PW, shift, 0.0)
        x = x.to(tl.float32) * scale[None, :] + shift[None, :]
        if x.dtype == T and PRECISION == "ieee":
            # A sum over one element. After elementwise steps alone, triton sees that x was loaded with few bits and
            # multiplies in TF32 on sm_100 (github.com/triton-lang/triton/issues/10176); a sum hides that.
            x = tl.sum(x[:, :, None], 2)
    return x.to(T)


@triton.jit
def _store_tokens(acc, out_ptr, bias_ptr, pos_ptr, prefix_ptr, row, t, exists, col, M, P, D):
    """Store patches with bias and position added, and copies of the prefix tokens."""
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


@triton.jit(do_not_specialize=["M", "stride_b"], launch_metadata=_profiling.patches("weight_ptr"))
def patch_embed_fwd_kernel(
    # inputs
    image_ptr,  # [B, C, H, W] or [B, C / PT, T, H, W], float or uint8, pixels of a row contiguous
    weight_ptr,  # [D, K] T, K = C * PH * PW
    bias_ptr,  # [D] or None
    pos_ptr, prefix_ptr,  # [N - P, D] and [P, D], or None
    normalize_ptr,  # [2, C or C / PT] f32: scale and shift per channel, or None
    # output
    out_ptr,  # [B, N, D]
    # sizes; M = B * N; grid_w: patches in a row; grid_h: rows of patches in a frame; image strides in UNITs of elements
    M, N, P, D, grid_w,
    stride_b, stride_c, stride_h,
    grid_h, stride_t,  # of a video; 1 and 0 for images
    C: tl.constexpr, PT: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,  # PT: 0 for images
    UNIT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_M tokens x BLOCK_D features. Neighbours share the tokens: the image is read from
    memory once, the weight stays in the L2 cache."""
    K: tl.constexpr = C * PH * PW
    tiles_d = tl.cdiv(D, BLOCK_D)
    row = tl.program_id(0) // tiles_d * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.program_id(0) % tiles_d * BLOCK_D + tl.arange(0, BLOCK_D)
    b, t, exists = token_of(row, M, N, P, reciprocal_of(N))
    # Rows and columns out of bounds load other valid values instead of masking; their results are not stored.
    origin = patch_origin(
        b, t, exists, grid_w, reciprocal_of(grid_w), grid_h, reciprocal_of(grid_h), stride_b, stride_h, stride_t,
        PT, PH, PW, UNIT,
    )  # fmt: skip
    weight = weight_ptr + tl.where(col < D, col, 0)[None, :].to(tl.int64) * K

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        in_patch = (k < K) | (K % BLOCK_K == 0)
        w = tl.load(weight + k[:, None], mask=in_patch[:, None], other=0.0)  # [BLOCK_K, BLOCK_D]
        x = load_pixels(
            image_ptr, normalize_ptr, origin, k, in_patch, stride_c, stride_h, stride_t,
            C, PT, PH, PW, UNIT, PRECISION, w.dtype,
        )  # fmt: skip
        acc = tl.dot(x, w, acc, input_precision=PRECISION)

    for i in tl.static_range(2):
        col = tl.program_id(0) % tiles_d * BLOCK_D + i * (BLOCK_D // 2) + tl.arange(0, BLOCK_D // 2)
        part = columns_part(acc, i, 2)
        _store_tokens(part, out_ptr, bias_ptr, pos_ptr, prefix_ptr, row, t, exists, col, M, P, D)
