"""Test a trained model, also on images of several sizes at once."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import models, recipe
from .data import TestBatches, batches, read
from .loop import scores
from .models import Model
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
        ValueError: the run has no weights yet, the data have other classes, or the model takes no such size.
    """
    data = read(source or args.data)
    if data.classes != args.classes:
        raise ValueError(f"{source or args.data} has other classes than those that {run.out} has learnt")
    model = models.trained(args, device, run.weights)
    patch = getattr(getattr(model.module, "patch_embed", None), "patch_size", (1, 1))[0]
    sizes = list(dict.fromkeys(max(round(args.image_size * scale / patch), 1) * patch for scale in scales))
    labels = torch.from_numpy(data.test.labels)
    found = {}
    for size in sizes:
        test = TestBatches(data.test, recipe.test_transform(args, size), args.batch, 0, 1)
        try:
            found[str(size)] = torch.cat(list(_logarithms(model, test, args, flip, device)))
        except AssertionError as error:  # timm's, of models that take one size
            raise ValueError(f"{args.name} takes no images of {size} px: {error}") from None
    rows = [Row("of one size", size, *_figures(values, labels)) for size, values in found.items()]
    if len(sizes) > 1:
        rows.append(Row("of all sizes", ", ".join(found), *_figures(_mean([*found.values()]), labels)))
    return rows


def _logarithms(
    model: Model, test: TestBatches, args: argparse.Namespace, flip: bool, device: torch.device
) -> Iterator[Tensor]:
    """Yield the logarithms of the probabilities of each batch, (b, classes)."""
    with batches(test, range(len(test)), args.workers, device) as feed:
        for images, _ in feed:
            with torch.autocast(device.type, torch.bfloat16, enabled=args.amp):
                seen = [images, images.flip(-1)] if flip else [images]
                yield _mean([model.module(model.prepared(x)).float().log_softmax(-1) for x in seen]).cpu()


def _mean(logarithms: list[Tensor]) -> Tensor:
    """Return the logarithm of the mean probabilities."""
    return torch.stack(logarithms).logsumexp(0) - math.log(len(logarithms))


def _figures(logarithms: Tensor, labels: Tensor) -> tuple[Any, ...]:
    return tuple(value / len(labels) for value in scores(logarithms, labels))
