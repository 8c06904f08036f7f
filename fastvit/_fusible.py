"""When a fused op may stand for modules, and the names of the activations and norms that modules are built from."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fastvit._halves import Affine

ActLayer = Callable[[], nn.Module]


class QuickGELU(nn.Module):
    """x * sigmoid(1.702 x), OpenAI CLIP's approximation of GELU."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


ACT_LAYERS: dict[str, ActLayer] = {
    "gelu": nn.GELU,
    "gelu_tanh": partial(nn.GELU, approximate="tanh"),
    "quick_gelu": QuickGELU,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
}


def named(argument: str, name: str, table: Mapping[str, Callable[..., nn.Module]]) -> Callable[..., nn.Module]:
    """table[name], or a ValueError with the nearest names."""
    if name in table:
        return table[name]
    near = difflib.get_close_matches(name, table)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise ValueError(f"{argument} must be a class or one of {sorted(table)}, got {name!r}{hint}")


def untouched(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether a fused op may stand for `module`: exactly of one of these classes, with no hooks and its own forward.

    Hooks registered globally for all modules are profilers' and counters': they see the modules that really run.
    """
    return type(module) in kinds and not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def submodules(module: nn.Module) -> dict[str, Any]:
    """Its submodules by name: a dict costs a tenth of an nn.Module's attribute look-up, and a block checks twenty."""
    return module._modules


def active_p(dropout: nn.Dropout) -> float:
    """The probability that applies now."""
    return dropout.p if dropout.training else 0.0


def affine(layer: nn.Module) -> Affine:
    """The weight and bias of a linear layer or norm as they are now: FSDP puts others in their place from call to call,
    some versions of it as plain attributes."""
    found: dict[str, Any] = layer._parameters  # a third of the time of two attributes
    if "weight" in found and "bias" in found:
        return Affine(found["weight"], found["bias"])
    return Affine(layer.weight, layer.bias)  # type: ignore[arg-type]


def activation_name(act: nn.Module) -> str | None:
    """What the ops call this activation; None for one that they do not know."""
    if untouched(act, nn.GELU):
        return "gelu_tanh" if act.approximate == "tanh" else "gelu"
    for kind, name in ((QuickGELU, "quick_gelu"), (nn.ReLU, "relu"), (nn.SiLU, "silu")):
        if untouched(act, kind):
            return name
    return None
