"""Launch the kernels of patch embedding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from fastvit.kernels import _configs
from fastvit.kernels.patch_embed import patch_embed_fwd_kernel
from fastvit.kernels.patch_embed_bwd import patch_embed_bwd_image_kernel, patch_embed_bwd_weight_kernel
from fastvit.ops.patch_embed.aten import new_image, new_tokens, patch_grid
from fastvit.ops.runtime import device
from fastvit.ops.runtime.backend import KernelUnsupported
from fastvit.ops.runtime.device import dot_precision
from fastvit.ops.runtime.launch import Constants, Launch, cdiv
from fastvit.ops.runtime.rows import by_rows, contiguous, row_stride


def _config(
    m: int, n: int, k: int, weight: Tensor, image: Tensor | None = None, split: bool = False
) -> _configs.PatchEmbedConfig:
    """Choose the configuration. image: if it is an operand."""
    if weight.dtype is torch.float64:
        raise KernelUnsupported("float64 runs on ATen only")
    itemsize, pixel = weight.dtype.itemsize, (weight if image is None else image).dtype
    return _configs.patch_embed(
        m, n, k,
        itemsize=itemsize, loaded=max(itemsize, pixel.itemsize),
        arch=device.arch(weight), multiprocessors=device.multiprocessors(weight.device.index), split=split,
    )  # fmt: skip


def _rows_contiguous(image: Tensor) -> Tensor:
    """Return the image with contiguous rows of pixels, which the kernels read; copy a layout without, such as
    channels_last."""
    return image if image.stride(-1) == 1 or image.shape[-1] == 1 else image.contiguous()


def _options(config: _configs.PatchEmbedConfig) -> dict[str, int]:
    return {"num_warps": config.num_warps, "num_stages": config.num_stages}


def _image_arguments(image: Tensor, weight: Tensor) -> tuple[int, tuple[int, ...], Constants]:
    """Return grid_w, the strides in UNITs with grid_h, and the constants: the patch's, and the matmul's precision."""
    # the stride of a dimension of one element is arbitrary and would only spoil the alignment
    b, c, *frame, h = [s if size > 1 else 0 for s, size in zip(image.stride()[:-1], image.shape[:-1], strict=True)]
    channels, (*depth, ph, pw), grid = weight.shape[1], weight.shape[2:], patch_grid(weight, image.shape[2:])
    t, pt, grid_h = (frame[0], depth[0], grid[1]) if frame else (0, 0, 1)
    span = (channels - 1) * c + max(pt - 1, 0) * t + (ph - 1) * h + pw
    if max(span, 128 * weight[0].numel()) >= 1 << 31:  # 128 rows of weight
        raise KernelUnsupported("a patch that spans 2**31 or more elements of the image runs on ATen only")
    unit = math.gcd(16, b, c, h, t)
    constants = {
        "C": channels * max(pt, 1), "PT": pt, "PH": ph, "PW": pw, "UNIT": unit, "PRECISION": dot_precision(weight)
    }  # fmt: skip
    return grid[-1], (b // unit, c // unit, h // unit, grid_h, t // unit), constants


def patch_embed_fwd(
    image: Tensor, weight: Tensor, bias: Tensor | None,
    pos_embed: Tensor | None, prefix: Tensor | None, normalize: Tensor | None,
) -> Tensor:  # fmt: skip
    out = new_tokens(image, weight, bias, pos_embed, prefix)
    if out.numel() == 0:
        return out
    prefix = prefix if prefix is not None and len(prefix) else None
    if pos_embed is not None and prefix is not None:
        dtype = torch.promote_types(pos_embed.dtype, prefix.dtype)
        pos_embed, prefix = map(partial(torch.Tensor.to, dtype=dtype), (pos_embed, prefix))
    weight, bias, pos_embed, prefix = map(contiguous, (weight, bias, pos_embed, prefix))
    image = _rows_contiguous(image)
    launch = _forward(image, weight, prefix, out)
    launch(image, weight, bias, pos_embed, prefix, normalize, out)
    return out


def patch_embed_bwd_weight(dout: Tensor, image: Tensor, weight: Tensor, normalize: Tensor | None) -> Tensor:
    """Compute the weight's gradient by an implicit GEMM, like the forward. A matrix of patches for cuBLAS would cost
    more traffic than cuBLAS gains: a pass over the image and one over the patches (77 MB at ViT-B/16, batch 128), and a
    copy of dout without its prefix rows (77 MB), against 2 x 16 MB of partial sums here."""
    if dout.shape[0] == 0:
        return torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
    # under autocast: cast once, not in every tile that a matmul reads through shared memory
    if image.dtype is not torch.uint8:
        image = image.to(weight.dtype)
    image = _rows_contiguous(image)
    rows = by_rows(dout.to(weight.dtype))
    launch, splits = _weight_launch(dout.shape, rows, image, weight)
    partial_dtype = weight.dtype if splits == 1 else torch.float32
    sums = torch.empty(splits, *weight.shape, dtype=partial_dtype, device=dout.device)
    launch(rows, image, normalize, sums)
    return sums[0] if splits == 1 else sums.sum(0).to(weight.dtype)


def patch_embed_bwd_image(dout: Tensor, weight: Tensor, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    dimage = new_image(dout, weight, size, dtype)
    if dimage.numel() == 0:
        return dimage
    rows = by_rows(dout.to(weight.dtype))
    weight = contiguous(weight)
    launch = _image_launch(dout.shape, rows, weight, dimage)
    launch(rows, weight, dimage)
    return dimage


def _forward(image: Tensor, weight: Tensor, prefix: Tensor | None, out: Tensor) -> Launch:
    B, N, D = out.shape
    P = 0 if prefix is None else len(prefix)
    cfg = _config(B * N, D, weight[0].numel(), weight, image)
    grid_w, strides, constants = _image_arguments(image, weight)
    constants |= {"BLOCK_M": cfg.block_m, "BLOCK_D": cfg.block_n, "BLOCK_K": cfg.block_k, **_options(cfg)}
    programs = cdiv(B * N, cfg.block_m) * cdiv(D, cfg.block_n)
    return Launch(patch_embed_fwd_kernel, programs, (B * N, N, P, D, grid_w, *strides), constants)


def _weight_launch(shape: torch.Size, rows: Tensor, image: Tensor, weight: Tensor) -> tuple[Launch, int]:
    """Return the launch for a gradient of this shape, which is read as rows, and the number of partial sums."""
    B, N, D = shape
    K = weight[0].numel()
    cfg = _config(D, K, B * N, weight, image, split=True)
    rows_per_split = cdiv(cdiv(B * N, cfg.splits), cfg.block_k) * cfg.block_k
    splits = cdiv(B * N, rows_per_split)
    grid_w, strides, constants = _image_arguments(image, weight)
    prefix = N - math.prod(patch_grid(weight, image.shape[2:]))
    numbers = B * N, N, prefix, D, grid_w, rows_per_split, row_stride(rows), *strides
    constants |= {"BLOCK_M": cfg.block_k, "BLOCK_D": cfg.block_m, "BLOCK_K": cfg.block_n, **_options(cfg)}
    programs = splits * cdiv(D, cfg.block_m) * cdiv(K, cfg.block_n)
    return Launch(patch_embed_bwd_weight_kernel, programs, numbers, constants), splits


def _image_launch(shape: torch.Size, rows: Tensor, weight: Tensor, dimage: Tensor) -> Launch:
    """Return the launch for a gradient of this shape, which is read as rows."""
    B, N, D = shape
    K = weight[0].numel()
    cfg = _config(B * N, K, D, weight)
    grid_w, strides, constants = _image_arguments(dimage, weight)
    prefix = N - math.prod(patch_grid(weight, dimage.shape[2:]))
    constants |= {"BLOCK_M": cfg.block_m, "BLOCK_K": cfg.block_n, "BLOCK_D": cfg.block_k, **_options(cfg)}
    programs = cdiv(B * N, cfg.block_m) * cdiv(K, cfg.block_n)
    numbers = B * N, N, prefix, D, grid_w, row_stride(rows), *strides
    return Launch(patch_embed_bwd_image_kernel, programs, numbers, constants)
