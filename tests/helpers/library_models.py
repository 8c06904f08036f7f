"""Small models of other libraries, for 32 x 32 images, and their steps before and after `accelerate`."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from library_imports import import_library
from torch import Tensor, nn

import fastvit
from fastvit.integrations import Report

# A small vision configuration of transformers
SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip


def vit(name: str = "vit_tiny_patch16_224", **options: Any) -> nn.Module:
    """Return a ViT of timm."""
    return import_library("timm").create_model(name, **{"img_size": 32, "depth": 2, **options}).eval()


def gated_vit(mlp: str, norm: bool = False, norms: str | None = None, **options: Any) -> nn.Module:
    """Return a ViT of timm with one of its gated MLPs. options: the MLP's."""
    layer = partial(getattr(import_library("timm").layers, mlp), **options)
    return vit(mlp_layer=layer, scale_mlp_norm=norm, norm_layer=norms, num_classes=7)


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


class Step(NamedTuple):
    """The output (logits or tokens), and the gradients of all parameters that have one, by name."""

    output: Tensor
    gradients: dict[str, Tensor]


Call = Callable[[nn.Module], Any]


def step(model: nn.Module, call: Call) -> Step:
    """Run call(model) and its backward pass for a fixed random cotangent, from a fixed seed."""
    torch.manual_seed(4)
    out = call(model)
    out = out if isinstance(out, Tensor) else out.last_hidden_state
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out)
    parameters = {name.removeprefix("_orig_mod."): p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(out, list(parameters.values()), cotangent, allow_unused=True)
    return Step(out.detach(), {name: g for name, g in zip(parameters, found, strict=True) if g is not None})


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


def accelerate_and_compare(model: nn.Module, call: Call, **options: Any) -> Report:
    """Accelerate a model: its step agrees with that before, and no module's own forward runs instead."""
    want = step(model, call)
    report = fastvit.accelerate(model, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".* runs its own forward")
        assert_steps_agree(step(model, call), want)
    return report
