"""The same model with its attention written in another way: N x N scores, or PyTorch's SDPA."""

from __future__ import annotations

from types import MethodType

import torch.nn.functional as F
from torch import Tensor, nn

from fastvit import reference
from fastvit.reference_eva import EvaAttention


def _sdpa_forward(self: reference.Attention, x: Tensor) -> Tensor:
    B, N, D = x.shape
    q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
    dropout = self.attn_drop.p if self.training else 0.0
    out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
    return self.proj_drop(self.proj(out.transpose(1, 2).reshape(B, N, D)))


def _sdpa_forward_of_eva(self: EvaAttention, x: Tensor, rope: Tensor | None = None) -> Tensor:
    q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self.project(x))
    if rope is not None:
        q, k = self.rotate(q, rope), self.rotate(k, rope)
    dropout = self.attn_drop.p if self.training else 0.0
    out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
    return self.proj_drop(self.proj(self.norm(out.transpose(1, 2).flatten(2))))


def _sdpa(self: reference.ParallelScalingBlock, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=self.attn_drop.p if self.training else 0.0)


def use_sdpa(model: nn.Module) -> nn.Module:
    """A model of `fastvit.reference`, its attention replaced by PyTorch's."""
    for module in model.modules():
        if isinstance(module, reference.Attention):
            module.forward = MethodType(_sdpa_forward, module)  # type: ignore[method-assign]
        elif isinstance(module, EvaAttention):
            module.forward = MethodType(_sdpa_forward_of_eva, module)  # type: ignore[method-assign]
        elif isinstance(module, reference.ParallelScalingBlock):
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
