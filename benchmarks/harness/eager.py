"""The baselines in plain PyTorch: each op as a ViT without fused kernels writes it, and attention with SDPA."""

from __future__ import annotations

from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fastvit import reference


def attention(qkv: Tensor) -> Tensor:
    """Materialises N x N. (B, N, 3, H, d) -> (B, N, H, d)."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    return (scores.softmax(dim=-1) @ v).transpose(1, 2).contiguous()


def attention_sdpa(qkv: Tensor) -> Tensor:
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous()


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, 1e-6)


def add_layer_norm(
    residual: Tensor, branch: Tensor, weight: Tensor, bias: Tensor, layer_scale: Tensor
) -> tuple[Tensor, Tensor]:
    total = residual + layer_scale * branch
    return total, layer_norm(total, weight, bias)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.linear(x, weight, bias))


def mlp(x: Tensor, fc1_weight: Tensor, fc1_bias: Tensor, fc2_weight: Tensor, fc2_bias: Tensor) -> Tensor:
    return F.linear(linear_gelu(x, fc1_weight, fc1_bias), fc2_weight, fc2_bias)


def layer_norm_mlp(x: Tensor, norm_weight: Tensor, norm_bias: Tensor, *fc: Tensor) -> Tensor:
    return x + mlp(layer_norm(x, norm_weight, norm_bias), *fc)


def patch_embed(image: Tensor, weight: Tensor, bias: Tensor, pos_embed: Tensor, prefix: Tensor) -> Tensor:
    """(B, C, H, W) -> (B, P + n, D)."""
    patches = F.conv2d(image, weight, bias, stride=weight.shape[2:]).flatten(2).transpose(1, 2)
    return torch.cat([prefix.expand(image.shape[0], -1, -1), patches + pos_embed], dim=1)


def _sdpa_forward(self: reference.Attention, x: Tensor) -> Tensor:
    B, N, D = x.shape
    q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
    dropout = self.attn_drop.p if self.training else 0.0
    out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
    return self.proj_drop(self.proj(out.transpose(1, 2).reshape(B, N, D)))


def use_sdpa(model: nn.Module) -> nn.Module:
    """The reference model, its attention replaced by PyTorch's."""
    for module in model.modules():
        if isinstance(module, reference.Attention):
            module.forward = MethodType(_sdpa_forward, module)  # type: ignore[method-assign]
    return model


class SdpaBackend(TorchDispatchMode):
    """Within the context, `name` becomes that of the kernel behind `F.scaled_dot_product_attention`."""

    name = "math"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        operator = func.__name__
        if operator.startswith("_scaled_dot_product_") and "backward" not in operator:
            self.name = operator.removeprefix("_scaled_dot_product_").split(".")[0].removesuffix("_attention")
        return func(*args, **(kwargs or {}))
