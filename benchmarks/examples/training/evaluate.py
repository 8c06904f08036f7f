"""Test a trained model, also on images of several sizes at once."""

from __future__ import annotations

import argparse
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import models, recipe
from .data import TestBatches, batches, read
from .loop import scores
from .state import Run


class Row(NamedTuple):
    name: str
    size: str
    loss: float
    accuracy: float
    top5: float


@torch.no_grad()
def evaluate(
    args: argparse.Namespace, run: Run, source: str | None, scales: list[float], flip: bool, device: torch.device
) -> list[Row]:
    """Return a row for each size of the images, and one for the mean of their probabilities.

    Sizes are rounded to whole patches; positions are interpolated.

    Args:
        args: the run's settings.
        source: other data with the same classes, or None.
        scales: factors of the side of the images.
        flip: average over each image and its mirror image.

    Raises:
        ValueError: the run has no weights yet, or not for so many classes.
    """
    data = read(source or args.data)
    model = models.trained(args, data, device, run.weights)
    patch = getattr(getattr(model.module, "patch_embed", None), "patch_size", (1, 1))[0]
    base = args.img_size or data.size
    sizes = list(dict.fromkeys(max(round(base * scale / patch), 1) * patch for scale in scales))
    sums = torch.zeros(len(sizes) + 1, 3, dtype=torch.float64)
    test = TestBatches(data.test, recipe.test_transform(args, data), args.batch, 0, 1)
    for images, labels in batches(test, range(len(test)), 0, device):
        mean = torch.zeros(len(labels), len(data.classes), device=device)
        for i, size in enumerate(sizes):
            with torch.autocast(device.type, torch.bfloat16, enabled=args.amp):
                seen = [resized(images, size)]
                seen += [seen[0].flip(-1)] * flip
                probabilities = sum(model.module(model.prepared(x)).float().softmax(-1) for x in seen) / len(seen)
            sums[i] += torch.tensor(scores(probabilities.log(), labels), dtype=torch.float64)
            mean += probabilities / len(sizes)
        sums[-1] += torch.tensor(scores(mean.log(), labels), dtype=torch.float64)
    *each, mean_of_all = (sums / len(data.test.labels)).tolist()
    rows = [Row("of one size", str(size), *values) for size, values in zip(sizes, each, strict=True)]
    return [*rows, Row("of all sizes", ", ".join(map(str, sizes)), *mean_of_all)][: None if len(sizes) > 1 else 1]


def resized(images: Tensor, size: int) -> Tensor:
    """Return images (b, 3, S, S) uint8 with another side, by bicubic interpolation."""
    if images.shape[-1] == size:
        return images
    wide = F.interpolate(images.float(), (size, size), mode="bicubic", antialias=True)
    return wide.round().clamp(0, 255).to(torch.uint8)
