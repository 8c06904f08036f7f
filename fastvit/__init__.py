"""Fused Triton kernels for Vision Transformers: as torch ops (`fastvit.ops`), as nn.Modules, and inside the models of
other libraries, by class (`accelerate`) or by graph (`compile`). `fastvit.checkpoints` reads their weights;
`fastvit.reference` is plain PyTorch."""

from typing import Any

from fastvit import export, ops, reference
from fastvit.graph import compile
from fastvit.integrations import accelerate, accelerated, restore
from fastvit.layers import Attention, Block, DropPath, LayerNorm, LayerScale, Mlp, PatchEmbed
from fastvit.vit import VisionTransformer
from fastvit.zoo import create_model, list_models

__all__ = [
    "Attention",
    "Block",
    "DropPath",
    "LayerNorm",
    "LayerScale",
    "Mlp",
    "PatchEmbed",
    "VisionTransformer",
    "__version__",
    "accelerate",
    "accelerated",
    "compile",
    "create_model",
    "export",
    "list_models",
    "ops",
    "reference",
    "restore",
]

__version__: str


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("fastvit")
        except PackageNotFoundError:  # a checkout on the path, not installed
            return "0.0.0+unknown"
    raise AttributeError(f"module 'fastvit' has no attribute {name!r}")
