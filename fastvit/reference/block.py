"""The transformer block of Dosovitskiy et al. (2021, arXiv:2010.11929), its parts and variants, in plain PyTorch.

Shapes: B batch, N tokens, D embedding, H heads, d = D / H. factory: device and dtype of the parameters. The papers of
later additions are in `vit.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fastvit.reference import ops

LayerFactory = Callable[..., nn.Module]  # a class, or a partial of one


class QuickGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return ops.quick_gelu(x)


ACTIVATIONS: dict[str, LayerFactory] = {
    "gelu": nn.GELU,
    "gelu_tanh": partial(nn.GELU, approximate="tanh"),
    "quick_gelu": QuickGELU,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
}


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight: LayerNorm without mean and bias. (..., D) -> (..., D)."""

    def __init__(self, dim: int, eps: float = 1e-6, **factory: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim, **factory))

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)


NORMS: dict[str, LayerFactory] = {"layernorm": partial(nn.LayerNorm, eps=1e-6), "rmsnorm": RMSNorm}


def make_norm(norm_layer: str | LayerFactory | None, dim: int, **factory: Any) -> nn.Module:
    """Make a norm from a class or a name in NORMS; None gives an identity."""
    if norm_layer is None:
        return nn.Identity()
    return (NORMS[norm_layer] if isinstance(norm_layer, str) else norm_layer)(dim, **factory)


class Attention(nn.Module):
    """Appendix A: softmax(q k^T / sqrt(d)) v for every head, then a projection. (B, N, D) -> (B, N, D)."""

    def __init__(
        self, dim: int, num_heads: int = 8, qkv_bias: bool = False, proj_bias: bool = True,
        attn_drop: float = 0.0, proj_drop: float = 0.0, qk_norm_layer: str | LayerFactory | None = None,
        **factory: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"num_heads must divide dim = {dim}, got {num_heads}")
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = self.head_dim**-0.5
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias, **factory)
        self.q_norm = make_norm(qk_norm_layer, self.head_dim, **factory)
        self.k_norm = make_norm(qk_norm_layer, self.head_dim, **factory)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim, bias=proj_bias, **factory)
        self.proj_drop = nn.Dropout(proj_drop)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        """(B, H, N, d) each -> (B, H, N, d). A query that sees no key has weights of zero."""
        scores = (q * self.scale) @ k.transpose(-2, -1)  # (B, H, N, N)
        weights = ops.visible_softmax(scores, attn_mask, is_causal, empty_rows=attn_mask is not None)
        return self.attn_drop(weights) @ v

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        B, N, D = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, N, d)
        out = self.attend(self.q_norm(q), self.k_norm(k), v, attn_mask, is_causal).transpose(1, 2).reshape(B, N, D)
        return self.proj_drop(self.proj(out))


class Mlp(nn.Module):
    """Two layers with a non-linearity between them. (..., D) -> (..., D)."""

    def __init__(
        self, in_features: int, hidden_features: int, act_layer: LayerFactory = nn.GELU, bias: bool = True,
        drop: float = 0.0, **factory: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.fc1 = nn.Linear(in_features, hidden_features, bias=bias, **factory)
        self.act = act_layer()
        self.drop1 = nn.Dropout(drop)
        self.fc2 = nn.Linear(hidden_features, in_features, bias=bias, **factory)
        self.drop2 = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop2(self.fc2(self.drop1(self.act(self.fc1(x)))))


class SwiGLU(nn.Module):
    """act(x W_g) * (x W_x), with a layer each (Shazeer 2020, arXiv:2002.05202). (..., D) -> (..., D)."""

    def __init__(
        self, in_features: int, hidden_features: int, act_layer: LayerFactory = nn.SiLU, bias: bool = True,
        drop: float = 0.0, **factory: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.fc1_g = nn.Linear(in_features, hidden_features, bias=bias, **factory)
        self.fc1_x = nn.Linear(in_features, hidden_features, bias=bias, **factory)
        self.act = act_layer()
        self.drop1 = nn.Dropout(drop)
        self.fc2 = nn.Linear(hidden_features, in_features, bias=bias, **factory)
        self.drop2 = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.fc1_g(x)) * self.fc1_x(x)
        return self.drop2(self.fc2(self.drop1(hidden)))


class SwiGLUPacked(nn.Module):
    """`SwiGLU` with both layers in one of hidden_features rows, the gate's first. (..., D) -> (..., D)."""

    def __init__(
        self, in_features: int, hidden_features: int, act_layer: LayerFactory = nn.SiLU, bias: bool = True,
        drop: float = 0.0, **factory: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        half = hidden_features // 2
        self.fc1 = nn.Linear(in_features, hidden_features, bias=bias, **factory)
        self.act = act_layer()
        self.drop1 = nn.Dropout(drop)
        self.fc2 = nn.Linear(half, in_features, bias=bias, **factory)
        self.drop2 = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.fc1(x).chunk(2, dim=-1)
        return self.drop2(self.fc2(self.drop1(self.act(gate) * value)))


class LayerScale(nn.Module):
    """A learnt factor for every channel of a branch."""

    def __init__(self, dim: int, init_values: float = 1e-5, **factory: Any) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), init_values, **factory))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class DropPath(nn.Module):
    """Stochastic depth: in training, drops a sample's whole branch with probability p, scales the others by 1/(1-p)."""

    def __init__(self, drop_prob: float = 0.0) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.drop_prob == 0.0:
            return x
        keep = 1.0 - self.drop_prob
        mask = x.new_empty((x.shape[0], *[1] * (x.dim() - 1))).bernoulli_(keep)
        return x * (mask / keep if keep else mask)


class Block(nn.Module):
    """Equations 2 and 3: x + Attention(LN(x)), then x + Mlp(LN(x)). (B, N, D) -> (B, N, D)."""

    def __init__(
        self, dim: int, num_heads: int, mlp_ratio: float = 4.0, qkv_bias: bool = False, proj_bias: bool = True,
        proj_drop: float = 0.0, attn_drop: float = 0.0, init_values: float | None = None, drop_path: float = 0.0,
        act_layer: LayerFactory = nn.GELU, norm_layer: str | LayerFactory = NORMS["layernorm"],
        mlp_layer: LayerFactory = Mlp, qk_norm: bool = False, **factory: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.norm1 = make_norm(norm_layer, dim, **factory)
        of_heads = norm_layer if qk_norm else None
        self.attn = Attention(dim, num_heads, qkv_bias, proj_bias, attn_drop, proj_drop, of_heads, **factory)
        self.ls1 = LayerScale(dim, init_values, **factory) if init_values else nn.Identity()
        self.drop_path1 = DropPath(drop_path) if drop_path else nn.Identity()
        self.norm2 = make_norm(norm_layer, dim, **factory)
        self.mlp = mlp_layer(dim, int(dim * mlp_ratio), act_layer=act_layer, bias=proj_bias, drop=proj_drop, **factory)
        self.ls2 = LayerScale(dim, init_values, **factory) if init_values else nn.Identity()
        self.drop_path2 = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), attn_mask, is_causal)))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class PostNormBlock(Block):
    """The block of Vaswani et al. 2017: LN(x + Attention(x)), then LN(x + Mlp(x)). (B, N, D) -> (B, N, D)."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        x = self.norm1(x + self.drop_path1(self.ls1(self.attn(x, attn_mask, is_causal))))
        return self.norm2(x + self.drop_path2(self.ls2(self.mlp(x))))


BLOCKS: dict[str, LayerFactory] = {"block": Block, "postnorm": PostNormBlock}
