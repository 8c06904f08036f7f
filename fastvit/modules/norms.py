"""Norms of the last dimension as modules, under timm's names, arguments and state_dict keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fastvit import ops
from fastvit.blocks import read, run
from fastvit.modules.arguments import Device, Dtype, by_name, with_known_arguments

NormLayer = Callable[..., nn.Module]


@with_known_arguments
class LayerNorm(nn.LayerNorm):
    """(..., D) -> (..., D) by `fastvit.ops.layer_norm`.

    Args:
        num_channels: D.
        eps: added to the variance; 1e-6 as timm's, where PyTorch's is 1e-5.
        device, dtype: of the parameters.
        elementwise_affine: whether it has a weight and a bias; DiT's norms have neither.
    """

    __module__ = "fastvit.layers"

    def __init__(
        self, num_channels: int, eps: float = 1e-6, device: Device = None, dtype: Dtype = None,
        *, elementwise_affine: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(num_channels, eps=eps, elementwise_affine=elementwise_affine, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return run.run_norm(x, ops.Norm(self.weight, self.bias, self.eps))


@with_known_arguments
class RMSNorm(nn.Module):
    """(..., D) -> (..., D) by `fastvit.ops.rms_norm` (Zhang & Sennrich 2019, arXiv:1910.07467).

    Args:
        channels: D.
        eps: added to the mean square.
        device, dtype: of the parameter.
        elementwise_affine: whether it has a weight.
    """

    __module__ = "fastvit.layers"

    def __init__(
        self, channels: int, eps: float = 1e-6, device: Device = None, dtype: Dtype = None,
        *, elementwise_affine: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.normalized_shape = (channels,)
        self.eps = eps
        weight = nn.Parameter(torch.empty(channels, device=device, dtype=dtype)) if elementwise_affine else None
        self.weight: nn.Parameter | None
        self.register_parameter("weight", weight)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return run.run_norm(x, read.rms_norm(self.weight, self.eps))

    def extra_repr(self) -> str:
        return f"{self.normalized_shape[0]}, eps={self.eps}"


NORM_LAYERS: dict[str, NormLayer] = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}  # timm's names


def checked_norm_layer(norm_layer: Any, qk_norm: bool = False) -> Any:
    """Return the class that norm_layer is or names, or None, which qk_norm does not allow."""
    if norm_layer is not None:
        return by_name("norm_layer", norm_layer, NORM_LAYERS)
    if qk_norm:
        raise ValueError("qk_norm=True needs norm_layer, got None")
    return None
