"""Gated MLPs (Shazeer 2020, arXiv:2002.05202): timm's names, arguments and state_dict keys, by `fastvit.ops.mlp`."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from fastvit import fuse
from fastvit._arguments import Device, Dtype, by_name, check_factory, check_flags, check_integers, check_rates
from fastvit._modules import read_or_none
from fastvit.layers import ACT_LAYERS, MLP_LAYERS, ActLayer, NormLayer

__all__ = ["GluMlp", "SwiGLU", "SwiGLUPacked"]


class _Gated(nn.Module):
    act: nn.Module
    drop1: nn.Module
    norm: nn.Module
    fc2: nn.Module
    drop2: nn.Module

    def _hidden(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        mlp = read_or_none(fuse.read_mlp, self)
        if mlp is not None:
            return fuse.run_mlp(x, mlp)
        return self.drop2(self.fc2(self.norm(self.drop1(self._hidden(x)))))


class SwiGLU(_Gated):
    """fc2(norm(act(fc1_g(x)) * fc1_x(x))), (..., in_features) -> (..., out_features).

    Args:
        in_features, hidden_features, out_features: None means as many as in_features.
        act_layer: of the gate: a class, or a name as in `Mlp`.
        norm_layer: norm_layer(hidden_features) as `norm`, or None.
        bias: whether the layers have one.
        drop: dropout behind the product and behind fc2, in [0, 1).
        align_to: hidden_features is raised to a multiple of it, if not 0.
        device, dtype: of the parameters.
    """

    def __init__(
        self, in_features: int, hidden_features: int | None = None, out_features: int | None = None,
        act_layer: str | ActLayer = "silu", norm_layer: NormLayer | None = None, bias: bool = True, drop: float = 0.0,
        align_to: int = 0, device: Device = None, dtype: Dtype = None,
    ) -> None:  # fmt: skip
        super().__init__()
        hidden, out = _sizes(in_features, hidden_features, out_features)
        check_integers(0, align_to=align_to)
        check_rates(drop=drop)
        check_factory(device, dtype)
        hidden += -hidden % align_to if align_to else 0
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.fc1_g = nn.Linear(in_features, hidden, bias=bias, **factory)
        self.fc1_x = nn.Linear(in_features, hidden, bias=bias, **factory)
        self.act = by_name("act_layer", act_layer, ACT_LAYERS)()
        self.drop1 = nn.Dropout(drop)
        self.norm = nn.Identity() if norm_layer is None else norm_layer(hidden, **factory)
        self.fc2 = nn.Linear(hidden, out, bias=bias, **factory)
        self.drop2 = nn.Dropout(drop)

    def _hidden(self, x: Tensor) -> Tensor:
        return self.act(self.fc1_g(x)) * self.fc1_x(x)


class GluMlp(_Gated):
    """`SwiGLU` with both layers in one, fc1: the rows of the gate behind those of the value, or before them.

    Args:
        in_features, out_features, norm_layer, bias, drop, device, dtype: as in `SwiGLU`.
        hidden_features: of gate and value together, an even number.
        act_layer: of the gate: a class, or a name as in `Mlp`.
        gate_last: whether the gate's rows come last, as is timm's default; its SwiGLUPacked has False.
    """

    def __init__(
        self, in_features: int, hidden_features: int | None = None, out_features: int | None = None,
        act_layer: str | ActLayer = "silu", norm_layer: NormLayer | None = None, bias: bool = True, drop: float = 0.0,
        gate_last: bool = True, device: Device = None, dtype: Dtype = None,
    ) -> None:  # fmt: skip
        super().__init__()
        both, out = _sizes(in_features, hidden_features, out_features)
        if both % 2:
            raise ValueError(f"hidden_features must be even, got {both}")
        check_flags(gate_last=gate_last)
        check_rates(drop=drop)
        check_factory(device, dtype)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.gate_last = bool(gate_last)
        self.fc1 = nn.Linear(in_features, both, bias=bias, **factory)
        self.act = by_name("act_layer", act_layer, ACT_LAYERS)()
        self.drop1 = nn.Dropout(drop)
        self.norm = nn.Identity() if norm_layer is None else norm_layer(both // 2, **factory)
        self.fc2 = nn.Linear(both // 2, out, bias=bias, **factory)
        self.drop2 = nn.Dropout(drop)

    def _hidden(self, x: Tensor) -> Tensor:
        first, second = self.fc1(x).chunk(2, dim=-1)
        return first * self.act(second) if self.gate_last else self.act(first) * second


def _sizes(in_features: int, hidden_features: int | None, out_features: int | None) -> tuple[int, int]:
    hidden = in_features if hidden_features is None else hidden_features
    out = in_features if out_features is None else out_features
    check_integers(1, in_features=in_features, hidden_features=hidden, out_features=out)
    return hidden, out


SwiGLUPacked = partial(GluMlp, gate_last=False)

# What reads timm's modules reads ours, and `mlp_layer` takes it by name
MLP_LAYERS |= {"glumlp": GluMlp, "swiglu": SwiGLU, "swiglupacked": SwiGLUPacked}
fuse.MLP |= {GluMlp, SwiGLU}
