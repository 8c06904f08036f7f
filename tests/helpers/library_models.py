"""Small models of other libraries, for 32 x 32 images, and their steps before and after `accelerate`."""

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from library_imports import import_library
from models import randomised
from torch import Tensor, nn

import fastvit
from fastvit.integrations import Report

# A small vision configuration of transformers
SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip
# A small text tower of it
TEXT: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 50,
    "eos_token_id": 49,
}  # fmt: skip


def vit(name: str = "vit_tiny_patch16_224", **options: Any) -> nn.Module:
    """Return a ViT of timm. norm_layer: also the name of a class in timm.layers."""
    timm = import_library("timm")
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2, "num_classes": 7}
    norm_layer = options.get("norm_layer")
    if isinstance(norm_layer, str) and hasattr(timm.layers, norm_layer):
        options["norm_layer"] = getattr(timm.layers, norm_layer)
    return timm.create_model(name, **{**sizes, **options}).eval()


def gated_vit(mlp: str, norm: bool = False, norms: str | None = None, depth: int = 2, **options: Any) -> nn.Module:
    """Return a ViT of timm with one of its gated MLPs. options: the MLP's."""
    layer = partial(getattr(import_library("timm").layers, mlp), **options)
    return vit(mlp_layer=layer, scale_mlp_norm=norm, norm_layer=norms, depth=depth)


def attention_of_timm(kind: str, **options: Any) -> nn.Module:
    timm = import_library("timm")
    home = timm.models.eva if kind == "EvaAttention" else timm.layers
    options = {"norm_layer": timm.layers.RmsNorm, "num_heads": 4, **options}
    return randomised(getattr(home, kind)(64, **options)).eval()


def block_of_timm(name: str = "vit_tiny_patch16_224", **options: Any) -> nn.Module:
    """A block with random parameters, in a model that keeps its name."""
    return randomised(vit(name, depth=1, **options)).blocks[0]


def parallel_block(**options: Any) -> nn.Module:
    kind = import_library("timm").models.vision_transformer.ParallelScalingBlock
    return randomised(kind(64, 4, **options)).eval()


def gated_mlp(kind: str, **options: Any) -> nn.Module:
    return randomised(getattr(import_library("timm").layers, kind)(64, **options))


def torchvision_vit(depth: int = 2) -> nn.Module:
    vision_transformer = import_library("torchvision").models.VisionTransformer
    sizes = {"num_layers": depth, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 64}
    return vision_transformer(image_size=32, patch_size=8, **sizes).eval()


def sam_of_timm(**options: Any) -> nn.Module:
    """A windowed and a global block."""
    sizes = {"img_size": 64, "patch_size": 16, "embed_dim": 64, "depth": 2, "num_heads": 4, "neck_chans": 0}
    kind = import_library("timm").models.vision_transformer_sam.VisionTransformerSAM
    return kind(**{**sizes, "num_classes": 5, "global_attn_indexes": (1,), **options}).eval()


def swin_of_timm(size: int = 32, window: Any = 4, **options: Any) -> nn.Module:
    """A stage of a block without a shift and one with it, and a stage whose window is the whole grid or padded."""
    sizes = {"img_size": size, "window_size": window, "embed_dim": 32, "depths": (2, 1), "num_heads": (2, 4)}
    kind = import_library("timm").models.swin_transformer.SwinTransformer
    return kind(**sizes, num_classes=5, **options).eval()


def swin_of_transformers(size: int = 32, window: int = 4, **options: Any) -> nn.Module:
    transformers = import_library("transformers")
    sizes = {"image_size": size, "window_size": window, "embed_dim": 32, "depths": [2, 1], "num_heads": [2, 4]}
    return transformers.SwinForImageClassification(
        transformers.SwinConfig(**{**sizes, "num_labels": 5, "drop_path_rate": 0.0, **options})
    ).eval()


def class_of_transformers(file: str, kind: str) -> Any:
    import_library("transformers")
    folder, _, own = file.rpartition(".")
    try:
        return getattr(importlib.import_module(f"transformers.models.{folder or file}.modeling_{own}"), kind)
    except (ImportError, AttributeError):
        pytest.skip(f"this version of transformers has no {file}")


