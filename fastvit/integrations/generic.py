"""Modules of torch.nn that any model may contain: LayerNorm, and the convolution of a patch embedding."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastvit import ops
from fastvit._halves import Norm
from fastvit.integrations._plan import LAYER_NORM, Cannot, Plan, only_input, read_norm


def run_norm(norm: Any, x: Tensor, parts: Norm) -> Tensor:
    return ops.layer_norm(x, *parts)


def read_patches(conv: Any) -> tuple[Tensor, Tensor | None]:
    if (
        conv.kernel_size != conv.stride
        or conv.padding not in ((0, 0), "valid")
        or conv.dilation != (1, 1)
        or conv.groups != 1
    ):
        raise Cannot("its convolution is not one of disjoint patches")
    return conv.weight, conv.bias


def admit_image(conv: Any, *args: Any, **kwargs: Any) -> Any:
    x = only_input(conv, *args, **kwargs)
    if isinstance(x, Tensor) and x.dim() == 4:
        (H, W), (ph, pw) = x.shape[2:], conv.kernel_size
        if H % ph or W % pw:
            raise Cannot(f"an image of {H} x {W}, which patches of {ph} x {pw} do not cover")
    return x


def run_patches(conv: Any, x: Tensor, parts: tuple[Tensor, Tensor | None]) -> Tensor:
    """(B, C, H, W) -> (B, D, h, w), a view of tokens (B, h * w, D): what follows in every ViT, flatten(2) and
    transpose(1, 2), then copies nothing."""
    h = x.shape[2] // conv.kernel_size[0]
    return ops.patch_embed(x, *parts).unflatten(1, (h, -1)).permute(0, 3, 1, 2)


PATCHES = Plan(read_patches, run_patches, "patch_embed", admit_image, ndim=4)
PLANS = dict.fromkeys(LAYER_NORM, Plan(read_norm, run_norm, "layer_norm", ndim=None))
