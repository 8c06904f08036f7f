"""Train a model: its images, its teacher, epochs, log and checkpoints."""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as states
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save
from sklearn.datasets import load_digits
from timm.data import FastCollateMixup, create_dataset, create_loader
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import distribute_bn, random_seed, reduce_tensor
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Dataset
from torch.utils.flop_counter import FlopCounterMode

import fastvit
from fastvit import zoo
from fastvit._base.output import write_file
from fastvit.cli import terminal
from fastvit.study.machine import cpu_name
from fastvit.study.pictures import read_rgb
from fastvit.study.sources.baselines import plain_model

WHOLE = states.StateDictOptions(full_state_dict=True, cpu_offload=True)  # of all processes
# With patch_init="kaiming", `make training` ends at 95.3 and 96.9 % for seeds 0 and 2, not at 96.1 and 97.8 %
SMALL_VIT = {"embed_dim": 96, "depth": 4, "num_heads": 3, "patch_init": ""}  # for images smaller than CIFAR's


class Images(Dataset[Any]):
    """Some of `samples`, pairs of a picture and its class, in RGB. `create_loader` sets `transform`."""

    def __init__(self, samples: Any, indices: Sequence[int]) -> None:
        self.samples, self.indices = samples, indices
        self.transform: Any = None

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, number: int) -> tuple[Any, int]:
        picture, label = self.samples[self.indices[number]]
        return self.transform(picture.convert("RGB")), label


