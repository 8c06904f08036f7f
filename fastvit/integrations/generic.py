"""Modules of torch.nn that any model may contain: LayerNorm, and the convolution of a patch embedding."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastvit import fuse, ops
from fastvit.fuse import Linear, Norm, Unsupported
from fastvit.integrations._plan import Plan, only_input


def run_norm(x: Tensor, norm: Norm) -> Tensor:
    return ops.layer_norm(x, norm.weight, norm.bias, norm.eps)


def read_patches(conv: Any) -> Linear:
    """weight (D, C, ph, pw)"""
    of_patches = (conv.stride, (1, 1), 1)
    if (conv.kernel_size, conv.dilation, conv.groups) != of_patches or conv.padding not in ((0, 0), "valid"):
        raise Unsupported("its convolution is not one of disjoint patches")
    return fuse.read_linear(conv)


def check_image(conv: Any, *args: Any, **kwargs: Any) -> Any:
    x = only_input(conv, *args, **kwargs)
    if isinstance(x, Tensor) and x.dim() == 4:
        (H, W), (ph, pw) = x.shape[2:], conv.kernel_size
        if H % ph or W % pw:
            raise Unsupported(f"an image of {H} x {W}, which patches of {ph} x {pw} do not cover")
    return x


def run_patches(x: Tensor, patches: Linear) -> Tensor:
    """(B, C, H, W) -> (B, D, h, w), a view of tokens (B, h * w, D): what follows in every ViT, flatten(2) and
    transpose(1, 2), then copies nothing."""
    h = x.shape[2] // patches.weight.shape[2]
    return ops.patch_embed(x, *patches).unflatten(1, (h, -1)).permute(0, 3, 1, 2)


PATCHES = Plan(read_patches, run_patches, "patch_embed", check_image, ndim=4)
PLANS = dict.fromkeys(fuse.LAYER_NORM, Plan(fuse.read_norm, run_norm, "layer_norm", ndim=None))
