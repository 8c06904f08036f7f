"""Patch embedding: registration, gradients, checks, public function."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastvit.ops.patch_embed import aten
from fastvit.ops.runtime.autograd import Computed, FusedNode, inputs, needs_autograd
from fastvit.ops.runtime.backend import Route
from fastvit.ops.runtime.checks import check_float, check_image, check_like, check_statistics
from fastvit.ops.runtime.device import is_fake
from fastvit.ops.runtime.dtypes import autocast_dtype
from fastvit.ops.runtime.record import constant
from fastvit.ops.runtime.registry import register
from fastvit.ops.runtime.run import Prepared, run

# ---- registered ops ----


def _gemm_flops(image: Any, weight: Any) -> int:
    """Count FLOPs for image [B, C, H, W], weight [D, C, ph, pw], or a video's: every pixel meets every feature once."""
    return 2 * math.prod(image) * weight[0]


patch_embed_fwd = register(
    "patch_embed_fwd(Tensor image, Tensor weight, Tensor? bias, Tensor? pos_embed, Tensor? prefix, Tensor? normalize)"
    " -> Tensor",
    aten=aten.patch_embed_fwd,
    fake=aten.new_tokens,
    flops=lambda image, weight, *_, out_shape=None, **__: _gemm_flops(image, weight),
    plain=aten.plain,
)
patch_embed_bwd_weight = register(
    "patch_embed_bwd_weight(Tensor dout, Tensor image, Tensor weight, Tensor? normalize) -> Tensor",
    aten=aten.patch_embed_bwd_weight,
    fake=lambda dout, image, weight, *_: weight,
    flops=lambda dout, image, weight, *_, out_shape=None, **__: _gemm_flops(image, weight),
)
patch_embed_bwd_image = register(
    "patch_embed_bwd_image(Tensor dout, Tensor weight, SymInt[] size, ScalarType dtype) -> Tensor",
    aten=aten.patch_embed_bwd_image,
    fake=aten.new_image,
    flops=lambda dout, weight, *_, out_shape=None, **__: _gemm_flops(out_shape, weight),
)


Statistics = Sequence[float] | Tensor


class _Options(NamedTuple):
    op: str
    dtypes: tuple[torch.dtype | None, ...]  # of the first five inputs
    cast: torch.dtype | None  # autocast's dtype, for the weight


class _PatchEmbed(FusedNode):
    Inputs = inputs("image", "weight", "bias", "pos_embed", "prefix", "normalize")
    casts = ("weight",)
    saved = ("image", "weight", "normalize")

    @staticmethod
    def compute(t: Any) -> Computed:
        _, route, *tensors = t
        return (patch_embed_fwd(*tensors, route=route),), {}

    @staticmethod
    def needed(t: Any, intermediates: dict[str, Any], needs_grad: Any) -> dict[str, bool]:
        return {"image": needs_grad.weight}

    @staticmethod
    def sizes(t: Any) -> tuple[int, ...]:
        return tuple(t.image.shape[2:])

    @staticmethod
    def gradients(s: dict[str, Any], douts: Any, o: _Options, needs_grad: Any, route: Route) -> dict[str, Any]:
        (dout,), weight = douts, s["weight"]
        dtypes = dict(zip(("image", "weight", "bias", "pos_embed", "prefix"), o.dtypes, strict=True))
        found: dict[str, Tensor] = {}
        if needs_grad.image:
            found["image"] = patch_embed_bwd_image(dout, weight, s["sizes"], dtypes["image"], route=route)
        if needs_grad.weight:
            found["weight"] = patch_embed_bwd_weight(dout, s["image"], weight, s["normalize"], route=route)
        if needs_grad.bias or needs_grad.pos_embed or needs_grad.prefix:
            # one pass over dout serves all three; plain sums are ATen's. A single image needs no sum over images
            wide = torch.promote_types(dout.dtype, torch.float32)
            sums = dout[0] if dout.shape[0] == 1 else dout.sum(0, dtype=wide)
            n = math.prod(aten.patch_grid(weight, s["sizes"]))
            prefix, patches = sums.split([sums.shape[0] - n, n])
            if needs_grad.bias:
                found["bias"] = patches.sum(0, dtype=wide)
            if needs_grad.pos_embed:
                found["pos_embed"] = patches
            if needs_grad.prefix:
                found["prefix"] = prefix
        return {name: t.to(dtypes[name]) for name, t in found.items()}


_constants: dict[tuple[Any, ...], Tensor] = {}


def _normalization(image: Tensor, mean: Statistics | None, std: Statistics | None, dtype: torch.dtype) -> Tensor | None:
    """Return (x / 255 - mean) / std as scale and shift [2, C] for a uint8 image, None for a float one."""
    if image.dtype is not torch.uint8:
        for name, value in (("mean", mean), ("std", std)):
            if value is not None:
                raise ValueError(f"{name} is for uint8 images; a {image.dtype} image is taken as it is")
        return None
    C, device = image.shape[1], image.device
    mean, std = (0.0,) * C if mean is None else mean, (1.0,) * C if std is None else std
    if isinstance(mean, Tensor) or isinstance(std, Tensor):
        for name, value in (("mean", mean), ("std", std)):
            count = value.numel() if isinstance(value, Tensor) else len(value)
            if count != C:
                raise ValueError(f"{name} must have one value for each of the {C} channels, got {count}")
        mean, std = (torch.as_tensor(t, dtype=dtype, device=device).detach().reshape(C) for t in (mean, std))
        return torch.stack([1 / (255 * std), -mean / std])
    mean, std = check_statistics("mean", mean, C), check_statistics("std", std, C)
    values = [[1 / (255 * s) for s in std], [-m / s for m, s in zip(mean, std, strict=True)]]
    if torch.compiler.is_compiling() or is_fake(image):  # a mode of fake tensors takes no kept ones
        return torch.tensor(values, dtype=dtype, device=device)
    key = (mean, std, device, dtype)

    def made_once() -> Tensor:  # a copy to the GPU would synchronise, and cannot be captured in a graph
        if key not in _constants:
            with torch.inference_mode(False):
                made = torch.tensor(values, dtype=dtype, device=device)
            if type(made) is not Tensor:  # a fake tensor must not outlive its mode
                return made
            _constants[key] = made
        return _constants[key]

    return constant(made_once)