def grid_of_transformers(name: str, implementation: str = "eager", **options: Any) -> nn.Module:
    """SAM, an encoder with its code, or VitDet: a windowed and a global layer."""
    file, _, kind = name.partition(".")
    sizes: dict[str, Any] = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 64, "patch_size": 16,
        "window_size": 3, "attn_implementation": implementation,
    }  # fmt: skip
    if file == "vitdet":
        sizes |= {"window_block_indices": [0], "use_relative_position_embeddings": True, "mlp_ratio": 2}
    else:
        sizes |= {"global_attn_indexes": [1], "mlp_dim": 96, "output_channels": 256}
    model = class_of_transformers(file, kind)
    config = model.__annotations__.get("config") or model.config_class
    config = getattr(importlib.import_module(model.__module__), config) if isinstance(config, str) else config
    return model(config(**sizes, **options)).eval()


def open_clip_tower(kind: str, **options: Any) -> nn.Module:
    """Return a tower of one block, of the class VisionTransformer, TextTransformer or MultimodalTransformer."""
    transformer = import_library("open_clip.transformer")
    return getattr(transformer, kind)(width=64, layers=1, heads=4, **options).eval()


def hugging_face(name: str, **options: Any) -> nn.Module:
    """Return a model of transformers by the name of its class."""
    kind = getattr(import_library("transformers"), name)
    return kind(kind.config_class(**{**SIZES, **options})).eval()


def outcome(report: Report, name: str) -> tuple[str, str]:
    """Return status and detail of the module of that name."""
    (entry,) = (e for e in report.entries if e.name == name)
    return entry.status, entry.detail


class Step(NamedTuple):
    """The output (logits or tokens), and the gradients of all parameters that have one, by name."""

    output: Tensor
    gradients: dict[str, Tensor]


Call = Callable[[nn.Module], Any]


def output_of(result: Any) -> Tensor:
    """Return the logits or the tokens: the only tensor, or the first of several."""
    for name in ("logits", "last_hidden_state"):
        result = getattr(result, name, result)
    while not isinstance(result, Tensor):
        result = result[0]
    return result


def step(model: nn.Module, call: Call) -> Step:
    """Run call(model) and its backward pass for a fixed random cotangent, from a fixed seed."""
    torch.manual_seed(4)
    out = output_of(call(model))
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out)
    parameters = {name.removeprefix("_orig_mod."): p for name, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(out, list(parameters.values()), cotangent, allow_unused=True)
    return Step(out.detach(), {name: g for name, g in zip(parameters, gradients, strict=True) if g is not None})


def assert_steps_agree(got: Step, want: Step) -> None:
    """Within 1e-5 of each tensor's largest element; gradients that are only rounding, of the largest of all."""
    assert got.gradients.keys() == want.gradients.keys()
    largest = max(map(_largest, want.gradients.values()))
    assert _largest(got.output - want.output) <= 1e-5 * _largest(want.output)
    for name, gradient in want.gradients.items():
        scale = max(_largest(gradient), 1e-2 * largest)
        assert _largest(got.gradients[name] - gradient) <= 1e-5 * scale, name


def _largest(t: Tensor) -> float:
    return float(t.abs().max()) if t.numel() else 0.0


def assert_steps_equal(got: Step, want: Step) -> None:
    assert torch.equal(got.output, want.output)
    assert got.gradients.keys() == want.gradients.keys()
    assert all(torch.equal(got.gradients[name], gradient) for name, gradient in want.gradients.items())


@contextmanager
def fused_only() -> Iterator[None]:
    """Raise where a module's own forward runs instead of fused ops."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".* runs its own forward")
        yield


def accelerate_and_compare(model: nn.Module, call: Call, want: Step | None = None, **options: Any) -> Report:
    """Accelerate a model: its step agrees with that before, and no module's own forward runs instead. want: the step
    before, if it is known."""
    want = step(model, call) if want is None else want
    report = fastvit.accelerate(model, **options)
    with fused_only():
        assert_steps_agree(step(model, call), want)
    return report
