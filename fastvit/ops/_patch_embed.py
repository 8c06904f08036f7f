"""The registered patch-embedding ops: ATen path, Triton launch, fakes. Gradients are in patch_embed.py."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastvit.ops import _library
from fastvit.ops._checks import as_rows, contiguous
from fastvit.ops._library import Unsupported, dot_precision, register

if _library.HAVE_TRITON:
    import triton

    from fastvit.kernels import _configs
    from fastvit.kernels.patch_embed import patch_embed_fwd_kernel
    from fastvit.kernels.patch_embed_bwd import patch_embed_bwd_image_kernel, patch_embed_bwd_weight_kernel


def _grid(weight: Tensor, height: int, width: int) -> tuple[int, int]:
    return height // weight.shape[2], width // weight.shape[3]


def _out_dtype(weight: Tensor, *added: Tensor | None) -> torch.dtype:
    """As eager: the convolution has the weight's dtype; a position or prefix of a wider one promotes the result."""
    dtype = weight.dtype
    for t in added:
        if t is not None and t.dtype is not dtype:
            dtype = torch.promote_types(dtype, t.dtype)
    return dtype


# ---- ATen ----

_CHUNK = 1 << 19  # pixels that exist as a matrix of patches at a time: 2 MB, which stays in the cache


def _chunks(image: Tensor, tokens: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    images = max(_CHUNK // math.prod(image.shape[1:]), 1)
    if image.shape[0] <= images:
        return iter([(image, tokens)])
    return zip(image.split(images), tokens.split(images), strict=True)


def _as_patches(image: Tensor, weight: Tensor) -> Tensor:
    """[B, C, H, W] -> its view [B, h, w, C, ph, pw]."""
    (h, w), (_, C, ph, pw) = _grid(weight, *image.shape[2:]), weight.shape
    return image.view(image.shape[0], C, h, ph, w, pw).permute(0, 2, 4, 1, 3, 5)


def _gather(image: Tensor, weight: Tensor, normalize: Tensor | None) -> Tensor:
    """-> [B * n, K] in weight's dtype"""
    if normalize is not None:
        scale, shift = normalize[:, None, :, None, None]
        image = image.to(normalize.dtype).mul_(scale).add_(shift)
    return _as_patches(image.to(weight.dtype), weight).reshape(-1, weight.numel() // weight.shape[0])


def _fwd_aten(
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pos_embed: Tensor | None,
    prefix: Tensor | None,
    normalize: Tensor | None,
) -> Tensor:
    out = _fwd_fake(image, weight, bias, pos_embed, prefix, normalize)
    P = 0 if prefix is None else prefix.shape[0]
    if prefix is not None:
        out.narrow(1, 0, P).copy_(prefix)
    body = out.narrow(1, P, out.shape[1] - P)
    bias = None if bias is None else bias.to(weight.dtype)
    D = weight.shape[0]
    K = weight.numel() // D
    # measured on float32: a matrix of patches costs less than the convolution's own reordering, except for a narrow
    # result of many images, where gathering it is a large part (ViT-S/16 and smaller)
    convolve = normalize is None and D < 512 and K >= 256 and image.shape[0] > 1
    for pixels, tokens in [(image, body)] if convolve else _chunks(image, body):
        if convolve:
            patches = F.conv2d(pixels.to(weight.dtype), weight, bias, weight.shape[2:]).flatten(2).transpose(1, 2)
        else:
            patches = F.linear(_gather(pixels, weight, normalize), weight.reshape(D, K), bias).view_as(tokens)
        if pos_embed is None:
            tokens.copy_(patches)
        else:
            torch.add(patches, pos_embed, out=tokens)
    return out


def _bwd_weight_aten(dout: Tensor, image: Tensor, weight: Tensor, normalize: Tensor | None) -> Tensor:
    D, dtype = weight.shape[0], weight.dtype
    total = torch.zeros(D, weight[0].numel(), dtype=torch.promote_types(dtype, torch.float32), device=dout.device)
    n = math.prod(_grid(weight, *image.shape[2:]))
    for pixels, dtokens in _chunks(image, dout[:, dout.shape[1] - n :]):
        rows, patches = dtokens.reshape(-1, D).to(dtype), _gather(pixels, weight, normalize)
        if dtype is total.dtype:
            total.addmm_(rows.t(), patches)
        else:
            total += rows.t() @ patches
    return total.to(dtype).view(weight.shape)


def _bwd_image_aten(dout: Tensor, weight: Tensor, height: int, width: int, dtype: torch.dtype) -> Tensor:
    dimage = _bwd_image_fake(dout, weight, height, width, dtype)
    n = math.prod(_grid(weight, height, width))
    matrix = weight.reshape(weight.shape[0], -1)
    for pixels, dtokens in _chunks(dimage, dout[:, dout.shape[1] - n :]):
        patches = _as_patches(pixels, weight)
        rows = dtokens.reshape(-1, weight.shape[0]).to(weight.dtype)
        patches.copy_((rows @ matrix).view(patches.shape))
    return dimage


# ---- Triton ----


def _check_triton(weight: Tensor) -> None:
    if weight.dtype is torch.float64:
        raise Unsupported("float64 runs on ATen only")


def _config(
    m: int, n: int, k: int, weight: Tensor, image: Tensor | None = None, split: bool = False
) -> _configs.PatchEmbedConfig:
    """image: where it is an operand."""
    itemsize, pixel = weight.dtype.itemsize, (weight if image is None else image).dtype
    return _configs.patch_embed(
        m, n, k,
        itemsize=itemsize, loaded=max(itemsize, pixel.itemsize),
        arch=_library.arch(weight), multiprocessors=_library.multiprocessors(weight.device.index), split=split,
    )  # fmt: skip


def _rows_contiguous(image: Tensor) -> Tensor:
    """The kernels read runs of pixels of a row; a layout without them, such as channels_last, is copied."""
    return image if image.stride(3) == 1 or image.shape[3] == 1 else image.contiguous()


def _image_arguments(image: Tensor, weight: Tensor) -> tuple[tuple[int, ...], dict[str, int]]:
    """grid_w and the strides in UNITs, and the constants that describe the patch."""
    # the stride of a dimension of one element is arbitrary and would only spoil the alignment
    strides = [s if size > 1 else 0 for s, size in zip(image.stride()[:3], image.shape[:3], strict=True)]
    _, C, ph, pw = weight.shape
    if max((C - 1) * strides[1] + (ph - 1) * strides[2] + pw, 128 * C * ph * pw) >= 1 << 31:  # 128 rows of weight
        raise Unsupported("a patch that spans 2**31 or more elements of the image runs on ATen only")
    unit = math.gcd(16, *strides)
    constants = {"C": C, "PH": ph, "PW": pw, "UNIT": unit}
    return (image.shape[3] // pw, *(s // unit for s in strides)), constants


def _fwd_triton(
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pos_embed: Tensor | None,
    prefix: Tensor | None,
    normalize: Tensor | None,
) -> Tensor:
    _check_triton(weight)
    out = _fwd_fake(image, weight, bias, pos_embed, prefix, normalize)
    if out.numel() == 0:
        return out
    B, N, D = out.shape
    P = 0 if prefix is None else prefix.shape[0]
    prefix = prefix if P else None
    if pos_embed is not None and prefix is not None:
        dtype = torch.promote_types(pos_embed.dtype, prefix.dtype)
        pos_embed, prefix = pos_embed.to(dtype), prefix.to(dtype)
    weight, bias, pos_embed, prefix = contiguous(weight, bias, pos_embed, prefix)
    image = _rows_contiguous(image)
    cfg = _config(B * N, D, weight[0].numel(), weight, image)
    (grid_w, *strides), constants = _image_arguments(image, weight)
    patch_embed_fwd_kernel[(triton.cdiv(B * N, cfg.block_m) * triton.cdiv(D, cfg.block_n),)](
        image, weight, bias, pos_embed, prefix, normalize, out,
        B * N, N, P, D, grid_w, *strides,
        **constants, PRECISION=dot_precision(weight),
        BLOCK_M=cfg.block_m, BLOCK_D=cfg.block_n, BLOCK_K=cfg.block_k,
        num_warps=cfg.num_warps, num_stages=cfg.num_stages,
    )  # fmt: skip
    return out


def _bwd_weight_triton(dout: Tensor, image: Tensor, weight: Tensor, normalize: Tensor | None) -> Tensor:
    """An implicit GEMM, as the forward. The other way, a matrix of patches for cuBLAS, costs more traffic than
    cuBLAS's head start is worth: a pass over the image and one over the patches (77 MB at ViT-B/16, batch 128), and a
    copy of dout without its prefix rows (77 MB), against 2 x 16 MB of partials here."""
    _check_triton(weight)
    B, N, D = dout.shape
    K = weight[0].numel()
    if B == 0:
        return torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
    # under autocast: cast once, not in every tile that a matmul reads through shared memory
    if image.dtype is not torch.uint8:
        image = image.to(weight.dtype)
    rows, image = as_rows(dout.to(weight.dtype)), _rows_contiguous(image)
    cfg = _config(D, K, B * N, weight, image, split=True)
    rows_per_split = triton.cdiv(triton.cdiv(B * N, cfg.splits), cfg.block_k) * cfg.block_k
    splits = triton.cdiv(B * N, rows_per_split)
    partial = torch.empty(
        splits, *weight.shape, dtype=weight.dtype if splits == 1 else torch.float32, device=dout.device
    )
    (grid_w, *strides), constants = _image_arguments(image, weight)
    patch_embed_bwd_weight_kernel[(splits * triton.cdiv(D, cfg.block_m) * triton.cdiv(K, cfg.block_n),)](
        rows, image, normalize, partial,
        B * N, N, N - math.prod(_grid(weight, *image.shape[2:])), D, grid_w, rows_per_split, rows.stride(0), *strides,
        **constants, PRECISION=dot_precision(weight),
        BLOCK_M=cfg.block_k, BLOCK_D=cfg.block_m, BLOCK_K=cfg.block_n,
        num_warps=cfg.num_warps, num_stages=cfg.num_stages,
    )  # fmt: skip
    return partial[0] if splits == 1 else partial.sum(0).to(weight.dtype)


def _bwd_image_triton(dout: Tensor, weight: Tensor, height: int, width: int, dtype: torch.dtype) -> Tensor:
    _check_triton(weight)
    dimage = _bwd_image_fake(dout, weight, height, width, dtype)
    if dimage.numel() == 0:
        return dimage
    rows, weight = as_rows(dout.to(weight.dtype)), weight.contiguous()
    B, N, D = dout.shape
    K = weight[0].numel()
    cfg = _config(B * N, K, D, weight)
    (grid_w, *strides), constants = _image_arguments(dimage, weight)
    patch_embed_bwd_image_kernel[(triton.cdiv(B * N, cfg.block_m) * triton.cdiv(K, cfg.block_n),)](
        rows, weight, dimage,
        B * N, N, N - math.prod(_grid(weight, height, width)), D, grid_w, rows.stride(0), *strides,
        **constants, PRECISION=dot_precision(weight),
        BLOCK_M=cfg.block_m, BLOCK_K=cfg.block_n, BLOCK_D=cfg.block_k,
        num_warps=cfg.num_warps, num_stages=cfg.num_stages,
    )  # fmt: skip
    return dimage


# ---- registration ----


def _fwd_fake(
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pos_embed: Tensor | None,
    prefix: Tensor | None,
    normalize: Tensor | None,
) -> Tensor:
    N = math.prod(_grid(weight, *image.shape[2:])) + (0 if prefix is None else prefix.shape[0])
    dtype = _out_dtype(weight, pos_embed, prefix)
    return torch.empty(image.shape[0], N, weight.shape[0], dtype=dtype, device=weight.device)


def _bwd_weight_fake(dout: Tensor, image: Tensor, weight: Tensor, normalize: Tensor | None) -> Tensor:
    return torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)


def _bwd_image_fake(dout: Tensor, weight: Tensor, height: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(dout.shape[0], weight.shape[1], height, width, dtype=dtype, device=dout.device)


def _gemm_flops(image: Any, weight: Any) -> int:
    """image [B, C, H, W], weight [D, C, ph, pw]: every pixel meets every feature once."""
    return 2 * math.prod(image) * weight[0]


patch_embed_fwd = register(
    "patch_embed_fwd(Tensor image, Tensor weight, Tensor? bias, Tensor? pos_embed, Tensor? prefix, Tensor? normalize)"
    " -> Tensor",
    aten=_fwd_aten, triton=_fwd_triton, fake=_fwd_fake,
    flops=lambda image, weight, *_, out_shape=None, **__: _gemm_flops(image, weight),
)  # fmt: skip
patch_embed_bwd_weight = register(
    "patch_embed_bwd_weight(Tensor dout, Tensor image, Tensor weight, Tensor? normalize) -> Tensor",
    aten=_bwd_weight_aten, triton=_bwd_weight_triton, fake=_bwd_weight_fake,
    flops=lambda dout, image, weight, *_, out_shape=None, **__: _gemm_flops(image, weight),
)  # fmt: skip
patch_embed_bwd_image = register(
    "patch_embed_bwd_image(Tensor dout, Tensor weight, SymInt height, SymInt width, ScalarType dtype) -> Tensor",
    aten=_bwd_image_aten, triton=_bwd_image_triton, fake=_bwd_image_fake,
    flops=lambda dout, weight, *_, out_shape=None, **__: _gemm_flops(out_shape, weight),
)  # fmt: skip
