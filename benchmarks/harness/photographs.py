"""Real images for the whole-model cases: the photographs that scikit-image ships inside its wheel."""

from __future__ import annotations

import importlib.util

import numpy as np
import torch
from torch import Tensor

NAMES = ("astronaut", "chelsea", "coffee", "rocket", "retina", "hubble_deep_field")
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
AVAILABLE = importlib.util.find_spec("skimage") is not None
SOURCE = "photographs of scikit-image" if AVAILABLE else "random images: scikit-image is not installed"


def photographs(count: int, size: int) -> Tensor:
    """Return (count, 3, size, size) float32, normalised by ImageNet's mean and deviation: the shorter side resized, the
    centre cropped. From the seventh image on they repeat. Without scikit-image, random normal images."""
    if not AVAILABLE:
        return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(0))
    from PIL import Image, ImageOps
    from skimage import data

    names = NAMES[:count]
    images = [np.asarray(ImageOps.fit(Image.fromarray(getattr(data, name)()), (size, size))) for name in names]
    pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2) / 255
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return ((pixels - mean) / std)[torch.arange(count) % len(names)]
