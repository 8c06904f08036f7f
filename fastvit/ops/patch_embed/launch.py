"""Launch the kernels of patch embedding."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fastvit.kernels import _configs
from fastvit.kernels.patch_embed import patch_embed_fwd_kernel
from fastvit.kernels.patch_embed_bwd import patch_embed_bwd_image_kernel, patch_embed_bwd_weight_kernel
from fastvit.ops.patch_embed.aten import new_image, new_tokens, patch_grid
from fastvit.ops.runtime import devices
from fastvit.ops.runtime.checks import as_rows, contiguous
from fastvit.ops.runtime.devices import dot_precision
from fastvit.ops.runtime.dispatch import KernelUnsupported
from fastvit.ops.runtime.launch import cdiv, launch


def _check(weight: Tensor) -> None:
    if weight.dtype is torch.float64:
        raise KernelUnsupported("float64 runs on ATen only")


def _config(
    m: int, n: int, k: int, weight: Tensor, image: Tensor | None = None, split: bool = False
) -> _configs.PatchEmbedConfig:
    """Choose the configuration. image: if it is an operand."""
    itemsize, pixel = weight.dtype.itemsize, (weight if image is None else image).dtype
    return _configs.patch_embed(
        m, n, k,
        itemsize=itemsize, loaded=max(itemsize, pixel.itemsize),
        arch=devices.arch(weight), multiprocessors=devices.multiprocessors(weight.device.index), split=split,
    )  # fmt: skip


def _rows_contiguous(image: Tensor) -> Tensor:
    """Return the image with contiguous rows of pixels, which the kernels read; copy a layout without, such as
    channels_last."""
    return image if image.stride(3) == 1 or image.shape[3] == 1 else image.contiguous()


def _options(config: _configs.PatchEmbedConfig) -> dict[str, int]:
    return {"num_warps": config.num_warps, "num_stages": config.num_stages}


def _image_arguments(image: Tensor, weight: Tensor) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Return grid_w and the strides in UNITs, and the constants: the patch's, and the matmul's precision."""
    # the stride of a dimension of one element is arbitrary and would only spoil the alignment
    strides = [s if size > 1 else 0 for s, size in zip(image.stride()[:3], image.shape[:3], strict=True)]
    _, C, ph, pw = weight.shape
    if max((C - 1) * strides[1] + (ph - 1) * strides[2] + pw, 128 * C * ph * pw) >= 1 << 31:  # 128 rows of weight
        raise KernelUnsupported("a patch that spans 2**31 or more elements of the image runs on ATen only")
    unit = math.gcd(16, *strides)
    constants = {"C": C, "PH": ph, "PW": pw, "UNIT": unit, "PRECISION": dot_precision(weight)}
    return (image.shape[3] // pw, *(s // unit for s in strides)), constants


def patch_embed_fwd(
    image: Tensor, weight: Tensor, bias: Tensor | None,
    pos_embed: Tensor | None, prefix: Tensor | None, normalize: Tensor | None,
) -> Tensor:  # fmt: skip
    _check(weight)
    out = new_tokens(image, weight, bias, pos_embed, prefix)
    if out.numel() == 0:
        return out
    B, N, D = out.shape
    P = 0 if prefix is None else prefix.shape[0]
    prefix = prefix if P else None
    if pos_embed is not None and prefix is not None:
        dtype = torch.promote_types(pos_embed.dtype, prefix.dtype)
        pos_embed, prefix = pos_embed.to(dtype), prefix.to(dtype)
    weight, bias, pos_embed, prefix = map(contiguous, (weight, bias, pos_embed, prefix))
    image = _rows_contiguous(image)
    cfg = _config(B * N, D, weight[0].numel(), weight, image)
    (grid_w, *strides), constants = _image_arguments(image, weight)
    launch(
        patch_embed_fwd_kernel,
        cdiv(B * N, cfg.block_m) * cdiv(D, cfg.block_n),
        (image, weight, bias, pos_embed, prefix, normalize, out),
        (B * N, N, P, D, grid_w, *strides),
        {**constants, "BLOCK_M": cfg.block_m, "BLOCK_D": cfg.block_n, "BLOCK_K": cfg.block_k, **_options(cfg)},
    )
    return out


def patch_embed_bwd_weight(dout: Tensor, image: Tensor, weight: Tensor, normalize: Tensor | None) -> Tensor:
    """Compute the weight's gradient by an implicit GEMM, like the forward. A matrix of patches for cuBLAS would cost
    more traffic than cuBLAS gains: a pass over the image and one over the patches (77 MB at ViT-B/16, batch 128), and a
    copy of dout without its prefix rows (77 MB), against 2 x 16 MB of partial sums here."""
    _check(weight)
    B, N, D = dout.shape
    K = weight[0].numel()
    if B == 0:
        return torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
    # under autocast: cast once, not in every tile that a matmul reads through shared memory
    if image.dtype is not torch.uint8:
        image = image.to(weight.dtype)
    rows, image = as_rows(dout.to(weight.dtype)), _rows_contiguous(image)
    cfg = _config(D, K, B * N, weight, image, split=True)
    rows_per_split = cdiv(cdiv(B * N, cfg.splits), cfg.block_k) * cfg.block_k
    splits = cdiv(B * N, rows_per_split)
    partial = torch.empty(
        splits, *weight.shape, dtype=weight.dtype if splits == 1 else torch.float32, device=dout.device
    )
    (grid_w, *strides), constants = _image_arguments(image, weight)
    launch(
        patch_embed_bwd_weight_kernel, splits * cdiv(D, cfg.block_m) * cdiv(K, cfg.block_n),
        (rows, image, normalize, partial),
        (B * N, N, N - math.prod(patch_grid(weight, *image.shape[2:])), D, grid_w, rows_per_split,
         rows.stride(0), *strides),
        {**constants, "BLOCK_M": cfg.block_k, "BLOCK_D": cfg.block_m, "BLOCK_K": cfg.block_n, **_options(cfg)},
    )  # fmt: skip
    return partial[0] if splits == 1 else partial.sum(0).to(weight.dtype)


def patch_embed_bwd_image(dout: Tensor, weight: Tensor, height: int, width: int, dtype: torch.dtype) -> Tensor:
    _check(weight)
    dimage = new_image(dout, weight, height, width, dtype)
    if dimage.numel() == 0:
        return dimage
    rows, weight = as_rows(dout.to(weight.dtype)), weight.contiguous()
    B, N, D = dout.shape
    K = weight[0].numel()
    cfg = _config(B * N, K, D, weight)
    (grid_w, *strides), constants = _image_arguments(dimage, weight)
    launch(
        patch_embed_bwd_image_kernel,
        cdiv(B * N, cfg.block_m) * cdiv(K, cfg.block_n),
        (rows, weight, dimage),
        (B * N, N, N - math.prod(patch_grid(weight, height, width)), D, grid_w, rows.stride(0), *strides),
        {**constants, "BLOCK_M": cfg.block_m, "BLOCK_K": cfg.block_n, "BLOCK_D": cfg.block_k, **_options(cfg)},
    )
    return dimage
