"""Position embeddings for another patch grid, and patch embeddings for another patch size."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Resize = Callable[[Tensor, tuple[int, int]], Tensor]


def antialiased(image: Tensor, grid: tuple[int, int]) -> Tensor:
    """Interpolate (1, D, h, w) -> (1, D, *grid), like timm, open_clip, and DINOv2 with registers."""
    return F.interpolate(image, size=grid, mode="bicubic", antialias=True)


def resample_abs_pos_embed(
    pos_embed: Tensor,
    grid: tuple[int, int],
    old_grid: tuple[int, int],
    num_prefix_tokens: int = 1,
    resize: Resize = antialiased,
) -> Tensor:
    """Interpolate positions (1, P + h*w, D) to another patch grid, (1, P + h'*w', D), as timm and Dosovitskiy et al.
    (2021, section 3.2): in float32, by default bicubic and antialiased, the P prefix rows unchanged. Differentiable."""
    if grid == old_grid:
        return pos_embed
    prefix, patches = pos_embed[:, :num_prefix_tokens], pos_embed[:, num_prefix_tokens:]
    image = resize(patches.float().unflatten(1, old_grid).permute(0, 3, 1, 2), grid)
    return torch.cat([prefix, image.flatten(2).transpose(1, 2).to(pos_embed.dtype)], dim=1)


def resample_patch_embed(weight: Tensor, patch_size: tuple[int, int]) -> Tensor:
    """Resample weights (D, C, h, w) to another patch size, (D, C, h', w'), in float32 or wider.

    The new weights' products with a resized patch equal the old weights' products with the original patch (Beyer et al.
    2022, arXiv:2212.08013, section 3.4); for smaller patches they are the closest possible."""
    h, w = weight.shape[2:]
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    pixels = torch.eye(h * w, dtype=wide.dtype, device=wide.device).view(1, h * w, h, w)
    resized = antialiased(pixels, patch_size)[0].flatten(1)  # (h * w, h' * w')
    return (wide.flatten(2) @ torch.linalg.pinv(resized).T).unflatten(2, patch_size).to(weight.dtype)
