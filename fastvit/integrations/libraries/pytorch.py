"""Modules of any model: LayerNorm and RMSNorm of torch.nn, timm and open_clip, and the convolution of a patch embedding
of images or videos."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastvit import ops
from fastvit.blocks import read, run
from fastvit.blocks.submodules import CannotFuse
from fastvit.integrations.forward import Call, ClassHandler, only_input
from fastvit.modules.arguments import Statistics
from fastvit.modules.patch_embed import is_of_patches
from fastvit.ops import Norm

# weight (D, C, ph, pw) or (D, C, pt, ph, pw); bias (D,) or None; mean and std: C values for uint8 images, or None
Patches = tuple[Tensor, Tensor | None, Statistics, Statistics]


def run_norm_in_dtype(x: Tensor, norm: Norm) -> Tensor:
    """Run timm's RmsNormFp32 or open_clip's LayerNorm, which return x's dtype under autocast too."""
    return run.run_norm(x, norm).to(x.dtype)


def read_patches(conv: Any, mean: Statistics = None, std: Statistics = None) -> Patches:
    if not is_of_patches(conv):
        raise CannotFuse("its convolution is not one of disjoint patches")
    return *read.read_linear(conv), mean, std


def read_image(conv: Any, *args: Any, **kwargs: Any) -> Call:
    x, options = only_input(conv, *args, **kwargs)
    if not isinstance(x, Tensor):
        return x, options  # for the check of all inputs
    size, patch = x.shape[2:], conv.kernel_size
    if x.dim() != 2 + len(patch):
        raise CannotFuse(f"its input has {x.dim()} dimensions, not {2 + len(patch)}")
    if any([n % step for n, step in zip(size, patch, strict=True)]):
        both = [" x ".join(map(str, numbers)) for numbers in (size, patch)]
        raise CannotFuse(f"an image of {both[0]}, which patches of {both[1]} do not cover")
    return x, options


def run_patches(x: Tensor, patches: Patches) -> Tensor:
    """Embed (B, C, H, W) as (B, D, h, w), or a video as (B, D, t, h, w), a view of tokens (B, n, D). flatten(2) and
    transpose(1, 2), which follow in every ViT, then copy nothing."""
    weight, bias, mean, std = patches
    grid = [n // step for n, step in zip(x.shape[2:-1], weight.shape[2:-1], strict=True)]
    if x.dtype is not torch.uint8:
        mean = std = None
    return ops.patch_embed(x, weight, bias, mean=mean, std=std).unflatten(1, (*grid, -1)).movedim(-1, 1)


def patches(mean: Statistics = None, std: Statistics = None) -> ClassHandler:
    """Return the handler of a patch embedding's convolution. With mean and std it takes uint8 images too, normalised to
    (x / 255 - mean) / std."""
    reader = partial(read_patches, mean=mean, std=std)
    return ClassHandler(reader, run_patches, read_image, ndim=None, takes_pixels=mean is not None, op="patch_embed")


HANDLERS: dict[type | str, ClassHandler] = {
    **dict.fromkeys(read.LAYER_NORM, ClassHandler(read.read_norm, run.run_norm, ndim=None)),
    **dict.fromkeys(read.RMS_NORM, ClassHandler(read.read_norm, run.run_norm, ndim=None)),
    "timm.layers.norm.RmsNormFp32": ClassHandler(read.read_norm, run_norm_in_dtype, ndim=None),
    "open_clip.transformer.LayerNorm": ClassHandler(read.read_norm, run_norm_in_dtype, ndim=None),
}
