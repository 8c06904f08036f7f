"""The activations by name, on ATen: forward, in place, and backward. Their Triton twins are in kernels/_math.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten
_gelu_ = torch._C._nn.gelu_  # type: ignore[attr-defined]  # what F.gelu is made of; F has no form in place


def _silu_(x: Tensor) -> Tensor:
    return F.silu(x, inplace=True)


def _quick_gelu(x: Tensor) -> Tensor:
    return (x * 1.702).sigmoid_().mul_(x)


def _quick_gelu_(x: Tensor) -> Tensor:
    return x.mul_((x * 1.702).sigmoid_())


def _quick_gelu_backward(dy: Tensor, x: Tensor) -> Tensor:
    s = (x * 1.702).sigmoid_()
    return (dy * s).addcmul_(aten.sigmoid_backward(dy, s), x, value=1.702)


def _relu_backward(dy: Tensor, x: Tensor) -> Tensor:
    return aten.threshold_backward(dy, x, 0)


# name -> (act(x), act in place, act'(x) * dy)
_ATEN: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "gelu": (F.gelu, _gelu_, aten.gelu_backward.default),
    "gelu_tanh": (
        lambda x: F.gelu(x, approximate="tanh"),
        lambda x: _gelu_(x, approximate="tanh"),
        lambda dy, x: aten.gelu_backward(dy, x, approximate="tanh"),
    ),
    "quick_gelu": (_quick_gelu, _quick_gelu_, _quick_gelu_backward),
    "relu": (torch.relu, torch.relu_, _relu_backward),
    "silu": (F.silu, _silu_, aten.silu_backward.default),
}

ACTIVATIONS = tuple(_ATEN)


def check_activation(name: str) -> None:
    if name not in _ATEN:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {name!r}")


def activate(x: Tensor, name: str) -> Tensor:
    """act(x), a fresh tensor."""
    return _ATEN[name][0](x)


def activate_(x: Tensor, name: str) -> Tensor:
    """act(x), written over x."""
    return _ATEN[name][1](x)


def activate_backward(dy: Tensor, x: Tensor, name: str) -> Tensor:
    """dy * act'(x), a fresh tensor."""
    return _ATEN[name][2](dy, x)
