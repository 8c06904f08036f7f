"""uint8 images and videos in accelerated models, normalised by the patch embedding, or before by a module that would
cast them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from fastvit.ops.patch_embed.op import normalized

_ARGUMENTS = ("pixel_values", "pixel_values_videos")  # in transformers, whose modules may cast them to a float dtype


def check(model: nn.Module, embeddings: list[str], channels: int) -> None:
    """Check that uint8 images reach the convolutions of these names. Raises ValueError if not."""
    if not embeddings:
        raise ValueError("mean and std are for uint8 images, but no patch embedding of this model can be accelerated")
    for name in embeddings:
        conv, owner = model.get_submodule(name), model.get_submodule(name.rpartition(".")[0])
        if conv.in_channels != channels:
            raise ValueError(f"mean must have one value for each of the {conv.in_channels} channels, got {channels}")
        if getattr(owner, "dynamic_img_pad", False):
            raise ValueError(
                f"mean and std are for uint8 images, but {type(owner).__name__} pads its image before they could "
                "apply: normalise before the model"
            )


def put_on(model: nn.Module, embeddings: list[str], mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    """Normalise uint8 `pixel_values` and `pixel_values_videos` in every module around these convolutions that takes
    them. The outermost module of a call does it; the modules in it see floats."""
    for name in embeddings:
        conv = cast(nn.Conv2d | nn.Conv3d, model.get_submodule(name))
        for module in _around(model, name):
            parameters = inspect.signature(module.forward).parameters
            for position, argument in enumerate(parameters):
                if argument in _ARGUMENTS:
                    hook = partial(_normalize, conv, argument, position, mean, std)
                    module.register_forward_pre_hook(hook, with_kwargs=True)


def take_off(model: nn.Module) -> None:
    """Remove all hooks of `put_on`."""
    for module in model.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, partial) and hook.func is _normalize:
                del module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key]


def _around(model: nn.Module, name: str) -> Iterator[nn.Module]:
    """Yield the modules that contain the submodule of this name, from the innermost."""
    while name:
        name = name.rpartition(".")[0]
        yield model.get_submodule(name)


def _normalize(
    conv: nn.Conv2d | nn.Conv3d, argument: str, position: int, mean: tuple[float, ...], std: tuple[float, ...],
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:  # fmt: skip
    """Normalise a call's uint8 image (B, C, H, W), or video (B, T, C, H, W), as a forward pre-hook. position: of the
    argument. Images with more dimensions (several crops) are left to the modules inside."""
    image = args[position] if position < len(args) else kwargs.get(argument)
    if not isinstance(image, Tensor) or image.dtype is not torch.uint8 or image.dim() != conv.weight.dim():
        return None
    frames = image.flatten(0, -4)  # (..., C, H, W)
    image = normalized(frames, mean, std, conv.weight.dtype).view(image.shape)
    if position < len(args):
        return (*args[:position], image, *args[position + 1 :]), kwargs
    return args, {**kwargs, argument: image}
