"""Models of other libraries that `fastvit.accelerate` knows, with random weights: small ones, and ViT-B/16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.libraries import load, randomize


@dataclass(frozen=True)
class Architecture:
    """small: arguments that make a model of two blocks for a square image of `side` pixels."""

    library: str
    name: str
    side: int
    small: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.library}-{self.name}"

    def model(self) -> nn.Module:
        """Build the model in evaluation mode, with random weights."""
        torch.manual_seed(0)
        model = {"timm": _timm, "transformers": _transformers, "torchvision": _torchvision}[self.library](
            self.name, **self.small
        ).eval()
        randomize(model)
        return model

    def image(self, model: nn.Module, batch: int) -> Tensor:
        return torch.randn(batch, 3, self.side, self.side, generator=torch.Generator().manual_seed(1))


def output(result: Any) -> Tensor:
    """Return the logits of a model's result."""
    return result if isinstance(result, Tensor) else result.logits


def _timm(name: str, **options: Any) -> nn.Module:
    return load("timm").create_model(name, **options)


def _transformers(name: str, **options: Any) -> nn.Module:
    transformers = load("transformers")
    kind = getattr(transformers, name)
    return kind(kind.config_class(**options))


def _torchvision(name: str, **options: Any) -> nn.Module:
    return load("torchvision").models.VisionTransformer(**options)


_SMALL = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
ARCHITECTURES = [
    Architecture("timm", "deit_small_distilled_patch16_224", 64, {"img_size": 64, "depth": 2}),
    Architecture("timm", "vit_pe_spatial_tiny_patch16_512", 64, {"img_size": 64, "depth": 2}),
    Architecture("transformers", "Dinov2WithRegistersModel", 32, _SMALL),
    Architecture("transformers", "DINOv3ViTModel", 32, _SMALL | {"intermediate_size": 160, "num_register_tokens": 4}),
    Architecture("transformers", "SiglipVisionModel", 32, _SMALL | {"intermediate_size": 160}),
    Architecture(
        "torchvision",
        "vit_b_32",
        128,
        {"image_size": 128, "patch_size": 32, "num_layers": 2, "num_heads": 2, "hidden_dim": 128, "mlp_dim": 256},
    ),
]


VIT_B_16: dict[str, Callable[[int, int], nn.Module]] = {  # of px and depth
    "timm": lambda px, depth: _timm("vit_base_patch16_224", img_size=px, depth=depth),
    "transformers": lambda px, depth: _transformers(
        "ViTForImageClassification", image_size=px, num_hidden_layers=depth, num_labels=1000
    ),
    "torchvision": lambda px, depth: _torchvision(
        "", image_size=px, patch_size=16, num_layers=depth, num_heads=12, hidden_dim=768, mlp_dim=3072
    ),
}
