"""The same model with its attention written in another way: N x N scores, or PyTorch's SDPA."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from fastvit import reference
from fastvit.reference.eva import EvaAttention


def _sdpa(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=self.attn_drop.p if self.training else 0.0)


def use_sdpa(model: nn.Module) -> nn.Module:
    """A model of `fastvit.reference`, its attention replaced by PyTorch's."""
    for module in model.modules():
        if isinstance(module, reference.Attention | reference.ParallelScalingBlock | EvaAttention):
            module.attend = MethodType(_sdpa, module)  # type: ignore[method-assign]
    return model


def use_eager(model: nn.Module) -> nn.Module:
    """A model of timm or transformers, its attention with N x N scores, in their own spelling.

    Raises:
        ValueError: a model without a switch for it.
    """
    switched = False
    choose = getattr(model, "set_attn_implementation", None)  # transformers
    if callable(choose):
        choose("eager")
        switched = True
    for module in model.modules():
        if isinstance(getattr(module, "fused_attn", None), bool):  # timm
            module.fused_attn = False  # type: ignore[assignment]
            switched = True
    if not switched:
        raise ValueError(f"{type(model).__name__} has no switch for eager attention (fused_attn, attn_implementation)")
    return model
