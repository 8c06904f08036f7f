"""What a study is about: a model that can be built at other sizes, as each provider runs it. `find.py` has it
by name, file or function."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastvit.modules.arguments import Pair, checked_pair

PROVIDERS = ("eager", "sdpa", "fused")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Subject:
    """A model that can be built at other image sizes.

    Attributes:
        name: as it was asked for.
        source: "fastvit", "timm", "transformers", or "function".
        image_size, patch_size: (height, width), where nobody asks for another.
        has_patches: False for a model without a patch embedding, such as a ResNet, whose patch_size is (1, 1): it takes
            images of any size.
    """

    name: str
    source: str
    image_size: tuple[int, int]
    patch_size: tuple[int, int]
    _make: Callable[..., nn.Module] = field(repr=False)
    has_patches: bool = True

    def build(
        self, provider: str = "fused", image_size: Pair | None = None, patch_size: Pair | None = None, **options: Any
    ) -> nn.Module:
        """The model with random weights, on the default device.

        Args:
            provider: "eager" (attention with N x N scores), "sdpa" (PyTorch's), "fused" (fastvit's ops): the reference,
                or what another library writes; accelerated for "fused".
            image_size, patch_size: None for the model's own.
            options: of the model's constructor, such as num_classes.

        Raises:
            ValueError: an image size that the patch size does not divide, and what a constructor refuses.
        """
        if provider not in PROVIDERS:
            raise ValueError(f"provider must be one of {PROVIDERS}, got {provider!r}")
        size, patch = self.sizes(image_size, patch_size)
        if size != self.image_size and self.has_patches:
            options["image_size"] = size
        if patch != self.patch_size:
            options["patch_size"] = patch
        return self._make(provider, **options)

    def on_meta(
        self, provider: str = "fused", image_size: Pair | None = None, patch_size: Pair | None = None, **options: Any
    ) -> nn.Module:
        """The same on the meta device. What computes with values while it is made, is made on the CPU first."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of weights that are loaded into tensors without data
            try:
                with torch.device("meta"):
                    return self.build(provider, image_size, patch_size, **options)
            except Exception as error:
                if isinstance(error, ValueError) and error.__cause__ is None:  # what is refused here, for good
                    raise
                return self.build(provider, image_size, patch_size, **options).to("meta")

    def with_weights(self, weights: str | Path | None, image_size: Pair | None = None) -> nn.Module:
        """The model without its head, to look at its attention: with fastvit's ops if it is of the zoo, else as its
        library writes it, since PyTorch's SDPA is seen as well.

        Args:
            weights: as `create_model` takes them, for a name of the zoo; None for random ones, or those that a
                function loads.
            image_size: None for the model's own.

        Raises:
            ValueError: weights for a model that is not of the zoo, and what `build` refuses.
        """
        if weights is None:
            return self.build("fused" if self.source == "fastvit" else "sdpa", image_size)
        if self.source != "fastvit":
            raise ValueError(
                f"weights are for names of `fastvit models`, and {self.name} is of {self.source}: for others, name a "
                "function that returns the model with its weights, as module:function"
            )
        return self.build("fused", image_size, weights=weights, num_classes=0, drop_head=True)

    def running(self) -> AbstractContextManager[None]:
        """Within the context what a model of another library raises, of a size that it does not take or for want of
        another input, is an error of one line."""
        return contextlib.nullcontext() if self.source == "fastvit" else told(self.name)

    def sizes(
        self, image_size: Pair | None = None, patch_size: Pair | None = None
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        """Image and patch size as (height, width); a ValueError where the patch does not divide the image."""
        if patch_size is not None and not self.has_patches:
            raise ValueError(f"patch_size must be None for {self.name}, which has no patches, got {patch_size}")
        size = self.image_size if image_size is None else checked_pair("image_size", image_size)
        patch = self.patch_size if patch_size is None else checked_pair("patch_size", patch_size)
        if size[0] % patch[0] or size[1] % patch[1]:
            raise ValueError(
                f"image size {pixels(size)} is not a multiple of the patch size {pixels(patch)} of {self.name}; "
                f"nearest: {pixels(_nearest(size, patch))}"
            )
        return size, patch


@contextlib.contextmanager
def told(name: object) -> Iterator[None]:
    """Within the context whatever is raised becomes a ValueError of one line, but where something is not installed."""
    try:
        yield
    except ImportError:
        raise
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(f"{name}: {type(error).__name__}: {line}") from error


def output_of(result: Any) -> Tensor:
    """The tensor in what a model returns: itself, the logits or last hidden state, or the first of several."""
    if isinstance(result, Tensor):
        return result
    for name in ("logits", "last_hidden_state"):
        if isinstance(value := getattr(result, name, None), Tensor):
            return value
    values = result.values() if isinstance(result, dict) else result
    return next(value for value in values if isinstance(value, Tensor))


def images(count: int, size: tuple[int, int], dtype: torch.dtype, channels: int = 3) -> Tensor:
    """(count, channels, height, width) on the default device, random normal, without a gradient."""
    return torch.randn(count, channels, *size).to(dtype)


def embeds_patches(module: nn.Module) -> bool:
    """Whether a module is a convolution that strides as wide as its kernel, as patch embeddings do."""
    return isinstance(module, nn.Conv2d) and module.stride == module.kernel_size and module.stride[0] > 1


def channels(model: nn.Module) -> int:
    """Of the images that a model takes, by its patch embedding."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            return module.in_channels
    raise ValueError(f"{type(model).__name__} has no convolution that embeds patches")


def blocks(model: nn.Module) -> list[nn.Module]:
    """The modules of the longest list of one class."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential) and len({*map(type, m)}) == 1]
    return list(max(lists, key=len, default=nn.ModuleList()))


def pixels(size: tuple[int, int]) -> str:
    """(224, 224) -> "224", (224, 448) -> "224x448"."""
    return str(size[0]) if size[0] == size[1] else f"{size[0]}x{size[1]}"


def _nearest(size: tuple[int, int], patch: tuple[int, int]) -> tuple[int, int]:
    height, width = (max(1, round(s / p)) * p for s, p in zip(size, patch, strict=True))
    return height, width
