"""Fused Triton kernels for Vision Transformers, forward and backward. `import fastvit` by itself imports nothing, not
even torch: every name is imported on first use. The lines below can be pasted one after another.

`accelerate` puts fused ops into a model that you have, by the classes of its modules. See `fastvit.integrations`.

    import fastvit, timm, torch
    model = timm.create_model("vit_small_patch16_224")
    print(fastvit.accelerate(model))  # in place; fastvit.restore(model) undoes it

`graphs` replays calls on a GPU as CUDA graphs, so that small batches do not wait for Python. See `fastvit.cuda_graphs`.

    report = fastvit.graphs(model)  # the third call of a kind is captured
    print(model(torch.randn(1, 3, 224, 224)).shape, report)

`compile` finds what can be fused in any model, by its graph, and compiles the rest. See `fastvit.compiler`.

    compiled = fastvit.compile(timm.create_model("vit_small_patch16_224"), report=True)
    compiled(torch.randn(1, 3, 224, 224))  # compiles, and prints the report

`create_model` makes a ViT of `list_models()`, out of `fastvit.layers`. `fastvit.checkpoints` says which weights fit.

    vit = fastvit.create_model("vit_small_patch16_224", num_classes=10, img_size=64)
    print(vit(torch.randn(8, 3, 64, 64)).shape)

`fastvit.ops` has the fused ops as functions.

    qkv = torch.randn(2, 197, 3, 12, 64, requires_grad=True)
    fastvit.ops.attention_qkvpacked(qkv).sum().backward()

`fastvit.study` shows what a ViT costs, also without a GPU, and what it attends to. `fit` lowers the memory of training.

    study = fastvit.study.memory("vit_base_patch16_224", image_sizes=(224, 512))
    print([point.planned.peak for point in study.of("fastvit")])
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastvit import export, ops, reference, study
    from fastvit._base.version import __version__
    from fastvit.compiler import compile
    from fastvit.cuda_graphs import graphs
    from fastvit.distilled import VisionTransformerDistilled
    from fastvit.eva import Eva
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

_MODULE_NAMES = {
    "fastvit._base.version": ("__version__",),
    "fastvit.distilled": ("VisionTransformerDistilled",),
    "fastvit.eva": ("Eva",),
    "fastvit.study.fitting.fit": ("fit", "unfit"),
    "fastvit.compiler": ("compile",),
    "fastvit.cuda_graphs": ("graphs",),
    "fastvit.integrations": ("accelerate", "accelerated", "restore"),
    "fastvit.layers": ("Attention", "Block", "DropPath", "LayerNorm", "LayerScale", "Mlp", "PatchEmbed", "RMSNorm"),
    "fastvit.vit": ("VisionTransformer",),
    "fastvit.zoo": ("create_model", "list_models"),
}
_MODULE = {name: module for module, names in _MODULE_NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
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
