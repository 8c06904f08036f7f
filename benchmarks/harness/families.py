"""ViT-B/16 of other libraries, which `fastvit.accelerate` knows."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from benchmarks.harness.libraries import load


def _timm(px: int, depth: int) -> nn.Module:
    return load("timm").create_model("vit_base_patch16_224", img_size=px, depth=depth)


def _transformers(px: int, depth: int) -> nn.Module:
    kind = load("transformers").ViTForImageClassification
    return kind(kind.config_class(image_size=px, num_hidden_layers=depth, num_labels=1000))


def _torchvision(px: int, depth: int) -> nn.Module:
    size = {"image_size": px, "patch_size": 16, "num_layers": depth, "num_heads": 12}
    return load("torchvision").models.VisionTransformer(**size, hidden_dim=768, mlp_dim=3072)


# of px and depth
VIT_B_16: dict[str, Callable[[int, int], nn.Module]] = {
    "timm": _timm,
    "transformers": _transformers,
    "torchvision": _torchvision,
}
