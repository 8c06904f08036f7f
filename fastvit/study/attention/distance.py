"""Measures how far each head of attention looks: the mean attention distance of Dosovitskiy et al. 2021."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fastvit.study.attention import weights
from fastvit.study.attention.queries import QueryTokens
from fastvit.study.attention.recording import AttentionCall


@dataclass(frozen=True)
class AttentionDistance:
    """Mean attention distances.

    Attributes:
        layers, heads: their numbers, from 0.
        distance: (layers, heads), in pixels, float64 on the CPU.
        uniform: the distance of equal weights for all patches of this grid, in pixels.
        grid: (h, w) of the patches.
        patch_size: (height, width) in pixels.
        depth: how many layers the model has.
    """

    layers: tuple[int, ...]
    heads: tuple[int, ...]
    distance: Tensor = field(repr=False)
    uniform: float
    grid: tuple[int, int]
    patch_size: tuple[int, int]
    depth: int

    @property
    def share(self) -> Tensor:
        """The distances as shares of the uniform one, (layers, heads): comparable between grids and models."""
        return self.distance / self.uniform


def attention_distance(
    model: nn.Module, images: Tensor | Sequence[Tensor], layers: int | Sequence[int] | None = None
) -> AttentionDistance:
    """Compute the mean attention distance of every layer and head: the distance of the centres of the query's and the
    key's patch, weighted by attention, averaged over all queries and over the images. It is the figure 7 (right) and
    the appendix D.7 of Dosovitskiy et al. 2021 (arXiv:2010.11929), and section 3 of Raghu et al. 2021
    (arXiv:2108.08810).

    A patch's distance to itself, 0, counts. CLS and registers have no place in the image, and the papers do not say how
    they treat them: here they are neither queries nor keys, and the weights of the patches are scaled to add up to 1.

    The model runs once for each image, as for `attention_maps`. Weights are computed for as many queries at a time as
    have 2^22 weights in all heads (16 MiB in float32), at least for one, so memory is O(N) for long sequences.

    Args:
        model: any whose attention is fastvit's or F.scaled_dot_product_attention: ours, accelerated, or untouched.
        images: (B, C, H, W) or (C, H, W), as the model takes them, or a sequence of (C, H, W) of one size.
        layers: numbers in the order of the forward pass, from 0, or negative from the last. None for all.

    Raises:
        ValueError: the model has no such layer; a layer's attention is not seen, because it computes N x N weights, is
            causal, or is over windows; layers have different numbers of heads; there is one patch only; or a patch
            attends to no patch.
        TypeError: images that are no tensors.
    """
    asked, each = weights.checked("layers", layers), []
    for image in weights.several_images(images):
        tokens = QueryTokens(model, None)
        of_heads = functools.partial(_of_heads, tokens)
        numbers, found, depth = weights.by_layer(model, image, tokens, asked, of_heads)
        if len({len(one) for one in found}) > 1:
            raise ValueError("layers must be given one at a time: layers have different numbers of heads")
        each.append(torch.stack(found))
    distance = torch.stack(each).mean(0)
    for layer, row in zip(numbers, distance, strict=True):
        if not row.isfinite().all():
            raise ValueError(f"layer {layer} has no finite distance: weights are not finite, or of prefix tokens only")
    uniform = uniform_distance(tokens.grid, tokens.patch_size)
    if not uniform:
        raise ValueError("images must have two patches or more, got one: there are no distances")
    return AttentionDistance(
        numbers, tuple(range(distance.shape[1])), distance, uniform, tokens.grid, tokens.patch_size, depth
    )


def uniform_distance(grid: tuple[int, int], patch_size: tuple[int, int]) -> float:
    """Return the mean distance in pixels of all pairs of patches, each with itself among them.

    Args:
        grid: (h, w).
        patch_size: (height, width) in pixels.
    """
    (h, w), (height, width) = grid, patch_size
    down = torch.arange(1 - h, h, dtype=torch.float64, device="cpu").view(-1, 1)
    right = torch.arange(1 - w, w, dtype=torch.float64, device="cpu")
    pairs = (h - down.abs()) * (w - right.abs())  # how many have this offset
    return float((pairs * torch.hypot(height * down, width * right)).sum() / (h * w) ** 2)


def _of_heads(tokens: QueryTokens, call: AttentionCall) -> Tensor:
    """Return the distance of every head, (H,) float64 on the CPU."""
    (h, w), (height, width) = tokens.grid, tokens.patch_size
    rows, columns = (torch.arange(n, device=call.q.device, dtype=weights.wide(call.q)) for n in (h, w))
    centres = torch.cartesian_prod(height * rows, width * columns)
    total = torch.zeros(call.q.shape[0], dtype=torch.float64, device="cpu")
    for chunk in weights.chunks(call, first=tokens.prefix):
        queries = centres[chunk.start - tokens.prefix : chunk.stop - tokens.prefix]
        pixels = torch.cdist(queries, centres, compute_mode="donot_use_mm_for_euclid_dist")
        of_patches = weights.softmax(call, chunk, keys=slice(tokens.prefix, None))
        total += of_patches.mul_(pixels).sum(2).cpu().double().sum(1)
    return total / (h * w)
