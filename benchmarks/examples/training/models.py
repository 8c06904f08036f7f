"""The model that is trained, its teacher, and how both are spread over processes."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

import fastvit
from fastvit import zoo

from .data import IMAGENET, Data
from .state import Run

SMALL = 64  # pixels; smaller images keep their size in the first layer of a ResNet


@dataclass(frozen=True)
class Model:
    """A model and the images that it takes.

    Attributes:
        module: an nn.Module with timm's methods.
        mean, std: None if the patch embedding takes uint8 images and normalises them.
    """

    module: Any
    mean: Tensor | None = None
    std: Tensor | None = None

    def prepared(self, images: Tensor) -> Tensor:
        """Return uint8 images as the model takes them."""
        if self.mean is None or self.std is None:
            return images
        return (images.float() / 255 - self.mean) / self.std


def build(args: argparse.Namespace, data: Data, device: torch.device, weights: str | None = None, **more: Any) -> Model:
    """Make the model that --model names.

    Args:
        weights: what it starts from, with a new head; None for random weights.
        more: further arguments of one of our models.

    Raises:
        ValueError: a name that neither fastvit nor timm knows, or weights that do not fit.
    """
    name = {"vit": data.vit, "resnet": data.resnet}.get(args.model, args.model)
    size = args.img_size or data.size
    if name not in zoo.CONFIGS:
        return _of_timm(name, args, data, size, device, weights)
    mean, std = _statistics(args, data)
    options = {
        "num_classes": len(data.classes), "img_size": size, "mean": mean, "std": std, "drop_path_rate": args.drop_path,
    }  # fmt: skip
    if args.dropout is not None:
        options |= dict.fromkeys(("pos_drop_rate", "proj_drop_rate", "attn_drop_rate"), args.dropout)
    options |= (data.options if args.model == "vit" else {}) | args.set | more
    try:
        module = fastvit.create_model(name, weights, drop_head=weights is not None, device=device, **options)
    except TypeError as error:
        raise ValueError(str(error)) from None
    if not args.plain:
        return Model(module)
    plain = getattr(fastvit.reference, type(module).__name__)(**{**zoo.config(name), **options, "device": device})
    plain.load_state_dict(module.state_dict())
    undecayed, layers = module.no_weight_decay(), module.group_matcher()  # timm's optimizers ask the model for these
    plain.no_weight_decay, plain.group_matcher = (lambda: undecayed), (lambda coarse=False: layers)
    return Model(plain)


def _of_timm(
    name: str, args: argparse.Namespace, data: Data, size: int, device: torch.device, weights: str | None
) -> Model:
    if not timm.is_model(name):
        fastvit.zoo.config(name)  # raises, with the nearest names
    if args.plain:
        raise ValueError(f"--plain takes one of our models, got {name}")
    options = {"num_classes": len(data.classes), "drop_path_rate": args.drop_path, "drop_rate": args.dropout or 0.0}
    if weights is not None:
        options["checkpoint_path"] = weights
    try:
        module: Any = timm.create_model(name, **options, **args.set)
    except TypeError as error:
        raise ValueError(f"{name} takes no such argument: {error}") from None
    residual = isinstance(module, timm.models.resnet.ResNet)
    if size <= SMALL and residual:
        # He et al. 2015, section 4.2: a first convolution of 3 x 3 without stride, no pooling
        module.conv1 = nn.Conv2d(3, module.conv1.out_channels, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(module.conv1.weight, mode="fan_out", nonlinearity="relu")
        module.maxpool = nn.Identity()
    module = module.to(device)
    if args.accelerate:
        print(fastvit.accelerate(module))
    mean, std = (torch.tensor(value, device=device).view(3, 1, 1) for value in _statistics(args, data))
    return Model(module, mean, std)


def _statistics(args: argparse.Namespace, data: Data) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and deviation of the images: those that the weights of --weights were trained with, or the data's."""
    return (data.mean, data.std) if args.weights is None else IMAGENET


def trained(args: argparse.Namespace, data: Data, device: torch.device, file: Path) -> Model:
    """Make the model of a run's settings with the weights that it has learnt; it takes images of other sizes, too."""
    name = data.vit if args.model == "vit" else args.model
    of_any_size: dict[str, Any] = {"dynamic_img_size": True} if name in zoo.CONFIGS else {}
    found = build(args, data, device, **of_any_size)
    load(found.module, file)
    return Model(found.module.eval().requires_grad_(False), found.mean, found.std)


def teacher(args: argparse.Namespace, data: Data, device: torch.device) -> Model | None:
    """Make the frozen teacher: the model of the run --teacher."""
    if args.teacher is None:
        return None
    run = Run(Path(args.teacher), writes=False)
    return trained(argparse.Namespace(**run.settings()), data, device, run.weights)


def load(module: nn.Module, file: Path) -> None:
    """Load a `.safetensors` file of a whole model, as this program writes it.

    Raises:
        ValueError: there is none, it is damaged, or does not fit; the message has the first keys that differ.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from None
    own = {name: value.shape for name, value in module.state_dict().items()}
    wrong = [
        name for name in own.keys() | tensors.keys() if name not in tensors or own.get(name) != tensors[name].shape
    ]
    if wrong:
        raise ValueError(f"{file} does not fit the model, for example {', '.join(sorted(wrong)[:3])}")
    module.load_state_dict(tensors)


def freeze(module: Any) -> None:
    """Leave only the classifier to be trained."""
    module.requires_grad_(False)
    classifier = module.get_classifier() if hasattr(module, "get_classifier") else module.head
    for head in classifier if isinstance(classifier, tuple) else (classifier,):
        head.requires_grad_(True)


@torch.no_grad()
def flops(model: Model, size: int, device: torch.device) -> int:
    """Return the floating-point operations of one image forward; a multiply-add counts as two."""
    was = model.module.training
    with FlopCounterMode(display=False) as counter:
        model.module.eval()(model.prepared(torch.zeros(1, 3, size, size, dtype=torch.uint8, device=device)))
    model.module.train(was)
    return counter.get_total_flops()


def shard(module: nn.Module) -> None:
    """Split the parameters of each block, and of the rest, over all processes (FSDP2)."""
    for block in getattr(module, "blocks", ()):
        fully_shard(block)
    fully_shard(module)


def spread(module: nn.Module, args: argparse.Namespace, device: torch.device) -> Any:
    """Return what a training step calls: the module, over several processes, and compiled."""
    if dist.is_initialized() and args.parallel == "ddp":
        module = DistributedDataParallel(module, device_ids=[device] if device.type == "cuda" else None)
    return torch.compile(module, backend=args.compile) if args.compile else module
