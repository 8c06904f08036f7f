"""Figures by layer: how far each head of attention looks, and CLS after each block on its way to its final state."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastvit.study.attention import recording, weights
from fastvit.study.attention.recording import AttentionCall, Patches
from fastvit.study.attention.weights import QueryTokens
from fastvit.study.sources.model_source import blocks


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
    """Return the mean distance in pixels of all pairs of patches, each with itself among them. grid: (h, w).
    patch_size: (height, width) in pixels."""
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


@dataclass(frozen=True)
class ClsEvolution:
    """The cosine of a state after each block to the state after the last block.

    Attributes:
        cosine: (images, blocks), float64 on the CPU. The last column is 1.
        pooled: True if the state is the mean of the patches, because the model has no CLS.
    """

    cosine: Tensor = field(repr=False)
    pooled: bool

    @property
    def mean(self) -> Tensor:
        """The mean over the images, (blocks,)."""
        return self.cosine.mean(0)

    @property
    def state(self) -> str:
        """The state in words: "CLS" or "the patches' mean"."""
        return "the patches' mean" if self.pooled else "CLS"


def cls_evolution(model: nn.Module, images: Tensor | Sequence[Tensor]) -> ClsEvolution:
    """Compute the cosine of CLS after each block to CLS after the last block, before the model's last norm. For a model
    without CLS, it is the mean of the patches instead.

    The model runs once for each image, as for `attention_maps`. Only the states are kept.

    Args:
        model: any with a list of blocks (nn.ModuleList, nn.Sequential) that return all tokens, as in timm, transformers
            and torchvision: ours, accelerated, or untouched. If there are several lists, the longest is taken.
        images: (B, C, H, W) or (C, H, W), as the model takes them, or a sequence of (C, H, W) of one size.

    Raises:
        ValueError: no blocks are found, or they return something else than (1, N, D) or (1, h, w, D) with the N of all
            patches and prefix tokens; or the model has no patches or no attention.
        TypeError: images that are no tensors.
    """
    found = [_states(model, image) for image in weights.several_images(images)]
    cosine = torch.stack([F.cosine_similarity(states, states[-1:], dim=-1) for states, _ in found])
    return ClsEvolution(cosine, found[0][1])


def _states(model: nn.Module, image: Tensor) -> tuple[Tensor, bool]:
    """Return the state after each block, (blocks, D) float64 on the CPU, and whether it is the mean of the patches."""
    tokens, states, patches = QueryTokens(model, None), list[Tensor](), list[Patches | None]()

    def after(block: nn.Module, args: Any, output: Any) -> None:
        x = output[0] if isinstance(output, tuple | list) else output
        if not isinstance(x, Tensor) or x.dim() < 3 or x.shape[0] != 1:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"block {len(states)} ({type(block).__name__}) must return (1, N, D), got {got}")
        if not patches:
            raise ValueError(f"block {len(states)} ({type(block).__name__}) has no self-attention that is seen")
        x = x.flatten(1, -2)[0].cpu().double()
        if reason := tokens.locate(len(x), patches[0]):
            raise ValueError(f"block {len(states)} does not return all tokens: {reason}")
        states.append(x[0] if tokens.has_cls else x[tokens.prefix :].mean(0))

    hooks = [block.register_forward_hook(after) for block in blocks(model)]
    try:
        recording.run(model, image, lambda call: patches.append(call.patches))
    finally:
        for hook in hooks:
            hook.remove()
    if not states:
        raise ValueError(
            f"{tokens.kind} has no list of blocks that run: no nn.ModuleList or nn.Sequential of one class"
        )
    return torch.stack(states), not tokens.has_cls
