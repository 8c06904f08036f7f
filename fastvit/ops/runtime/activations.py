"""The activations by name, on ATen: forward, in place, and backward. Their Triton twins are in kernels/_math.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fastvit.ops.runtime.torch_private import gelu_

aten = torch.ops.aten


def _copy_gelu_(x: Tensor, approximate: str = "none") -> Tensor:
    return x.copy_(F.gelu(x, approximate=approximate))


_gelu_ = gelu_ or _copy_gelu_


def _silu_(x: Tensor) -> Tensor:
    return F.silu(x, inplace=True)


def _quick_gelu(x: Tensor) -> Tensor:
    return (x * 1.702).sigmoid_().mul_(x)


def _quick_gelu_(x: Tensor) -> Tensor:
    return x.mul_((x * 1.702).sigmoid_())


def _quick_gelu_backward(dy: Tensor, x: Tensor, *, grad_input: Tensor) -> Tensor:
    s = (x * 1.702).sigmoid_()
    slope = aten.sigmoid_backward(dy, s)
    return torch.mul(dy, s, out=grad_input).addcmul_(slope, x, value=1.702)


_Backward = Callable[..., Tensor]  # (dy, x, *, grad_input) -> grad_input, which may be dy itself

# name -> (act(x), act in place, act'(x) * dy)
_ATEN: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], _Backward]] = {
    "gelu": (F.gelu, _gelu_, aten.gelu_backward.grad_input),
    "gelu_tanh": (
        lambda x: F.gelu(x, approximate="tanh"),
        lambda x: _gelu_(x, approximate="tanh"),
        partial(aten.gelu_backward.grad_input, approximate="tanh"),
    ),
    "quick_gelu": (_quick_gelu, _quick_gelu_, _quick_gelu_backward),
    "relu": (torch.relu, torch.relu_, partial(aten.threshold_backward.grad_input, threshold=0)),
    "silu": (F.silu, _silu_, aten.silu_backward.grad_input),
}

ACTIVATIONS = tuple(_ATEN)
# MLPs whose hidden layer is act(gate) * value (Shazeer 2020, arXiv:2002.05202): name -> the gate's activation
GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}


def check_activation(name: str, *others: str) -> None:
    """Raise ValueError unless the name is an activation's or one of `others`."""
    if name not in _ATEN:
        raise ValueError(f"activation must be one of {', '.join((*ACTIVATIONS, *others))}, got {name!r}")


def activate(x: Tensor, name: str) -> Tensor:
    """Return act(x), a new tensor."""
    return _ATEN[name][0](x)


def activate_(x: Tensor, name: str) -> Tensor:
    """Write act(x) over x."""
    return _ATEN[name][1](x)


def activate_backward(dy: Tensor, x: Tensor, name: str) -> Tensor:
    """Return dy * act'(x), a new tensor."""
    return _ATEN[name][2](dy, x, grad_input=torch.empty_like(x))


def activate_backward_(dy: Tensor, x: Tensor, name: str) -> Tensor:
    """Write dy * act'(x) over dy."""
    return _ATEN[name][2](dy, x, grad_input=dy)
