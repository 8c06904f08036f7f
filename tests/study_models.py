"""Models that studies take as module:function."""

from collections.abc import Callable
from typing import Any

from library_imports import import_library
from torch import nn

from fastvit import reference


def of_timm(image_size: int = 32) -> nn.Module:
    """A ViT of timm: 8 x 8 patches, CLS, two blocks."""
    options: dict[str, Any] = {"patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 5}
    make: Callable[..., nn.Module] = import_library("timm").models.VisionTransformer
    return make(img_size=image_size, **options)


def of_one_size() -> nn.Module:
    return of_timm()


def of_nothing() -> None:
    return None


def of_the_reference(image_size: int = 32) -> nn.Module:
    return reference.VisionTransformer(image_size, 8, embed_dim=48, depth=1, num_heads=3, num_classes=5)


def of_no_library(image_size: int = 32) -> nn.Module:
    """Patches, and an encoder of PyTorch's own."""
    layer = nn.TransformerEncoderLayer(48, 3, 96, batch_first=True)
    patches = nn.Conv2d(3, 48, 8, 8)
    return nn.Sequential(patches, nn.Flatten(2), nn.Linear((image_size // 8) ** 2, 48), nn.TransformerEncoder(layer, 1))
