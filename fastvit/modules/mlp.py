"""MLPs as modules, plain and gated, under timm's names, arguments and state_dict keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from fastvit.blocks import run
from fastvit.blocks.read_mlp import read_mlp
from fastvit.blocks.submodules import read_or_none
from fastvit.blocks.unchanged import read_once
from fastvit.modules.arguments import Device, Dtype, by_name, check_integers, with_known_arguments
from fastvit.modules.norms import NormLayer, checked_norm_layer
from fastvit.modules.parts import ACT_LAYERS, ActLayer


def _checked(
    in_features: int, hidden_features: int | None, out_features: int | None,
    act_layer: str | ActLayer, norm_layer: str | NormLayer | None, activations: Mapping[str, ActLayer],
) -> tuple[int, int, ActLayer, NormLayer | None]:  # fmt: skip
    """Check arguments of all classes. Return the widths of the hidden layer and of the output, and the classes of
    activation and norm."""
    hidden_features = in_features if hidden_features is None else hidden_features
    out_features = in_features if out_features is None else out_features
    check_integers(1, hidden_features=hidden_features, out_features=out_features)
    act = by_name("act_layer", act_layer, activations)
    return hidden_features, out_features, act, checked_norm_layer(norm_layer)


GATES: dict[str, Callable[[], nn.Module]] = {"gelu": nn.GELU, "sigmoid": nn.Sigmoid, "silu": nn.SiLU}


class _Mlp(nn.Module):
    """Base class of all MLPs: everything after fc1."""

    def _add_rest(
        self, hidden: int, out_features: int, act: Callable[[], nn.Module], norm: NormLayer | None,
        bias: bool, drop: float, device: Device, dtype: Dtype,
    ) -> None:  # fmt: skip
        self.act = act()
        self.drop1 = nn.Dropout(drop)
        if norm is not None:
            self.norm = norm(hidden, device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden, out_features, bias=bias, device=device, dtype=dtype)
        self.drop2 = nn.Dropout(drop)

    def _activated(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        mlp = read_or_none(read_once, read_mlp, self)
        if mlp is not None:
            return run.run_mlp(x, mlp)
        hidden = self.drop1(self._activated(x))
        if "norm" in self._modules:
            hidden = self.norm(hidden)
        return self.drop2(self.fc2(hidden))


@with_known_arguments
class Mlp(_Mlp):
    """fc1, activation, fc2, (..., in_features) -> (..., out_features), by `fastvit.ops.mlp`.

    Args:
        in_features, hidden_features, out_features: None means as many as in_features.
        act_layer: a class, or gelu, gelu_tanh, quick_gelu, relu or silu; an activation that the ops do not know runs as
            its own module between plain linear layers.
        bias: whether both layers have one.
        drop: dropout after the activation and after fc2, in [0, 1).
        device, dtype: of the parameters.
        norm_layer: norm_layer(hidden_features) as `norm` before fc2, a class or a name as in `Attention`.
    """

    __module__ = "fastvit.layers"

    def __init__(
        self, in_features: int, hidden_features: int | None = None, out_features: int | None = None,
        act_layer: str | ActLayer = "gelu", bias: bool = True, drop: float = 0.0,
        device: Device = None, dtype: Dtype = None, *, norm_layer: str | NormLayer | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        hidden_features, out_features, act, norm = _checked(
            in_features, hidden_features, out_features, act_layer, norm_layer, ACT_LAYERS
        )
        self.fc1 = nn.Linear(in_features, hidden_features, bias=bias, device=device, dtype=dtype)
        self._add_rest(hidden_features, out_features, act, norm, bias, drop, device, dtype)

    def _activated(self, x: Tensor) -> Tensor:
        activated: Tensor = self.act(self.fc1(x))
        return activated


@with_known_arguments
class SwiGLU(_Mlp):
    """fc2(norm(act(fc1_g(x)) * fc1_x(x))), (..., in_features) -> (..., out_features), by `fastvit.ops.mlp` (Shazeer
    2020, arXiv:2002.05202).

    Args:
        in_features, hidden_features, out_features: None means as many as in_features.
        act_layer: the gate's: a class, or silu, gelu or sigmoid. Only silu and the exact gelu are fused.
        norm_layer: norm_layer(hidden_features) as `norm` before fc2, or None. LayerNorm and RMSNorm are fused.
        bias: whether the three layers have one.
        drop: dropout after the product and after fc2, in [0, 1).
        align_to: hidden_features is rounded up to a multiple of it; 0 for no rounding.
        device, dtype: of the parameters.
    """

    __module__ = "fastvit.layers"

    def __init__(
        self, in_features: int, hidden_features: int | None = None, out_features: int | None = None,
        act_layer: str | Callable[[], nn.Module] = "silu", norm_layer: str | NormLayer | None = None,
        bias: bool = True, drop: float = 0.0, align_to: int = 0, device: Device = None, dtype: Dtype = None,
    ) -> None:  # fmt: skip
        super().__init__()
        hidden, out_features, act, norm = _checked(
            in_features, hidden_features, out_features, act_layer, norm_layer, GATES
        )
        hidden += -hidden % align_to if align_to else 0
        self.fc1_g = nn.Linear(in_features, hidden, bias=bias, device=device, dtype=dtype)
        self.fc1_x = nn.Linear(in_features, hidden, bias=bias, device=device, dtype=dtype)
        self._add_rest(hidden, out_features, act, norm or nn.Identity, bias, drop, device, dtype)

    def init_weights(self) -> None:
        """Initialise as timm does: the gate is nearly act(1) everywhere."""
        _open(self.fc1_g.weight, self.fc1_g.bias)

    def _activated(self, x: Tensor) -> Tensor:
        gate: Tensor = self.act(self.fc1_g(x))
        return gate * self.fc1_x(x)


@with_known_arguments
class GluMlp(_Mlp):
    """fc2(norm(act(gate) * value)), (..., in_features) -> (..., out_features), by `fastvit.ops.mlp`; gate and value are
    the halves of fc1's output (Shazeer 2020, arXiv:2002.05202).

    Args:
        in_features, hidden_features, out_features: None means as many as in_features. hidden_features is the sum of
            gate and value, and even.
        act_layer: the gate's: a class, or silu, gelu or sigmoid. Only silu and the exact gelu are fused.
        norm_layer: norm_layer(hidden_features // 2) as `norm` before fc2, or None. LayerNorm and RMSNorm are fused.
        bias: whether both layers have one.
        drop: dropout after the product and after fc2, in [0, 1).
        gate_last: whether the gate is the second half.
        device, dtype: of the parameters.
    """

    __module__ = "fastvit.layers"

    def __init__(
        self, in_features: int, hidden_features: int | None = None, out_features: int | None = None,
        act_layer: str | Callable[[], nn.Module] = "sigmoid", norm_layer: str | NormLayer | None = None,
        bias: bool = True, drop: float = 0.0, *, gate_last: bool = True, device: Device = None, dtype: Dtype = None,
    ) -> None:  # fmt: skip
        super().__init__()
        both, out_features, act, norm = _checked(
            in_features, hidden_features, out_features, act_layer, norm_layer, GATES
        )
        if both % 2:
            raise ValueError(f"hidden_features must be even, of gate and value together, got {both}")
        self.gate_last = gate_last
        self.fc1 = nn.Linear(in_features, both, bias=bias, device=device, dtype=dtype)
        self._add_rest(both // 2, out_features, act, norm or nn.Identity, bias, drop, device, dtype)

    def init_weights(self) -> None:
        """Initialise as timm does: the second half of fc1's output is nearly 1 everywhere."""
        bias = self.fc1.bias
        _open(self.fc1.weight.chunk(2)[1], None if bias is None else bias.chunk(2)[1])

    def _activated(self, x: Tensor) -> Tensor:
        first, second = self.fc1(x).chunk(2, dim=-1)
        activated: Tensor = first * self.act(second) if self.gate_last else self.act(first) * second
        return activated


@torch.no_grad()
def _open(weight: Tensor, bias: Tensor | None) -> None:
    weight.normal_(std=1e-6)
    if bias is not None:
        bias.fill_(1.0)


SwiGLUPacked = partial(GluMlp, act_layer="silu", gate_last=False)
SwiGLUPacked.__doc__ = "`GluMlp` with silu and the gate first; its arguments are GluMlp's."
