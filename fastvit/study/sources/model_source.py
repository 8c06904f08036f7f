"""A model that a study can build at several sizes, and what studies read from any model."""

from __future__ import annotations

import contextlib
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from fastvit._base.units import MOST_PIXELS
from fastvit.blocks.hooks import without_hooks
from fastvit.modules.arguments import Pair, checked_pair
from fastvit.study.sources.normalization import IMAGENET, Statistics

PROVIDERS = ("eager", "sdpa", "fastvit")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelSource:
    """Builds one model at any image size, as any provider runs it. `find` returns the source for a name.

    Args:
        name: as the user wrote it.
        origin: "fastvit", "timm", "transformers", "function" or "module".
        make: function(provider, **options) that builds the model on the default device. options: arguments of its
            constructor; sizes of images and patches are (height, width), and there only if they differ from the
            defaults.
        image_size, patch_size: the defaults, (height, width). patch_size is None for a model without a patch embedding,
            such as a ResNet, which takes images of any size; the attribute is (1, 1) then.
        normalization: mean and std of the images that the model expects.
        size_option: the constructor's name for the image size; None if it takes none and the model takes any size.

    Attributes:
        has_patches: False for a model without a patch embedding.
    """

    def __init__(
        self, name: str, origin: str, make: Callable[..., nn.Module], image_size: tuple[int, int],
        patch_size: tuple[int, int] | None, normalization: Statistics = IMAGENET,
        size_option: str | None = "image_size",
    ) -> None:  # fmt: skip
        self.name, self.origin, self.make, self.normalization = name, origin, make, normalization
        self.size_option = size_option
        self.image_size, self.patch_size, self.has_patches = image_size, patch_size or (1, 1), patch_size is not None

    def build(
        self, provider: str = "fastvit", image_size: Pair | None = None, patch_size: Pair | None = None, **options: Any
    ) -> nn.Module:
        """Build the model with random weights, on the default device.

        Args:
            provider: "eager" (attention with N x N scores), "sdpa" (PyTorch's), or "fastvit" (our ops). A zoo model
                is the reference or ours, a model of another library is its own, accelerated for "fastvit".
            image_size, patch_size: None for the defaults.
            options: more arguments of the model's constructor, such as num_classes.

        Raises:
            ValueError: the patch size does not divide the image size, or the constructor refuses an argument.
        """
        if provider not in PROVIDERS:
            raise ValueError(f"provider must be one of {PROVIDERS}, got {provider!r}")
        size, patch = self.sizes(image_size, patch_size)
        if size != self.image_size and self.has_patches and self.size_option:
            options[self.size_option] = size
        if patch != self.patch_size:
            options["patch_size"] = patch
        return self.make(provider, **options)

    def on_meta(
        self, provider: str = "fastvit", image_size: Pair | None = None, patch_size: Pair | None = None, **options: Any
    ) -> nn.Module:
        """Build the model on the meta device. A constructor that computes with values runs on the CPU first."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # weights are loaded into tensors without data
            try:
                with torch.device("meta"):
                    return self.build(provider, image_size, patch_size, **options)
            except Exception as error:
                if isinstance(error, ValueError) and error.__cause__ is None:  # our own check: no use to try again
                    raise
                return self.build(provider, image_size, patch_size, **options).to("meta")

    def with_weights(self, weights: str | Path | None, image_size: Pair | None = None) -> nn.Module:
        """Build the model to look at its attention, on PyTorch's SDPA, or with fastvit's ops if it is a zoo model.

        Args:
            weights: as `create_model` takes them, for a zoo model, which is then built without its head. None for
                random weights, or for those that a function loads.
            image_size: None for the default.

        Raises:
            ValueError: weights for a model that is not in the zoo, a model of videos, and what `build` refuses.
        """
        options: dict[str, Any] = {} if weights is None else {"weights": weights, "num_classes": 0, "drop_head": True}
        if self.origin == "fastvit":
            return self.build("fastvit", image_size, **options)
        if options:
            raise ValueError(
                f"weights are for names of `fastvit models`, and {self.name} is of {self.origin}: for others, name a "
                "function that returns the model with its weights, as module:function"
            )
        model = self.build("sdpa", image_size)
        if frames_of(model):
            raise ValueError(f"{self.name} takes videos, and attention is shown on pictures")
        return model

    def sizes(
        self, image_size: Pair | None = None, patch_size: Pair | None = None
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return image and patch size as (height, width).

        Raises:
            ValueError: the patch size does not divide the image size; sides above MOST_PIXELS.
        """
        if patch_size is not None and not self.has_patches:
            raise ValueError(f"patch_size must be None for {self.name}, which has no patches, got {patch_size}")
        size = self.image_size if image_size is None else checked_size("image_size", image_size)
        patch = self.patch_size if patch_size is None else checked_size("patch_size", patch_size)
        if size[0] % patch[0] or size[1] % patch[1]:
            raise ValueError(
                f"image size {pixels(size)} is not a multiple of the patch size {pixels(patch)} of {self.name}; "
                f"nearest: {pixels(_nearest(size, patch))}"
            )
        return size, patch

    def prefix_tokens(self, model: nn.Module, image_size: tuple[int, int], patch_size: tuple[int, int]) -> int | None:
        """Return how many tokens there are besides those of the patches, or None where the model is no plain ViT of
        images: there are fewer tokens than patches, or it takes videos.

        Args:
            model: of these sizes. If it does not say, a second one runs, and its first block shows it.
        """
        declared: int | None = getattr(model, "num_prefix_tokens", None)
        if declared is not None:
            return declared
        if frames_of(model):
            return None
        model = self.on_meta("sdpa", image_size, patch_size)
        with torch.device("meta"):
            pixel_values = images_for(model, 1, image_size, torch.float32)
        tokens: list[int] = []  # that the first block reads as (B, N, D)
        for first in blocks(model)[:1]:
            first.register_forward_pre_hook(
                lambda _, args: tokens.append(args[0].shape[1] if args[0].dim() == 3 else 0)
            )
            with without_hooks(model), one_line_errors(self.name), torch.no_grad():
                call(model, pixel_values)
        prefix = (tokens[0] if tokens else 0) - image_size[0] // patch_size[0] * (image_size[1] // patch_size[1])
        return None if prefix < 0 else prefix