def read(source: str) -> tuple[Images, Images, list[str], int]:
    """Read "digits", a folder of images, or a data set that torchvision downloads.

    Returns:
        The images to train with and to test with, the names of the classes, and the side of an image in pixels.
    """
    if source == "digits":
        digits = load_digits()
        pictures = map(Image.fromarray, np.rint(digits.images * (255 / 16)).astype(np.uint8))
        train = test = [*zip(pictures, digits.target.tolist(), strict=True)]
        classes, size = [str(name) for name in digits.target_names], 8
    else:
        name, root, options = "folder", Path(source), dict[str, Any](loader=read_rgb)
        if not root.is_dir():  # torchvision's go next to what torch.hub downloads: ~/.cache/torch/datasets
            name, root, options = source.replace("-", "_"), Path(torch.hub.get_dir()).with_name("datasets"), {}
        try:
            train, test = (create_dataset(f"torch/{name}", str(root), part, download=True, **options)
                           for part in ("train", "val"))  # fmt: skip
        except Exception as error:  # a failing download and a damaged archive raise many kinds of errors
            where = f"benchmarks/examples/README.md says which files belong into {root}"
            said = " ".join(str(error).split())  # torchvision's has several lines
            raise ValueError(f"--data {source} cannot be read: {said} ({where})") from None
        classes, size = list(train.classes), 224 if name == "folder" else train[0][0].width
        if only := ", ".join(sorted({*classes} ^ {*test.classes})[:3]):
            raise ValueError(f"--data {source}: train and val must have the same classes, only one has {only}")
        if name == "folder" and test.root == train.root:  # there is no folder `val`
            test = train
    if test is not train:
        return Images(train, range(len(train))), Images(test, range(len(test))), classes, size
    order, held_out = np.random.default_rng(0).permutation(len(train)).tolist(), max(len(train) // 5, 1)
    return Images(train, order[held_out:]), Images(train, order[:held_out]), classes, size


def loaders(args: argparse.Namespace, train: Any, test: Any, device: torch.device) -> list[Any]:
    """Return timm's loaders of both sets. A batch is on the device: images (b, 3, S, S), float32 and normalised by
    ImageNet's mean and deviation, and targets (b, classes), or classes (b,) to test with."""
    common: dict[str, Any] = {
        "input_size": args.image_size, "batch_size": args.batch // dist.get_world_size(), "interpolation": "bicubic",
        "distributed": True, "device": device, "pin_memory": device.type == "cuda", "num_workers": args.workers,
        "persistent_workers": False,  # in a next epoch they would go on with their own random numbers
        "worker_seeding": worker_seed,
    }  # fmt: skip
    mixed = FastCollateMixup(
        args.mixup, args.cutmix, prob=float(args.mixup + args.cutmix > 0), label_smoothing=args.smoothing,
        num_classes=len(args.classes),
    )  # fmt: skip
    # With a magnitude of 5, `make training` ended at 74 to 94 % for seeds 0 to 3; without, at 96.1 to 97.8 %
    magnitude = (0 if args.image_size < 16 else 9) if args.rand_augment is None else args.rand_augment
    train_loader = create_loader(
        train, is_training=True, scale=(args.crop or (0.7 if args.image_size < 32 else 0.3), 1.0), color_jitter=0.0,
        hflip=0.0 if args.data == "digits" else 0.5, collate_fn=mixed, **common,
        # At most 9: at 10, timm's posterize keeps 0 bits, which Pillow refuses
        auto_augment=f"rand-m{magnitude}-n2-mstd0.5-mmax9-inc1" if magnitude else None,
    )  # fmt: skip
    # Small images keep their border
    return [train_loader, create_loader(test, crop_pct=1.0 if args.image_size <= 64 else 0.9, **common)]


def worker_seed(worker: Any) -> int:
    """Return timm's seed of a worker, and leave Ctrl-C, which goes to the whole group, to the main process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return int(worker.seed)


def build(args: argparse.Namespace, device: torch.device, weights: str | None = None) -> Any:
    """Make the model of a run, from random weights or from a file, with a new head."""
    small, chosen = args.image_size <= 64, dict(args.set)
    names = {"vit": ("vit_small_patch16_224", "vit_cifar_small"), "resnet": ("resnet50", "resnet18")}
    name = names[args.model][small] if args.model in names else args.model
    if args.model == "vit" and args.image_size < 32:
        chosen = SMALL_VIT | {"patch_size": max(args.image_size // 4, 1)} | chosen
    options: dict[str, Any] = {"num_classes": len(args.classes), "drop_path_rate": args.drop_path}
    try:
        if name in zoo.CONFIGS or not timm.is_model(name):  # of an unknown name, create_model says the nearest ones
            options |= {"img_size": args.image_size, "device": device}
            if args.dropout is not None:
                options |= dict.fromkeys(("pos_drop_rate", "proj_drop_rate", "attn_drop_rate"), args.dropout)
            model: Any = fastvit.create_model(name, weights, drop_head=weights is not None, **options, **chosen)
            if args.plain:
                fused, model = model, plain_model(name, **options, **chosen)
                model.load_state_dict(fused.state_dict())
                # timm's optimizers ask the model for these
                model.no_weight_decay, model.group_matcher = fused.no_weight_decay, fused.group_matcher
            return model
        if weights or args.plain:
            raise ValueError(f"--weights and --plain take a model of fastvit.list_models(), got {name}")
        config = timm.get_pretrained_cfg(name)
        if config is not None and config.fixed_input_size:
            options["img_size"] = args.image_size
        model = timm.create_model(name, drop_rate=args.dropout or 0.0, **options, **chosen)
    except TypeError as error:  # of --set
        raise ValueError(f"{name}: {error}") from None
    if small and hasattr(model, "maxpool") and isinstance(getattr(model, "conv1", None), nn.Conv2d):
        # He et al. 2015, section 4.2: a first convolution of 3 x 3 without stride, no pooling
        model.conv1 = nn.Conv2d(3, model.conv1.out_channels, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
        model.maxpool = nn.Identity()
    return model.to(device)


def teacher_of(args: argparse.Namespace, device: torch.device) -> Any:
    """Return the frozen model of the run --teacher."""
    run = Path(args.teacher)
    settings = argparse.Namespace(**json.loads((run / "settings.json").read_text()))
    if settings.classes != args.classes:
        raise ValueError(f"--teacher {run} has learnt other classes than those of the data")
    model = build(settings, device)
    model.load_state_dict(load_file(run / "model.safetensors"))
    return model.eval().requires_grad_(False)


def loss_of(outputs: Any, targets: Tensor, taught: Tensor | None) -> Tensor:
    """Return the mean cross entropy of a batch. With a teacher's logits `taught`, return the mean of that and of the
    distillation token's hard loss (Touvron et al. 2021, arXiv:2012.12877, equation 3). A model without that token
    learns both from its only logits."""
    logits, distilled = outputs if isinstance(outputs, tuple) else (outputs, outputs)
    loss = F.cross_entropy(logits.float(), targets)
    return loss if taught is None else (loss + F.cross_entropy(distilled.float(), taught.argmax(-1))) / 2


class Trainer:
    """Trains one model on one data set. Each process has an object of its own; the first one writes.

    An epoch depends on the seed, its number and the state before it alone, so a resumed run has the same losses.
    """

    def __init__(self, args: argparse.Namespace, out: Path, device: torch.device) -> None:
        self.args, self.out, self.epoch, self.seconds = args, out, 0, 0.0
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        if self.rank > 0:
            dist.barrier()  # the first process downloads
        train, test, args.classes, size = read(args.data)
        if self.rank == 0:
            dist.barrier()
        args.image_size = args.image_size or size
        self.train_loader, self.test_loader = loaders(args, train, test, device)
        self.steps = len(self.train_loader)  # of an epoch
        if self.steps == 0:
            raise ValueError(f"--batch must be at most the {len(train)} training images, got {args.batch}")
        random_seed(args.seed)
        self.model = model = build(args, device, args.weights)
        try:
            with FlopCounterMode(display=False) as counter:  # of one image forward; a multiply-add counts as two
                model.eval()(torch.zeros(1, 3, args.image_size, args.image_size, device=device))
        except (RuntimeError, AttributeError, AssertionError) as error:  # of timm's models, which check little
            raise ValueError(f"the model does not run at {args.image_size} px, see --set: {error}") from None
        args.flops, args.parameters = counter.get_total_flops(), sum(p.numel() for p in model.parameters())
        args.device = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
        args.images, args.torch = len(train), torch.__version__
        self.teacher = teacher_of(args, device) if args.teacher else None
        if self.teacher and hasattr(model, "set_distilled_training"):
            model.set_distilled_training(True)
        self.call = model  # of a training step
        if args.parallel == "fsdp":
            for part in (*getattr(model, "blocks", ()), model):
                fully_shard(part)
        elif self.world > 1:
            self.call = nn.parallel.DistributedDataParallel(model)
        if args.compile and args.compile not in torch._dynamo.list_backends(exclude_tags=()):
            raise ValueError(f"--compile must name a backend of torch.compile, got {args.compile!r}")
        if args.compile:
            self.call = torch.compile(self.call, backend=args.compile)
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.amp)
        self.optimizer = create_optimizer_v2(model, "adamw", args.lr, args.weight_decay, layer_decay=args.layer_decay)
        self.schedule, _ = create_scheduler_v2(
            self.optimizer, "cosine", args.epochs, min_lr=args.lr * 1e-2, warmup_lr=args.lr * 1e-3,
            warmup_epochs=args.warm_up, step_on_epochs=False, updates_per_epoch=self.steps,
        )  # fmt: skip

    def fit(self) -> None:
        """Train to the end, from the checkpoint if there is one, and write model.safetensors."""
        if (self.out / "checkpoint.pt").exists():
            self._restore()
        elif self.rank == 0:
            write_file(self.out / "log.jsonl", "")
            write_file(self.out / "settings.json", json.dumps(vars(self.args), indent=1) + "\n")
        with terminal.progress((self.args.epochs - self.epoch) * self.steps, "training") as advance:
            while self.epoch < self.args.epochs:
                random_seed(self.args.seed + self.world * (self.epoch + 1), self.rank)
                self.train_loader.sampler.set_epoch(self.args.seed + self.epoch)
                self._train(advance)
                self._test()
                self._save()
        weights: dict[str, Any] = states.get_model_state_dict(self.model, options=WHOLE)
        if self.rank == 0:
            write_file(self.out / "model.safetensors", save({k: v.contiguous() for k, v in weights.items()}))
        dist.barrier()  # so that no process ends the group while another one needs it

    def _train(self, advance: Callable[[str], None]) -> None:
        """Train for an epoch. Its time is that of waiting for images, computing and logging."""
        start, losses = time.perf_counter(), list[Tensor]()
        self.model.train()
        for step, (images, targets) in enumerate(self.train_loader, self.epoch * self.steps):
            advance(f"epoch {self.epoch + 1}")
            self.schedule.step_update(step)
            with self.autocast:
                taught = self.teacher(images) if self.teacher else None
                loss = loss_of(self.call(images), targets, taught)
            loss.backward()
            if self.args.clip:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.detach())
            if (step + 1) % self.args.log_every == 0 or (step + 1) % self.steps == 0:
                mean = reduce_tensor(torch.stack(losses).mean(), self.world).item()
                self._log("train", step + 1, loss=mean, lr=max(group["lr"] for group in self.optimizer.param_groups))
                losses = []
                if not math.isfinite(mean):
                    raise ValueError(f"the loss is {mean} at step {step + 1}: try a smaller --lr, or --clip 1")
        self.seconds += time.perf_counter() - start
        self.epoch += 1

    @torch.no_grad()
    def _test(self) -> None:
        """Log loss and accuracy on the test images of all processes."""
        distribute_bn(self.model, self.world, reduce=True)  # a process's statistics are of its own images
        self.model.eval()
        with self.autocast:
            batches = [(self.model(images).float(), labels) for images, labels in self.test_loader]
        count = len(self.test_loader.dataset)
        own = len(range(self.rank, count, self.world))  # the sampler repeats images, so that all call equally often
        logits, labels = (torch.cat(parts)[:own] for parts in zip(*batches, strict=True))
        sums = torch.stack([F.cross_entropy(logits, labels, reduction="sum"), (logits.argmax(1) == labels).sum()])
        dist.all_reduce(sums)
        loss, right = sums.tolist()
        speed = self.epoch * self.steps * self.args.batch / self.seconds
        found = {"loss": loss / count, "accuracy": right / count, "right": int(right), "seconds": self.seconds}
        self._log("epoch", self.epoch * self.steps, epoch=self.epoch, images_per_second=speed, **found)
        if self.rank == 0:
            text = f"test loss {loss / count:.3f}  accuracy {right / count:.2%}  {speed:,.0f} images/s"
            print(f"epoch {self.epoch}/{self.args.epochs}  {text}", flush=True)

    def _log(self, kind: str, step: int, **values: Any) -> None:
        if self.rank == 0:
            with (self.out / "log.jsonl").open("a") as file:
                file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")

    def _save(self) -> None:
        model, optimizer = states.get_state_dict(self.model, self.optimizer, options=WHOLE)
        if self.rank == 0:
            place = {"epoch": self.epoch, "seconds": self.seconds, "log": (self.out / "log.jsonl").stat().st_size}
            torch.save({**place, "model": model, "optimizer": optimizer}, buffer := io.BytesIO())
            write_file(self.out / "checkpoint.pt", buffer.getvalue())

    def _restore(self) -> None:
        state = torch.load(self.out / "checkpoint.pt", map_location="cpu", weights_only=True)
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        states.set_state_dict(self.model, self.optimizer, **parts, options=WHOLE)
        self.epoch, self.seconds = state["epoch"], state["seconds"]
        if self.rank == 0:
            os.truncate(self.out / "log.jsonl", state["log"])  # without what is done again
