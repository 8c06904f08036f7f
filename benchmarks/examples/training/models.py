"""The model that is trained, its teacher, and how both are spread over processes."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

import fastvit
from fastvit import zoo
from fastvit.study.sources.baselines import plain_model
from fastvit.vit import VisionTransformer

from .data import DIGITS, DOWNLOADED, IMAGENET, Data
from .state import SETTINGS, Run

SMALL = 64  # pixels; smaller images keep their size in the first layer of a ResNet
DROP_PATH = 0.1


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


def settle(args: argparse.Namespace, data: Data) -> None:
    """Replace what is left to the data by its values, so that the settings of a run say all that its model depends on.

    Raises:
        ValueError: options that exclude each other.
    """
    args.name = {"vit": data.vit, "resnet": data.resnet}.get(args.model, args.model)
    args.image_size = args.image_size or data.size
    args.crop = data.crop
    args.rand_augment = data.rand_augment if args.rand_augment is None else args.rand_augment
    args.classes, args.mirrored = data.classes, data.mirrored
    args.set = (data.options if args.model == "vit" else {}) | dict(args.set)
    for name, option in {"num_classes": "--data", "img_size": "--image-size", "device": "CUDA_VISIBLE_DEVICES"}.items():
        if name in args.set:
            raise ValueError(f"--set {name}: {option} says it")
    ours = args.name in zoo.CONFIGS
    if args.weights and not ours:
        raise ValueError(f"--weights takes one of our models, got {args.name}")
    if args.plain and not (ours and zoo.model_class(args.name) is VisionTransformer):
        raise ValueError(f"--plain takes one of our models that fastvit.reference has, got {args.name}")
    args.mean, args.std = data.mean, data.std
    if args.weights is not None:
        args.mean, args.std = IMAGENET
        if Path(args.weights).with_name(SETTINGS).exists():  # this program has written them
            settings = Run(Path(args.weights).parent, writes=False).settings()
            args.mean, args.std = settings["mean"], settings["std"]
    for name in ("data", "weights", "teacher"):  # a run may be resumed from another folder
        value = getattr(args, name)
        if value not in (None, DIGITS, *DOWNLOADED) and Path(value).exists():
            setattr(args, name, str(Path(value).absolute()))


def build(args: argparse.Namespace, device: torch.device, weights: str | None = None) -> Model:
    """Make the model of settled settings.

    Args:
        weights: what it starts from, with a new head; None for random weights.

    Raises:
        ValueError: a name that neither fastvit nor timm knows, an unknown argument, or weights that do not fit.
    """
    if args.name not in zoo.CONFIGS:
        return _of_timm(args, device)
    options = {
        "num_classes": len(args.classes), "img_size": args.image_size, "mean": args.mean, "std": args.std,
        "drop_path_rate": DROP_PATH if args.drop_path is None else args.drop_path,
    }  # fmt: skip
    if args.dropout is not None:
        options |= dict.fromkeys(("pos_drop_rate", "proj_drop_rate", "attn_drop_rate"), args.dropout)
    options |= args.set
    try:
        module = fastvit.create_model(args.name, weights, drop_head=weights is not None, device=device, **options)
    except TypeError as error:  # of --set
        raise ValueError(str(error)) from None
    if not args.plain:
        return Model(module)
    plain: Any = plain_model(args.name, device=device, **options)
    plain.load_state_dict(module.state_dict())
    undecayed, layers = module.no_weight_decay(), module.group_matcher()  # timm's optimizers ask the model for these
    plain.no_weight_decay, plain.group_matcher = (lambda: undecayed), (lambda coarse=False: layers)
    return Model(plain)


def _of_timm(args: argparse.Namespace, device: torch.device) -> Model:
    if not timm.is_model(args.name):
        near = ", ".join(zoo.nearest(args.name, {**zoo.CONFIGS, **dict.fromkeys(timm.list_models())})) or "none"
        raise ValueError(f"--model takes vit, resnet, a model of fastvit or of timm, got {args.name}; nearest: {near}")
    options: dict[str, Any] = {"num_classes": len(args.classes), "drop_rate": args.dropout or 0.0}
    if (known := timm.get_pretrained_cfg(args.name)) is not None and known.fixed_input_size:
        options["img_size"] = args.image_size
    rate = DROP_PATH if args.drop_path is None else args.drop_path
    try:
        module: Any = timm.create_model(args.name, drop_path_rate=rate, **options, **args.set)
    except TypeError as error:
        raise ValueError(f"{args.name} takes no such argument: {error}") from None
    residual = isinstance(module, timm.models.resnet.ResNet) and isinstance(module.conv1, nn.Conv2d)
    if args.image_size <= SMALL and residual:
        # He et al. 2015, section 4.2: a first convolution of 3 x 3 without stride, no pooling
        module.conv1 = nn.Conv2d(3, module.conv1.out_channels, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(module.conv1.weight, mode="fan_out", nonlinearity="relu")
        module.maxpool = nn.Identity()
    module = module.to(device)
    mean, std = (torch.tensor(value, device=device).view(3, 1, 1) for value in (args.mean, args.std))
    return Model(module, mean, std)


def teacher(args: argparse.Namespace, device: torch.device) -> Model | None:
    """Make the frozen teacher: the model of the run --teacher.

    Raises:
        ValueError: there is no such run, or it has other classes.
    """
    if args.teacher is None:
        return None
    run = Run(Path(args.teacher), writes=False)
    settings = argparse.Namespace(**run.settings())
    if settings.classes != args.classes:
        raise ValueError(f"--teacher {args.teacher} has learnt other classes than those of the data")
    if not run.weights.exists():
        raise ValueError(f"--teacher {args.teacher} has not ended: `train.py resume {args.teacher}` continues it")
    model = build(settings, device)
    model.module.load_state_dict(load_file(run.weights))
    return Model(model.module.eval().requires_grad_(False), model.mean, model.std)


def flops(model: Model, size: int, device: torch.device) -> int:
    """Return the floating-point operations of one image forward; a multiply-add counts as two."""
    images = torch.zeros(1, 3, size, size, dtype=torch.uint8, device=device)
    try:
        with FlopCounterMode(display=False) as counter:
            model.module.eval()(model.prepared(images))
    except (RuntimeError, AttributeError) as error:  # of timm's models, which check little
        raise ValueError(f"the model does not run at {size} px, see --set and --image-size: {error}") from None
    return counter.get_total_flops()


def spread(module: nn.Module, args: argparse.Namespace, device: torch.device) -> Any:
    """Return what a training step calls: the module, over several processes, and compiled. FSDP2 splits the parameters
    of each block, and of the rest."""
    if args.parallel == "fsdp":
        for block in getattr(module, "blocks", ()):
            fully_shard(block)
        fully_shard(module)
    elif args.parallel == "ddp":
        module = DistributedDataParallel(module, device_ids=[device] if device.type == "cuda" else None)
    return torch.compile(module, backend=args.compile) if args.compile else module
