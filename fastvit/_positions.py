"""Position embeddings for another patch grid."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Resize = Callable[[Tensor, tuple[int, int]], Tensor]


def antialiased(image: Tensor, grid: tuple[int, int]) -> Tensor:
    """(1, D, h, w) -> (1, D, *grid), as timm, open_clip, and both DINOv2 with registers."""
    return F.interpolate(image, size=grid, mode="bicubic", antialias=True)


def resample_abs_pos_embed(
    pos_embed: Tensor,
    grid: tuple[int, int],
    old_grid: tuple[int, int],
    num_prefix_tokens: int = 1,
    resize: Resize = antialiased,
) -> Tensor:
    """Positions (1, P + h*w, D) of one patch grid -> (1, P + h'*w', D) of another: bicubic, antialiased, in float32,
    the P prefix rows unchanged (as timm's; Dosovitskiy et al. 2021, section 3.2). Differentiable."""
    if grid == old_grid:
        return pos_embed
    prefix, patches = pos_embed[:, :num_prefix_tokens], pos_embed[:, num_prefix_tokens:]
    image = resize(patches.float().unflatten(1, old_grid).permute(0, 3, 1, 2), grid)
    return torch.cat([prefix, image.flatten(2).transpose(1, 2).to(pos_embed.dtype)], dim=1)
