"""Real images for the whole-model cases: the photographs that scikit-image ships inside its wheel."""

from __future__ import annotations

import functools
import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor

NAMES = ("astronaut", "chelsea", "coffee", "rocket", "retina", "hubble_deep_field")
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
AVAILABLE = importlib.util.find_spec("skimage") is not None
SOURCE = "photographs of scikit-image" if AVAILABLE else "random images: scikit-image is not installed"


@functools.cache
def _photograph(name: str) -> Tensor:
    from skimage import data

    return torch.from_numpy(getattr(data, name)().copy()).permute(2, 0, 1).float() / 255


def photographs(count: int, size: int) -> Tensor:
    """Return (count, 3, size, size) float32, normalised by ImageNet's mean and deviation: the shorter side resized, the
    centre cropped. From the seventh image on they repeat mirrored. Without scikit-image, random normal images."""
    if not AVAILABLE:
        return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(0))
    images = []
    for i in range(min(count, 2 * len(NAMES))):
        image = _photograph(NAMES[i % len(NAMES)])
        scale = size / min(image.shape[1:])
        height, width = (max(size, round(side * scale)) for side in image.shape[1:])
        image = F.interpolate(image[None], (height, width), mode="bilinear", antialias=True)[0].clamp(0, 1)
        top, left = (height - size) // 2, (width - size) // 2
        image = image[:, top : top + size, left : left + size]
        images.append(image.flip(2) if i >= len(NAMES) else image)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    batch = (torch.stack(images) - mean) / std
    return batch[torch.arange(count) % len(batch)]
