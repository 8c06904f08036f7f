"""Fused Triton kernels for Vision Transformers: as torch ops (`fastvit.ops`), as nn.Modules, and inside the models of
other libraries, by class (`accelerate`) or by graph (`compile`). `fit` makes a training step fit into a memory budget.
`fastvit.checkpoints` reads weights of other libraries; `fastvit.study` shows what a ViT costs; `fastvit.reference` is
plain PyTorch.

`import fastvit` by itself imports nothing, not even torch: every name is imported on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastvit import export, ops, reference, study
    from fastvit.distilled import VisionTransformerDistilled
    from fastvit.eva import Eva
    from fastvit.graph import compile
    from fastvit.graphed import graphs
    from fastvit.integrations import accelerate, accelerated, restore
    from fastvit.layers import DropPath, LayerNorm, LayerScale, PatchEmbed, RMSNorm
    from fastvit.modules.attention import Attention
    from fastvit.modules.block import Block
    from fastvit.modules.mlp import Mlp
    from fastvit.study.fitting.fit import fit, unfit
    from fastvit.vit import VisionTransformer
    from fastvit.zoo import create_model, list_models

__all__ = [
    "Attention",
    "Block",
    "DropPath",
    "Eva",
    "LayerNorm",
    "LayerScale",
    "Mlp",
    "PatchEmbed",
    "RMSNorm",
    "VisionTransformer",
    "VisionTransformerDistilled",
    "__version__",
    "accelerate",
    "accelerated",
    "compile",
    "create_model",
    "export",
    "fit",
    "graphs",
    "list_models",
    "ops",
    "reference",
    "restore",
    "study",
    "unfit",
]

__version__: str

_MODULE_NAMES = {
    "fastvit.distilled": ("VisionTransformerDistilled",),
    "fastvit.eva": ("Eva",),
    "fastvit.study.fitting.fit": ("fit", "unfit"),
    "fastvit.graph": ("compile",),
    "fastvit.graphed": ("graphs",),
    "fastvit.integrations": ("accelerate", "accelerated", "restore"),
    "fastvit.layers": ("Attention", "Block", "DropPath", "LayerNorm", "LayerScale", "Mlp", "PatchEmbed", "RMSNorm"),
    "fastvit.vit": ("VisionTransformer",),
    "fastvit.zoo": ("create_model", "list_models"),
}
_MODULE = {name: module for module, names in _MODULE_NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("fastvit")
        except PackageNotFoundError:  # a checkout on the path, not installed
            return "0.0.0+unknown"
    if name in _MODULE:
        value = globals()[name] = getattr(import_module(_MODULE[name]), name)
        return value
    if not name.startswith("_"):
        try:
            return import_module(f"fastvit.{name}")
        except ModuleNotFoundError as error:
            if not f"fastvit.{name}.".startswith(f"{error.name}."):
                raise
    raise AttributeError(f"module 'fastvit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
