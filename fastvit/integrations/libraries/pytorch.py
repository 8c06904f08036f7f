"""Modules of any model: LayerNorm and RMSNorm of torch.nn and timm, and the convolution of a patch
embedding."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastvit import ops
from fastvit.blocks import read, run
from fastvit.blocks.submodules import CannotFuse
from fastvit.integrations.forward import ClassHandler, only_input
from fastvit.modules.arguments import Statistics
from fastvit.modules.patch_embed import is_of_patches
from fastvit.ops import Norm


class Patches(NamedTuple):
    """A patch embedding. weight (D, C, ph, pw); bias (D,) or None; mean, std: C values for uint8 images, or None."""

    weight: Tensor
    bias: Tensor | None
    mean: Statistics
    std: Statistics


def run_norm_in_dtype(x: Tensor, norm: Norm) -> Tensor:
    """Run timm's RmsNormFp32, which returns x's dtype under autocast too."""
    return run.run_norm(x, norm).to(x.dtype)


def read_patches(conv: Any, mean: Statistics = None, std: Statistics = None) -> Patches:
    if not is_of_patches(conv):
        raise CannotFuse("its convolution is not one of disjoint patches")
    return Patches(*read.read_linear(conv), mean, std)


def check_image(conv: Any, *args: Any, **kwargs: Any) -> Any:
    x = only_input(conv, *args, **kwargs)
    if isinstance(x, Tensor) and x.dim() == 4:
        (H, W), (ph, pw) = x.shape[2:], conv.kernel_size
        if H % ph or W % pw:
            raise CannotFuse(f"an image of {H} x {W}, which patches of {ph} x {pw} do not cover")
    return x


def run_patches(x: Tensor, patches: Patches) -> Tensor:
    """Embed (B, C, H, W) as (B, D, h, w), a view of tokens (B, h * w, D). flatten(2) and transpose(1, 2), which follow
    in every ViT, then copy nothing."""
    weight, bias, mean, std = patches
    h = x.shape[2] // weight.shape[2]
    if x.dtype is not torch.uint8:
        mean = std = None
    return ops.patch_embed(x, weight, bias, mean=mean, std=std).unflatten(1, (h, -1)).permute(0, 3, 1, 2)


def patches(mean: Statistics = None, std: Statistics = None) -> ClassHandler:
    """Return the handler of a patch embedding's convolution. With mean and std it takes uint8 images too, normalised to
    (x / 255 - mean) / std."""
    reader = partial(read_patches, mean=mean, std=std)
    return ClassHandler(reader, run_patches, check_image, ndim=4, takes_pixels=mean is not None, op="patch_embed")


HANDLERS: dict[type | str, ClassHandler] = {
    **dict.fromkeys(read.LAYER_NORM, ClassHandler(read.read_norm, run.run_norm, ndim=None, op="layer_norm")),
    **dict.fromkeys(read.RMS_NORM, ClassHandler(read.read_norm, run.run_norm, ndim=None, op="rms_norm")),
    "timm.layers.norm.RmsNormFp32": ClassHandler(read.read_norm, run_norm_in_dtype, ndim=None, op="rms_norm"),
}
