"""Patch embedding, the first layer of a Vision Transformer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fastvit import ops
from fastvit.blocks import read
from fastvit.blocks.submodules import read_or_none, submodules
from fastvit.modules.arguments import Device, Dtype, Pair, checked_pair, checked_statistics, with_known_arguments
from fastvit.modules.norms import NormLayer, checked_norm_layer
from fastvit.modules.positions import resample_patch_embed
from fastvit.ops.patch_embed.op import normalized
from fastvit.ops.runtime.checks import check_image


@with_known_arguments
class PatchEmbed(nn.Module):
    """Image (B, C, H, W) -> patches (B, h*w, D) by `fastvit.ops.patch_embed`; `proj` is the equivalent nn.Conv2d.

    Args:
        img_size: expected (H, W); with strict_img_size another size raises, otherwise any that patch_size divides.
        patch_size, in_chans, embed_dim, bias: of the convolution.
        mean, std: C values each, in [0, 1]; a uint8 image is taken as (x / 255 - mean) / std.
        device, dtype: of the parameters.
        norm_layer: a norm of the patches before positions are added, as `norm`: a class, "layernorm" or "rmsnorm".
    """

    __module__ = "fastvit.layers"

    def __init__(
        self, img_size: Pair = 224, patch_size: Pair = 16, in_chans: int = 3, embed_dim: int = 768, bias: bool = True,
        strict_img_size: bool = True, mean: Sequence[float] | None = None, std: Sequence[float] | None = None,
        device: Device = None, dtype: Dtype = None,
        *, norm_layer: str | NormLayer | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.in_chans = in_chans
        self.patch_size = checked_pair("patch_size", patch_size)
        self.strict_img_size = strict_img_size
        self.mean, self.std = checked_statistics(mean, std, in_chans)
        self.img_size = checked_pair("img_size", img_size)
        self.set_input_size(self.img_size)
        self.proj = nn.Conv2d(
            in_chans, embed_dim, self.patch_size, self.patch_size, bias=bias, device=device, dtype=dtype
        )
        if norm_layer is not None:
            self.norm = checked_norm_layer(norm_layer)(embed_dim, device=device, dtype=dtype)

    def set_input_size(self, img_size: Pair | None = None, patch_size: Pair | None = None) -> None:
        """Set the expected (H, W) and the patch size; `proj.weight` is resampled to another patch size.

        Args:
            img_size, patch_size: int or (height, width); None keeps the present one.

        Raises:
            TypeError, ValueError: naming the argument; patch_size for a `proj` that is no plain convolution of patches.
                Nothing is changed then.
        """
        img_size = self.img_size if img_size is None else checked_pair("img_size", img_size)
        patch_size = self.patch_size if patch_size is None else checked_pair("patch_size", patch_size)
        grid_size = patch_grid(img_size, patch_size)
        if patch_size != self.patch_size:
            self._resample(patch_size)
        self.img_size, self.patch_size, self.grid_size = img_size, patch_size, grid_size
        self.num_patches = math.prod(grid_size)

    @torch.no_grad()
    def _resample(self, patch_size: tuple[int, int]) -> None:
        """Give `proj` another kernel size, in place: its hooks, its bias and requires_grad stay."""
        conv = self.proj
        if not (isinstance(conv, nn.Conv2d) and "weight" in conv._parameters and is_of_patches(conv)):
            raise ValueError(f"patch_size needs a plain convolution of patches as `proj`, got {conv}")
        weight = resample_patch_embed(conv.weight, patch_size)
        conv.weight = nn.Parameter(weight, requires_grad=conv.weight.requires_grad)
        conv.kernel_size = conv.stride = patch_size

    def grid_of(self, image: Tensor, any_size: bool = False) -> tuple[int, int]:
        """Return the patch grid of an image; a TypeError or ValueError if `forward` does not accept it."""
        check_image(image, getattr(self.proj, "in_channels", self.in_chans))
        size = image.shape[-2], image.shape[-1]
        if self.strict_img_size and not any_size and size != self.img_size:
            whole = not any(side % patch for side, patch in zip(size, self.patch_size, strict=True))
            other = f", or make the model with img_size={size} or dynamic_img_size=True" if whole else ""
            raise ValueError(f"image must have the size (H, W) = {self.img_size}, got {size}: resize it{other}")
        return patch_grid(size, self.patch_size)

    def forward(
        self, x: Tensor, pos_embed: Tensor | None = None, prefix: Tensor | None = None, any_size: bool = False
    ) -> Tensor:
        """Add pos_embed (n, D) to the patches and write prefix (P, D) before them: (B, C, H, W) -> (B, P + n, D).
        any_size: take any size that patch_size divides, also with strict_img_size."""
        self.grid_of(x, any_size)
        if "norm" in self._modules:
            return join_tokens(self.norm(self.patches(x)), pos_embed, prefix)
        return self.patches(x, pos_embed, prefix)

    def patches(self, x: Tensor, pos_embed: Tensor | None = None, prefix: Tensor | None = None) -> Tensor:
        """Embed as `forward` does, without checks and norm."""
        if read_or_none(submodules, self, proj={nn.Conv2d}) and is_of_patches(self.proj):
            weight, bias = read.read_linear(self.proj)
            mean, std = (self.mean, self.std) if x.dtype is torch.uint8 else (None, None)
            return ops.patch_embed(x, weight, bias, pos_embed=pos_embed, prefix=prefix, mean=mean, std=std)
        return join_tokens(self.proj(self.normalized(x)).flatten(2).transpose(1, 2), pos_embed, prefix)

    def normalized(self, image: Tensor) -> Tensor:
        """Return a uint8 image normalised in the layer's dtype; a float image is returned as it is."""
        if image.dtype is not torch.uint8:
            return image
        return normalized(image, self.mean, self.std, next(self.proj.parameters()).dtype)


def patch_grid(img_size: tuple[int, int], patch_size: tuple[int, int]) -> tuple[int, int]:
    """Return the patch grid (h, w); a ValueError if patch_size does not divide img_size."""
    (H, W), (ph, pw) = img_size, patch_size
    if H % ph or W % pw or H == 0 or W == 0:
        raise ValueError(f"patch_size {patch_size} must divide the image size, got {(H, W)}")
    return H // ph, W // pw


def is_of_patches(conv: nn.Conv2d | nn.Conv3d) -> bool:
    """Return whether a convolution, which may have replaced the constructor's, is the one that the op computes."""
    whole = conv.padding == "valid" or set(conv.padding) == {0}
    return whole and conv.stride == conv.kernel_size and set(conv.dilation) == {1} and conv.groups == 1


def join_tokens(patches: Tensor, pos_embed: Tensor | None, prefix: Tensor | None) -> Tensor:
    """Concatenate prefix (P, D) and patches (B, n, D) + pos_embed (n, D), as `ops.patch_embed`: (B, P + n, D)."""
    if pos_embed is not None:
        patches = patches + pos_embed
    if prefix is None:
        return patches
    return torch.cat([prefix.to(patches.dtype).expand(patches.shape[0], -1, -1), patches], dim=1)
