"""The recipe: augmentation, targets, losses, optimizer and schedule, most of them timm's."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from timm.data import FastCollateMixup, create_transform
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import Tensor, nn


def train_transform(args: argparse.Namespace) -> Any:
    """Return RandomResizedCrop, a horizontal flip if the data allow it, and RandAugment: PIL -> (3, S, S) uint8."""
    # At most 9: at 10, timm's posterize keeps 0 bits, which Pillow refuses
    augment = f"rand-m{args.rand_augment}-n2-mstd0.5-mmax9-inc1" if args.rand_augment else None
    return create_transform(
        args.image_size, is_training=True, scale=(args.crop, 1.0), hflip=args.mirrored / 2, auto_augment=augment,
        color_jitter=0.0, mean=args.mean, interpolation="bicubic", use_prefetcher=True,
    )  # fmt: skip


def test_transform(args: argparse.Namespace, size: int) -> Any:
    """Return resize and centre crop to a size: PIL -> (3, S, S) uint8. Small images keep their border."""
    crop = 1.0 if args.image_size <= 64 else 0.9
    return create_transform(size, crop_pct=crop, interpolation="bicubic", use_prefetcher=True)


def collate(args: argparse.Namespace) -> FastCollateMixup:
    """Return what mixes a batch by MixUp (arXiv:1710.09412) or CutMix (arXiv:1905.04899), and smooths its targets."""
    return FastCollateMixup(
        args.mixup, args.cutmix, prob=float(args.mixup > 0 or args.cutmix > 0), switch_prob=0.5,
        label_smoothing=args.smoothing, num_classes=len(args.classes),
    )  # fmt: skip


def optimizer(args: argparse.Namespace, module: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW; no decay of biases, norms, positions and tokens. With --layer-decay, the learning rate of a layer
    is that of the next one times this factor."""
    return create_optimizer_v2(module, "adamw", args.lr, args.weight_decay, layer_decay=args.layer_decay)


def schedule(args: argparse.Namespace, chosen: torch.optim.Optimizer, steps: int, epoch: int) -> CosineLRScheduler:
    """Return warm-up and cosine decay. steps: of the whole run; epoch: steps of an epoch."""
    warm_up = min(round(args.warm_up * epoch), steps - 1)
    return CosineLRScheduler(
        chosen, t_initial=max(steps - warm_up, 2), lr_min=args.lr * 1e-2, warmup_t=warm_up,
        warmup_lr_init=args.lr * 1e-3, warmup_prefix=True, t_in_epochs=False,
    )  # fmt: skip


def loss_of(args: argparse.Namespace, outputs: Any, targets: Tensor, taught: Tensor | None) -> Tensor:
    """Return the mean loss of a batch.

    With a teacher it is the mean of the cross entropy of the class token's logits and of the distillation token's loss
    (Touvron et al. 2021, arXiv:2012.12877, section 4). A model without that token learns both from its only logits.

    Args:
        outputs: logits (b, classes), or those of both tokens.
        targets: (b, classes).
        taught: the teacher's logits (b, classes), or None.
    """
    logits, distilled = outputs if isinstance(outputs, tuple) else (outputs, outputs)
    loss = F.cross_entropy(logits.float(), targets)
    if taught is None:
        return loss
    if args.distill != "soft":
        return (loss + F.cross_entropy(distilled.float(), taught.argmax(-1))) / 2
    T = args.temperature
    student, teacher = (F.log_softmax(x.float() / T, dim=-1) for x in (distilled, taught))
    return (loss + F.kl_div(student, teacher, reduction="batchmean", log_target=True) * T**2) / 2
