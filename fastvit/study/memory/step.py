"""One training or inference step of a model, and its options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from fastvit.study.sources import model_source
from fastvit.study.sources.model_source import ModelSource, call, images_for

MODES = ("train", "infer")
OPTIMIZERS = ("adamw", "sgd", "none")
DTYPES = model_source.DTYPES | {"amp": torch.float32}  # of parameters
DTYPES |= {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Setting:
    """The options of a step, except model, provider and sizes.

    Attributes:
        mode: "train" (forward, backward, and an optimizer's step that finds its state) or "infer".
        dtype: of parameters and activations, or "amp": float32 parameters under autocast to bfloat16.
        optimizer: "adamw", "sgd" (with momentum) or "none" (no step). For "train" only.
        checkpointing: recompute blocks in the backward pass. For "train" only.
        graphs: the passes are one captured CUDA graph, as `fastvit.graphs` captures them. Planned only, for a GPU.

    Raises:
        ValueError: an unknown value.
    """

    mode: str = "train"
    dtype: str = "bfloat16"
    optimizer: str = "adamw"
    checkpointing: bool = False
    graphs: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (("mode", MODES), ("dtype", tuple(DTYPES)), ("optimizer", OPTIMIZERS)):
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


Together = tuple[tuple[int, int], ...]  # sizes of the images of a list; () for a batch of one size


class StepSpec(NamedTuple):
    """Describes one step of a model.

    Attributes:
        source: builds the model.
        image_size: (height, width) in pixels.
        batch: images; of a list, images of each size.
        setting: the other options.
        gpu: on a GPU; else on a CPU.
        provider: "eager", "sdpa" or "fastvit".
        patch_size: (height, width) in pixels; None for the model's.
        together: sizes of a list of images, with a batch of each, instead of a batch of the model's image_size.
        accumulates: gradients of earlier batches exist, and the step adds to them.
    """

    source: ModelSource
    image_size: tuple[int, int]
    batch: int
    setting: Setting
    gpu: bool
    provider: str = "fastvit"
    patch_size: tuple[int, int] | None = None
    together: Together = ()
    accumulates: bool = False

    def images(self, model: nn.Module) -> Tensor | list[Tensor]:
        """Return random images: a batch, or with `together` a list with a batch of each size."""
        dtype = DTYPES[self.setting.dtype]
        if not self.together:
            return images_for(model, self.batch, self.image_size, dtype)
        return [images_for(model, self.batch, size, dtype) for size in self.together]


class Step:
    """Run one step of a model, on real or fake tensors.

    Raises:
        ValueError: training without a parameter that requires a gradient.
    """

    def __init__(self, model: nn.Module, images: Tensor | list[Tensor], setting: Setting, gpu: bool) -> None:
        self.model, self.images, self.setting = model, images, setting
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        if setting.mode == "train" and not self.parameters:
            raise ValueError(
                "mode 'train' needs a parameter that requires a gradient, and all of the model's are frozen"
            )
        self.model.train(setting.mode == "train")
        self.optimizer: torch.optim.Optimizer | None = None
        if setting.mode == "infer":
            return
        # foreach is PyTorch's default on a GPU, and needs more memory
        if setting.optimizer == "adamw":
            self.optimizer = torch.optim.AdamW(self.parameters, lr=0.0, foreach=gpu)
        elif setting.optimizer == "sgd":
            self.optimizer = torch.optim.SGD(self.parameters, lr=0.0, momentum=0.9, foreach=gpu)
        if setting.checkpointing:
            _checkpoint(model)

    def make_state(self) -> None:
        """Make the optimizer's state, as an earlier step would have."""
        if self.optimizer is not None:
            for p in self.parameters:
                p.grad = torch.zeros_like(p)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def state(self) -> list[Tensor]:
        """Return the tensors of the optimizer's state."""
        values = [] if self.optimizer is None else self.optimizer.state.values()
        return [t for value in values for t in value.values() if isinstance(t, Tensor)]

    def run(self) -> None:
        """Run the whole step."""
        loss = self.passes()  # lives until the end of the step, as in a training loop
        self.update()
        del loss

    def passes(self, reached: Callable[[str], None] = lambda what: None) -> Tensor:
        """Run forward, and in training backward. Return the loss, or the model's output.

        Args:
            reached: called with "forward" and "backward" after each pass.
        """
        trains, amp = self.setting.mode == "train", self.setting.dtype == "amp"
        device = next(iter(tree_iter(self.images))).device.type
        with torch.set_grad_enabled(trains):
            with torch.autocast(device, torch.bfloat16, enabled=amp, cache_enabled=True):
                out = call(self.model, self.images)
            out = out.float().square().mean() if trains else out
        reached("forward")
        if trains:
            out.backward()
            reached("backward")
        return out

    def update(self) -> None:
        """Run the optimizer's step."""
        if self.optimizer is not None:
            self.optimizer.step()


def _checkpoint(model: nn.Module) -> None:
    """Switch on activation checkpointing by the method of timm, transformers or this library."""
    for name in ("set_grad_checkpointing", "gradient_checkpointing_enable"):
        if callable(enable := getattr(model, name, None)):
            enable()
            return
    raise ValueError(f"{type(model).__name__} has no set_grad_checkpointing and no gradient_checkpointing_enable")
