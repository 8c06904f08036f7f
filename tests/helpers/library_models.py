"""Small models of other libraries, for 32 x 32 images."""

from typing import Any

from library_imports import import_library
from torch import nn

from fastvit.integrations import Report

# A small vision configuration of transformers
SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip


def vit(name: str = "vit_tiny_patch16_224", **options: Any) -> nn.Module:
    """Return a ViT of timm."""
    return import_library("timm").create_model(name, **{"img_size": 32, "depth": 2, **options}).eval()


def torchvision_vit() -> nn.Module:
    vision_transformer = import_library("torchvision").models.VisionTransformer
    return vision_transformer(image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=64)


def hugging_face(name: str, **options: Any) -> nn.Module:
    """Return a model of transformers by the name of its class."""
    kind = getattr(import_library("transformers"), name)
    return kind(kind.config_class(**SIZES, **options)).eval()


def outcome(report: Report, name: str) -> tuple[str, str]:
    """Return status and detail of the module of that name."""
    (entry,) = (e for e in report.entries if e.name == name)
    return entry.status, entry.detail
