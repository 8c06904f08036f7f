"""Patch embedding on PyTorch's own functions. By chunks, both passes need 0.87 of eager's memory (README). Computed
again from `reference.ops.patch_embed`, the backward pass would repeat the matmul: both passes would take a CPU 1.3 to
1.5 times as long."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastvit.ops.runtime.device import is_fake
from fastvit.ops.runtime.dtypes import promoted_dtype

_CHUNK = 1 << 20  # pixels of a matrix of patches: 4 MB, which stays in the cache


def patch_grid(weight: Tensor, size: Sequence[int]) -> tuple[int, ...]:
    """Return the patches along each axis of an image of this size: (H, W), or (T, H, W) for a video."""
    *frames, height, width = size
    *_, ph, pw = patch = weight.shape
    grid = height // ph, width // pw
    return (frames[0] // patch[2], *grid) if frames else grid


def new_tokens(
    image: Tensor, weight: Tensor, bias: Tensor | None, pos_embed: Tensor | None, prefix: Tensor | None, *_: Any
) -> Tensor:
    """Return an empty result of the op: in the weight's dtype, like a convolution, or in a wider one of position or
    prefix."""
    N = math.prod(patch_grid(weight, image.shape[2:])) + (0 if prefix is None else prefix.shape[0])
    dtype = promoted_dtype(weight, pos_embed, prefix)
    return torch.empty(image.shape[0], N, weight.shape[0], dtype=dtype, device=weight.device)


def new_image(dout: Tensor, weight: Tensor, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an empty gradient of the image."""
    return torch.empty(dout.shape[0], weight.shape[1], *size, dtype=dtype, device=dout.device)


def _chunks(image: Tensor) -> list[tuple[Tensor, slice]]:
    """Split the batch into images whose patches fit into the cache, each with its slice of the batch."""
    images = max(_CHUNK // math.prod(image.shape[1:]), 1)
    if image.shape[0] <= images:
        return [(image, slice(None))]
    parts = [slice(first, first + images) for first in range(0, image.shape[0], images)]
    # one chunk needs the memory of all
    return [(image[part], part) for part in (parts[:1] if is_fake(image) else parts)]


def _as_patches(image: Tensor, weight: Tensor) -> Tensor:
    """View [B, C, H, W] as [B, h, w, C, ph, pw], and [B, C, T, H, W] as [B, t, h, w, C, pt, ph, pw]."""
    *frames, h, w = patch_grid(weight, image.shape[2:])
    B, (_, C, *depth, ph, pw) = image.shape[0], weight.shape
    if frames:
        return image.view(B, C, *frames, *depth, h, ph, w, pw).permute(0, 2, 4, 6, 1, 3, 5, 7)
    return image.view(B, C, h, ph, w, pw).permute(0, 2, 4, 1, 3, 5)


def normalized(image: Tensor, normalize: Tensor) -> Tensor:
    """Normalise a uint8 image in the dtype of `normalize`."""
    scale, shift = normalize.view(2, 1, -1, *(1,) * (image.dim() - 2))
    return image.to(normalize.dtype).mul_(scale).add_(shift)


def _gather(image: Tensor, weight: Tensor, normalize: Tensor | None) -> Tensor:
    """Return the matrix of patches [B * n, K] in the weight's dtype."""
    if normalize is not None:
        image = normalized(image, normalize)
    return _as_patches(image.to(weight.dtype), weight).reshape(-1, weight.numel() // weight.shape[0])


def patch_embed_fwd(
    image: Tensor, weight: Tensor, bias: Tensor | None,
    pos_embed: Tensor | None, prefix: Tensor | None, normalize: Tensor | None,
) -> Tensor:  # fmt: skip
    bias = None if bias is None else bias.to(weight.dtype)
    matrix = weight.reshape(weight.shape[0], -1)
    P = 0 if prefix is None else prefix.shape[0]
    out = None
    for pixels, part in _chunks(image):
        patches = F.linear(_gather(pixels, weight, normalize), matrix, bias)
        if out is None:  # once the first matrix of patches is freed
            out = new_tokens(image, weight, bias, pos_embed, prefix)
            if prefix is not None:
                out[:, :P] = prefix
        tokens = out[part, P:]
        patches = patches.view(tokens.shape)
        if pos_embed is None:
            tokens.copy_(patches)
        else:
            torch.add(patches, pos_embed, out=tokens)
    assert out is not None
    return out


def patch_embed_bwd_weight(dout: Tensor, image: Tensor, weight: Tensor, normalize: Tensor | None) -> Tensor:
    D, dtype, total = weight.shape[0], weight.dtype, None
    n = math.prod(patch_grid(weight, image.shape[2:]))
    for pixels, part in _chunks(image):
        rows, patches = dout[part, dout.shape[1] - n :].reshape(-1, D).to(dtype), _gather(pixels, weight, normalize)
        if total is None:
            total = rows.t() @ patches
        elif dtype.itemsize > 2:
            total.addmm_(rows.t(), patches)
        else:
            total = total.float()  # products of several chunks are added in float32
            total += rows.t() @ patches
    assert total is not None
    return total.to(dtype).view(weight.shape)


def patch_embed_bwd_image(dout: Tensor, weight: Tensor, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    dimage = new_image(dout, weight, size, dtype)
    n = math.prod(patch_grid(weight, size))
    matrix = weight.reshape(weight.shape[0], -1)
    for pixels, part in _chunks(dimage):
        patches = _as_patches(pixels, weight)
        rows = dout[part, dout.shape[1] - n :].reshape(-1, weight.shape[0]).to(weight.dtype)
        patches.copy_((rows @ matrix).view(patches.shape))
    return dimage


def plain(
    image: Tensor, weight: Tensor, bias: Tensor | None,
    pos_embed: Tensor | None, prefix: Tensor | None, normalize: Tensor | None,
) -> Tensor:  # fmt: skip
    """The forward op for exporters: a convolution, and nothing in place."""
    if normalize is not None:
        scale, shift = normalize.view(2, -1, *[1] * (image.dim() - 2))
        image = image.to(normalize.dtype) * scale + shift
    bias = None if bias is None else bias.to(weight.dtype)
    convolution = F.conv2d if weight.dim() == 4 else F.conv3d
    tokens = convolution(image.to(weight.dtype), weight, bias, weight.shape[2:]).flatten(2).transpose(1, 2)
    if pos_embed is not None:
        tokens = tokens + pos_embed
    dtype = promoted_dtype(weight, pos_embed, prefix)
    if prefix is not None:
        tokens = torch.cat([prefix.to(dtype).expand(tokens.shape[0], -1, -1), tokens.to(dtype)], dim=1)
    return tokens.to(dtype).contiguous()
