"""A small ViT of timm, and images for it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from library_imports import import_library
from torch import Tensor, nn


@pytest.fixture
def timm():
    return import_library("timm")


@pytest.fixture
def tiny(timm, device) -> Callable[..., nn.Module]:
    """A ViT of timm for 32 x 32 images."""

    def make(depth: int = 1, **options: Any) -> nn.Module:
        return timm.create_model("vit_tiny_patch16_224", img_size=32, depth=depth, **options).to(device).eval()

    return make


@pytest.fixture
def vit(tiny) -> nn.Module:
    return tiny(depth=2, init_values=0.3)


@pytest.fixture
def image(device) -> Tensor:
    return torch.randn(2, 3, 32, 32, device=device)
