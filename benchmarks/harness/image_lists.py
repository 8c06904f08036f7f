"""Lists of images of several sizes as each provider runs them: fastvit without padding, the others with padded tokens
and a mask."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fastvit
from benchmarks.harness.draw import Draw, Runner
from fastvit.study.sources.from_zoo import plain_model

# patches down and across of each image, for patches of 16 pixels: the crops of one image in DINO's training; images of
# several aspect ratios with sequences of at most 256 patches
MIXES = {
    "crops": ((14, 14),) * 2 + ((6, 6),) * 8,
    "aspects": ((16, 16), (11, 22), (20, 12), (14, 18), (8, 32), (16, 12), (25, 10), (9, 14)),
}


def image_list(provider: str, draw: Draw, name: str, mix: str, B: int = 1, depth: int = 12) -> Runner:
    """Build a model of the zoo on B lists of a mix together, as batches of images of one size."""
    fused = provider == "fastvit"
    make: Any = fastvit.create_model if fused else functools.partial(plain_model, provider=provider)
    vit: Any = draw.module(lambda: make(name, dynamic_img_size=True, depth=depth))
    grids = {grid: B * MIXES[mix].count(grid) for grid in MIXES[mix]}
    images = [draw.photographs(n, 16 * max(grid))[..., : 16 * grid[0], : 16 * grid[1]] for grid, n in grids.items()]
    if fused:
        return Runner(lambda: vit(images), tuple(images), tuple(vit.parameters()), vit)
    lengths = [vit.num_prefix_tokens + h * w for (h, w), n in grids.items() for _ in range(n)]
    tokens = torch.arange(max(lengths), device=draw.device)
    mask = tokens < torch.tensor(lengths, device=draw.device)[:, None]
    return Runner(lambda: padded(vit, images, mask[:, None, None]), tuple(images), tuple(vit.parameters()), vit)


def padded(vit: Any, images: list[Tensor], mask: Tensor) -> Tensor:
    """Run a reference model on batches of images, whose tokens are padded to the longest image's. mask: (B, 1, 1, N),
    which tokens there are."""
    parts = [vit.embed(image) for image in images]
    N = mask.shape[-1]
    x = torch.cat([F.pad(part, (0, 0, 0, N - part.shape[1])) for part in parts])
    for block in vit.blocks:
        x = block(x, mask)
    return vit.forward_head(vit.norm(x))
