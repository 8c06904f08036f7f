"""ViTs of other libraries, untouched (as `sdpa`, which is what they run) and with `fastvit.accelerate`."""

import importlib.util
from collections.abc import Callable
from typing import Any

from torch import nn

import fastvit
from benchmarks.cases import Case, Draw, Runner
from benchmarks.families import output
from benchmarks.libraries import load
from benchmarks.photographs import SOURCE, photographs
from benchmarks.record import Record


def _timm(**options: Any) -> nn.Module:
    return load("timm").create_model("vit_base_patch16_224", **options)


def _transformers(**options: Any) -> nn.Module:
    transformers = load("transformers")
    config = {"num_hidden_layers": depth} if (depth := options.get("depth")) else {}
    return transformers.ViTForImageClassification(transformers.ViTConfig(num_labels=1000, **config))


def _torchvision(**options: Any) -> nn.Module:
    kind = load("torchvision").models.VisionTransformer
    return kind(224, 16, options.get("depth", 12), 12, 768, 3072)


LIBRARIES: dict[str, Callable[..., nn.Module]] = {
    "timm": _timm,
    "transformers": _transformers,
    "torchvision": _torchvision,
}


def build(provider: str, draw: Draw, library: str, B: int, **options: int) -> Runner:
    model = draw.module(lambda: LIBRARIES[library](**options))
    if provider == "fused":
        fastvit.accelerate(model, strict=True)
    images = draw.constant(photographs(B, 224))
    return Runner(lambda: output(model(images)), (images,), tuple(model.parameters()), model)


def _case(library: str, B: int, **options: int) -> Case:
    def make(provider: str, draw: Draw, B: int) -> Runner:
        return build(provider, draw, library, B, **options)

    return Case(
        "accelerate", {"B": B}, make, ("sdpa", "compile", "fused"), name=f"{library} ViT-B/16 at 224 px",
        check={"B": min(B, 2)}, note=f"models run on {SOURCE}; sdpa: the library's own model",
    )  # fmt: skip


def cases(grid: str) -> list[Case]:
    installed = [name for name in LIBRARIES if importlib.util.find_spec(name) is not None]
    if grid == "quick":
        return [_case(name, 1, depth=1) for name in installed[:1]]
    return [_case(name, B) for name in installed for B in ((1,) if grid == "cpu" else (1, 32, 256))]


def bench_accelerate(measure: Callable[[Case, str], Record], case: Case, mode: str) -> None:
    measure(case, mode)
