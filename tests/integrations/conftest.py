"""A small ViT of timm, and images for it."""

import pytest
import torch
from library_imports import import_library
from library_models import vit as timm_vit
from models import randomised
from torch import Tensor, nn


@pytest.fixture
def timm():
    return import_library("timm")


@pytest.fixture
def vit(device: torch.device) -> nn.Module:
    return randomised(timm_vit(init_values=0.3)).to(device)


@pytest.fixture
def image(device: torch.device) -> Tensor:
    return torch.randn(2, 3, 32, 32, device=device)
