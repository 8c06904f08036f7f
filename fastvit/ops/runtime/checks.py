"""Argument checks that the ops share. Each names the argument, what it was, and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Proxy

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def check_is_there(device: torch.device) -> None:
    """Check that a GPU exists."""
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device {device} is not there: torch sees {torch.cuda.device_count()} GPUs; `fastvit doctor` says why"
        )


def check_tensor(name: str, x: Any, *, is_image: bool = False) -> None:
    """Check that x is a dense tensor. is_image: the error has the line that converts an image of numpy or PIL."""
    if not isinstance(x, Tensor):
        kind = type(x)
        what = f"{name} must be a tensor, got {kind.__name__}"
        if is_image and (hasattr(kind, "__array__") or hasattr(kind, "__array_interface__")):
            array = name if hasattr(kind, "ndim") else f"numpy.array({name})"
            what += (
                f"; one of 8 bits (H, W, C) becomes a batch by torch.from_numpy({array}).permute(2, 0, 1)[None] / 255"
            )
        if isinstance(x, Proxy):
            what += (
                ": torch.fx cannot trace fused ops; use the model's forward_intermediates for features, or torch.export"
            )
        raise TypeError(what)
    if x.is_nested:  # before its shape, which a strided one does not have
        raise TypeError(f"{name} must be a dense tensor, got a nested one; x.unbind() is a list of dense ones")


def check_float(name: str, x: Tensor) -> None:
    check_tensor(name, x)
    if x.dtype not in FLOATS:
        raise TypeError(f"{name} must be float32, float16, bfloat16 or float64, got {x.dtype}")


def check_image(image: Tensor, channels: int, *, video: bool = False) -> None:
    """Check that image is (B, C, H, W), or a video (B, C, T, H, W), of any size."""
    check_tensor("image", image, is_image=True)
    if image.dtype is not torch.uint8 and image.dtype not in FLOATS:
        raise TypeError(f"image must be uint8, float32, float16, bfloat16 or float64, got {image.dtype}")
    if image.dim() != 4 + video or image.shape[1] != channels:
        axes = "(B, C, T, H, W)" if video else "(B, C, H, W)"
        shape, hint = tuple(image.shape), ""
        if len(shape) == 3 + video and shape[0] == channels:
            hint = "; image[None] is a batch of one"
        elif len(shape) == 4 + video and shape[-1] == channels:
            hint = "; image.movedim(-1, -3) has C there"
        raise ValueError(f"image must have shape {axes} with C = {channels}, got {shape}{hint}")


# (name, tensor, its shape or None for any, that shape in words such as "(D,)")
Argument = tuple[str, Tensor | None, Sequence[int] | None, str]


def check_like(like_name: str, like: Tensor, *arguments: Argument, dtype: bool = True) -> None:
    """Check that each argument is a tensor of its shape on like's device and, unless `dtype` is False, of like's
    dtype."""
    device, its_dtype = like.device, like.dtype
    for name, x, shape, meaning in arguments:
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.device != device:
            raise ValueError(f"{name} must be on {like_name}'s device {device}, got {x.device}")
        if dtype and x.dtype is not its_dtype:
            autocast = "" if torch.float64 in (x.dtype, its_dtype) else ", or torch.autocast"
            raise TypeError(
                f"{like_name} and {name} must have the same dtype, got {its_dtype} and {x.dtype}: use "
                f"{like_name}.to({x.dtype}) or model.to({its_dtype}){autocast}"
            )
        if shape is not None and x.shape != shape:
            raise ValueError(f"{name} must have shape {meaning} = {tuple(shape)}, got {tuple(x.shape)}")


NORMS = ("layer", "rms")


def check_norm(
    x_name: str, x: Tensor, names: Sequence[str], norm: tuple[Tensor, Tensor | None, float, str], shape: Sequence[int],
    meaning: str, *, dtype: bool,
) -> None:  # fmt: skip
    """Check a norm's weight, bias, eps and kind, which the caller calls by these names, for x. shape: (D,); meaning:
    that in words."""
    (weight, bias, eps, kind), (weight_name, bias_name, eps_name, kind_name) = norm, names
    if not shape or shape[0] == 0:
        raise ValueError(f"{x_name} must have a non-empty last dimension, got shape {tuple(x.shape)}")
    if kind not in NORMS:
        raise ValueError(f"{kind_name} must be one of {', '.join(NORMS)}, got {kind!r}")
    parameters = [(weight_name, weight, shape, meaning)]
    if bias is not None:
        if kind == "rms":
            raise ValueError(f"{bias_name} must be None for {kind_name}='rms': RMSNorm has no bias")
        parameters.append((bias_name, bias, shape, meaning))
    check_like(x_name, x, *parameters, dtype=dtype)
    if eps is None:  # nn.RMSNorm's default
        raise TypeError(f"{eps_name} must be a number, got None")
    if not 0.0 <= eps < math.inf:
        raise ValueError(f"{eps_name} must be finite and not negative, got {eps}")


def check_dropout(name: str, p: float) -> None:
    if not 0.0 <= p < 1.0:
        raise ValueError(f"{name} must be in [0, 1), got {p}")


def check_recompute(recompute: str, allowed: tuple[str, ...]) -> None:
    if recompute not in allowed:
        raise ValueError(f"recompute must be one of {', '.join(allowed)}, got {recompute!r}")


def takes_head_dim(head_dim: int) -> bool:
    """Return whether attention has kernels for this head dimension."""
    return head_dim % 8 == 0 and 16 <= head_dim <= 256


def check_dimensions(name: str, x: Tensor, shape: str) -> None:
    """Check a float tensor's number of dimensions, by their names, and the 3 of a packed qkv."""
    check_float(name, x)
    if x.dim() != shape.count(",") + 1 or (name == "qkv" and x.shape[-3] != 3):
        raise ValueError(f"{name} must have shape ({shape}), got {tuple(x.shape)}")


def check_head_dim(name: str, head_dim: int) -> None:
    if not takes_head_dim(head_dim):
        raise ValueError(f"{name} must be a multiple of 8 from 16 to 256, got {head_dim}")


def check_statistics(name: str, values: Any, channels: int) -> tuple[float, ...]:
    """Check mean or std of uint8 images divided by 255; return one number a channel."""
    allowed = "(0, 1]" if name == "std" else "[0, 1]"
    what = f"{name} must be one number in {allowed} for each of the {channels} channels"
    try:
        numbers = tuple([float(v) for v in values])
    except (TypeError, ValueError) as error:
        raise TypeError(f"{what}, got {values!r}") from error
    if len(numbers) != channels or not all(0.0 <= v <= 1.0 for v in numbers) or (name == "std" and 0.0 in numbers):
        raise ValueError(f"{what}, got {numbers}; images in 0 ... 255 are divided by 255 first")
    return numbers


def check_row_scale(name: str, x: Tensor, row_scale: Tensor | None) -> None:
    """Check row_scale, or None: (B,) for x (B, ..., D), (T,) for x (T, D)."""
    if row_scale is None:
        return
    if x.dim() < 2:
        raise ValueError(f"row_scale needs {name} with a batch dimension, got shape {tuple(x.shape)}")
    check_like(name, x, ("row_scale", row_scale, x.shape[:1], "(B,)" if x.dim() > 2 else "(T,)"), dtype=False)
    if row_scale.dtype.is_complex:
        raise TypeError(f"row_scale must be of real numbers, got {row_scale.dtype}")
    if row_scale.requires_grad and torch.is_grad_enabled():
        raise ValueError("row_scale must not require a gradient: it is not differentiated; detach() it")