def normalized(image: Tensor, mean: Statistics | None, std: Statistics | None, dtype: torch.dtype) -> Tensor:
    """Return a uint8 image or video as (x / 255 - mean) / std in dtype, for callers that cannot pass it to the op."""
    constants = _normalization(image, mean, std, torch.promote_types(dtype, torch.float32))
    assert constants is not None
    return aten.normalized(image, constants).to(dtype)


def patch_embed(
    image: Tensor, weight: Tensor, bias: Tensor | None, *, pos_embed: Tensor | None = None,
    prefix: Tensor | None = None, mean: Statistics | None = None, std: Statistics | None = None,
) -> Tensor:  # fmt: skip
    """Compute the tokens of a ViT from its image, in one pass (Dosovitskiy et al. 2021, equation 1): the prefix tokens,
    then the convolution with stride = kernel size, flattened row by row, plus position. For videos, whose patches are
    tubelets of pt frames (Arnab et al. 2021, arXiv:2103.15691), it is a 3-D convolution, flattened frame by frame.

    Args:
        image: (B, C, H, W), or a video (B, C, T, H, W), any strides; float32, float16, bfloat16 or float64, taken as it
            is, or uint8, taken as (image / 255 - mean) / std without a float copy. On a GPU rows of contiguous pixels
            are read in place, so that video.transpose(1, 2) of frames (B, T, C, H, W) copies nothing; another layout,
            such as channels_last, is copied first.
        weight: (D, C, ph, pw) as `nn.Conv2d`'s, or (D, C, pt, ph, pw) as `nn.Conv3d`'s for a video, image's dtype if
            that is a float. ph divides H, pw divides W, and pt divides T.
        bias: (D,), weight's dtype, or None.
        pos_embed: (n, D), weight's dtype: added to the n = H/ph * W/pw patches, T/pt times as many of a video; or None.
        prefix: (P, D), weight's dtype: CLS and register tokens, their position already added; or None.
        mean, std: C values each, for uint8 images only. They are for pixels divided by 255, so in [0, 1] and in (0, 1];
            None means 0 and 1. Sequences of floats, or tensors, whose values are not checked. Not differentiated.

    Returns:
        (B, P + n, D), contiguous, weight's dtype. Under autocast the convolution runs in autocast's dtype and the
        result has, as in eager, the widest of it and the dtypes of pos_embed and prefix.

    Raises:
        TypeError, ValueError: naming the argument, for dtypes, devices and shapes that do not fit, a patch that does
            not divide the image, and mean or std with a float image.
    """
    out: Tensor = run("patch_embed", _prepared, (image, weight, bias, pos_embed, prefix, mean, std))
    return out


def _prepared(
    image: Tensor, weight: Tensor, bias: Tensor | None, pos_embed: Tensor | None, prefix: Tensor | None,
    mean: Statistics | None, std: Statistics | None,
) -> Prepared:  # fmt: skip
    check_float("weight", weight)
    cast = None
    if isinstance(image, Tensor) and weight.dtype is not torch.float64:
        cast = autocast_dtype(image)
    if weight.dim() not in (4, 5) or 0 in weight.shape:
        shapes = "(D, C, ph, pw), or (D, C, pt, ph, pw) for a video"
        raise ValueError(f"weight must have shape {shapes}, none of them 0, got {tuple(weight.shape)}")
    check_image(image, weight.shape[1], video=weight.dim() == 5)
    check_like("image", image, ("weight", weight, None, ""), dtype=cast is None and image.dtype is not torch.uint8)
    D, size, patch = weight.shape[0], tuple(image.shape[2:]), tuple(weight.shape[2:])
    if 0 in size or any([n % step for n, step in zip(size, patch, strict=True)]):
        axes = "(H, W)" if len(size) == 2 else "(T, H, W)"
        raise ValueError(f"image size {axes} must be a positive multiple of the patch {patch}, got {size}")
    if bias is not None:
        check_like("weight", weight, ("bias", bias, (D,), "(D,)"), dtype=cast is None)
    if pos_embed is not None:
        n = math.prod(aten.patch_grid(weight, size))
        check_like("weight", weight, ("pos_embed", pos_embed, (n, D), "(patches, D)"), dtype=cast is None)
    if prefix is not None:
        check_like("weight", weight, ("prefix", prefix, None, ""), dtype=cast is None)
        if prefix.dim() != 2 or prefix.shape[1] != D:
            raise ValueError(f"prefix must have shape (P, D) with D = {D}, got {tuple(prefix.shape)}")
    tensors = image, weight, bias, pos_embed, prefix
    dtypes = tuple([None if t is None else t.dtype for t in tensors])
    normalize = _normalization(image, mean, std, torch.promote_types(cast or weight.dtype, torch.float32))
    autograd = needs_autograd("patch_embed", *tensors)
    return _PatchEmbed, autograd, _Options("patch_embed", dtypes, cast), (*tensors, normalize)