@contextlib.contextmanager
def one_line_errors(name: object) -> Iterator[None]:
    """Turn any error within the context, except ImportError, into a ValueError of one line, and keep PyTorch from
    logging what fails on fake tensors."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, log.disabled = log.disabled, True
    try:
        yield
    except ImportError:
        raise
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[0]
        if type(error).__name__ in ("DataDependentOutputException", "DynamicOutputShapeException"):
            line = "its forward reads values of tensors, and a study runs it without data"
        raise ValueError(f"{name}: {type(error).__name__}: {line}") from error
    finally:
        log.disabled = disabled


def call(model: nn.Module, images: Tensor | list[Tensor]) -> Tensor:
    """Run a model on images and return `output_of` its result. V-JEPA 2 runs without its predictor, which reads values
    of tensors and so cannot run without data.

    Raises:
        TypeError: the model's first argument is text or audio, or it returns no tensor.
    """
    parameters = inspect.signature(model.forward).parameters
    if (first := next(iter(parameters), None)) in ("input_ids", "input_values", "input_features"):
        raise TypeError(f"{type(model).__name__} takes {first} first, and a study gives a model images only")
    options = {"skip_predictor": True} if "skip_predictor" in parameters else {}
    return output_of(model(images, **options))


def output_of(result: Any) -> Tensor:
    """Return the tensor in a model's result: itself, the logits, the last hidden state, or the first of several.

    Raises:
        TypeError: there is none.
    """
    if isinstance(result, Tensor):
        return result
    for name in ("logits", "last_hidden_state"):
        if isinstance(value := getattr(result, name, None), Tensor):
            return value
    tensor = next((value for value in tree_iter(result) if isinstance(value, Tensor)), None)
    if tensor is None:
        raise TypeError(f"the model returns no tensor, but {type(result).__name__}")
    return tensor


# The attribute of transformers' configurations that has the number of frames, by model_type
_FRAMES = {
    "timesformer": "num_frames", "videomae": "num_frames", "vivit": "num_frames", "vjepa2": "frames_per_clip",
}  # fmt: skip


def frames_of(model: nn.Module) -> int | None:
    """Return how many frames the videos have that a model of transformers takes, or None for any other model."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if name := _FRAMES.get(getattr(config, "model_type", "")):
            frames: int = getattr(config, name)
            return frames
    return None


def images_for(model: nn.Module, count: int, size: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return random normal images (count, C, H, W) with the model's channels, on the default device, without a
    gradient. transformers' models of videos get (count, T, C, H, W) with the frames of their configuration."""
    frames = frames_of(model)
    return torch.randn(count, *([] if frames is None else [frames]), channels(model), *size).to(dtype)


def embeds_patches(module: nn.Module) -> TypeGuard[nn.Conv2d | nn.Conv3d]:
    """Tell whether a module is a convolution whose stride equals its kernel, as in patch embeddings."""
    return isinstance(module, nn.Conv2d | nn.Conv3d) and module.stride == module.kernel_size and module.stride[-1] > 1


def patch_size_of(model: nn.Module) -> tuple[int, int] | None:
    """Return the stride of the first convolution that embeds patches, (height, width), or None if there is none."""
    return next(((m.stride[-2], m.stride[-1]) for m in model.modules() if embeds_patches(m)), None)


def channels(model: nn.Module) -> int:
    """Return how many channels the model's images have, read from its first convolution."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Conv3d):
            return module.in_channels
    raise ValueError(f"{type(model).__name__} has no convolution that embeds patches")


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules of the longest list whose modules have one class. If all lists have one module, return the one
    with the most submodules: a block, if it is neither a layer of a head nor the whole model, which embeds patches."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential) and len({*map(type, m)}) == 1]
    if any(len(m) > 1 for m in lists):
        return [*max(lists, key=len)]
    single = [m for m in lists if any(m[0].children()) and not any(map(embeds_patches, m.modules()))]
    return [*max(single, key=lambda m: len([*m.modules()]), default=())]


def equal_as_int(value: Any) -> Any:
    """Return one integer for an equal (height, width), because some constructors take only that."""
    return value[0] if isinstance(value, tuple) and value[0] == value[1] else value


def checked_size(name: str, value: Any) -> tuple[int, int]:
    """Return (height, width), from one integer or two, at most MOST_PIXELS each."""
    size = checked_pair(name, value)
    if max(size) > MOST_PIXELS:
        raise ValueError(f"{name} must have sides of at most {MOST_PIXELS} pixels, got {value!r}")
    return size


def pixels(size: tuple[int, int]) -> str:
    """Write a size: (224, 224) -> "224", (224, 448) -> "224x448"."""
    return str(size[0]) if size[0] == size[1] else f"{size[0]}x{size[1]}"


def _nearest(size: tuple[int, int], patch: tuple[int, int]) -> tuple[int, int]:
    height, width = (max(1, round(s / p)) * p for s, p in zip(size, patch, strict=True))
    return height, width
