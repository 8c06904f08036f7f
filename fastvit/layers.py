"""The modules of a Vision Transformer: timm's names, arguments and state_dict keys, with fused ops inside.

A fused op stands for several submodules at once, which remain real modules: parameters live in them, and hooks may be
put on them. Where a submodule inside a fused span carries a hook, has another `forward`, or is of another class
(parametrised), that part of the block calls its submodules one by one instead, so that nothing is skipped; a linear
layer that is quantised or has peft's LoRA is called by itself between the ops.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from fastvit import fuse, ops, readers
from fastvit._arguments import (
    Device,
    Dtype,
    by_name,
    check_factory,
    check_heads,
    check_hidden,
    check_init_values,
    check_integers,
    check_number,
    check_rates,
)
from fastvit._block_parts import ACT_LAYERS, ActLayer, DropPath, Layer, LayerScale, QuickGELU, attend
from fastvit._gated_layers import GluMlp, SwiGLU, SwiGLUPacked
from fastvit._modules import read_or_none, submodules
from fastvit._norms import NORM_LAYERS, LayerNorm, NormLayer, RMSNorm, checked_norm_layer
from fastvit._parallel_block import ParallelScalingBlock
from fastvit._patch_embed import PatchEmbed

__all__ = [
    "Attention",
    "Block",
    "DropPath",
    "GluMlp",
    "LayerNorm",
    "LayerScale",
    "Mlp",
    "ParallelScalingBlock",
    "PatchEmbed",
    "QuickGELU",
    "RMSNorm",
    "ResPostBlock",
    "RmsNorm",
    "SwiGLU",
    "SwiGLUPacked",
]


class Attention(nn.Module):
    """Multi-head self-attention, (B, N, D) -> (B, N, D), by `fastvit.ops.attention_qkvpacked`.

    A hook on `attn_drop` receives the probabilities (B, H, N, N): they are materialised while it is registered.

    Args:
        dim: D.
        num_heads: H, a divisor of D; D / H is a multiple of 8 from 16 to 256.
        qkv_bias, proj_bias: whether `qkv` and `proj` have one.
        attn_drop, proj_drop: dropout of the probabilities, and behind the projection; in [0, 1).
        device, dtype: of the parameters.
        scale_norm: norm_layer(dim) as `norm` in front of the projection (Wang et al. 2022, arXiv:2210.06423).
        qk_norm: norm_layer(D / H) as `q_norm` and `k_norm` of q's and k's heads (Dehghani et al. 2023,
            arXiv:2302.05442).
        norm_layer: for scale_norm and qk_norm: a class (or partial), "layernorm" or "rmsnorm".
    """

    def __init__(
        self, dim: int, num_heads: int = 8, qkv_bias: bool = False, proj_bias: bool = True,
        attn_drop: float = 0.0, proj_drop: float = 0.0, device: Device = None, dtype: Dtype = None,
        *, scale_norm: bool = False, qk_norm: bool = False, norm_layer: str | NormLayer | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        check_heads("dim", dim, num_heads)
        check_rates(attn_drop=attn_drop, proj_drop=proj_drop)
        norm = checked_norm_layer(norm_layer, scale_norm=scale_norm, qk_norm=qk_norm)
        check_factory(device, dtype)
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = self.head_dim**-0.5
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias, device=device, dtype=dtype)
        if qk_norm:
            self.q_norm = norm(self.head_dim, device=device, dtype=dtype)
            self.k_norm = norm(self.head_dim, device=device, dtype=dtype)
        self.attn_drop = nn.Dropout(attn_drop)
        if scale_norm:
            self.norm = norm(dim, device=device, dtype=dtype)
        self.proj = nn.Linear(dim, dim, bias=proj_bias, device=device, dtype=dtype)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor) -> Tensor:
        attention = read_or_none(readers.read_attention, self)
        if attention is not None:
            return fuse.run_attention(x, attention)
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim))
        if "q_norm" in self._modules:
            q, k, v = qkv.unbind(2)
            qkv = torch.stack((self.q_norm(q), self.k_norm(k), v), 2)
        if read_or_none(submodules, self, attn_drop=readers.DROPOUT):
            out = ops.attention_qkvpacked(qkv, dropout_p=self.attn_drop.p if self.attn_drop.training else 0.0)
        else:
            out = attend(self, *qkv.unbind(2))
        out = out.flatten(2)
        if "norm" in self._modules:
            out = self.norm(out)
        return self.proj_drop(self.proj(out))


class Mlp(nn.Module):
    """fc1, activation, fc2, (..., in_features) -> (..., out_features), by `fastvit.ops.mlp`.

    Args:
        in_features, hidden_features, out_features: None means as many as in_features.
        act_layer: a class, or gelu, gelu_tanh, quick_gelu, relu or silu; an activation that the ops do not know runs as
            its own module between plain linear layers.
        bias: whether both layers have one.
        drop: dropout behind the activation and behind fc2, in [0, 1).
        device, dtype: of the parameters.
        norm_layer: norm_layer(hidden_features) as `norm` in front of fc2, a class or a name as in `Attention`; three
            ops then, where it is otherwise one.
    """

    def __init__(
        self, in_features: int, hidden_features: int | None = None, out_features: int | None = None,
        act_layer: str | ActLayer = "gelu", bias: bool = True, drop: float = 0.0,
        device: Device = None, dtype: Dtype = None, *, norm_layer: str | NormLayer | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        hidden_features = in_features if hidden_features is None else hidden_features
        out_features = in_features if out_features is None else out_features
        check_integers(1, in_features=in_features, hidden_features=hidden_features, out_features=out_features)
        check_rates(drop=drop)
        check_factory(device, dtype)
        act = by_name("act_layer", act_layer, ACT_LAYERS)
        norm = checked_norm_layer(norm_layer)
        self.fc1 = nn.Linear(in_features, hidden_features, bias=bias, device=device, dtype=dtype)
        self.act = act()
        self.drop1 = nn.Dropout(drop)
        if norm is not None:
            self.norm = norm(hidden_features, device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden_features, out_features, bias=bias, device=device, dtype=dtype)
        self.drop2 = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        mlp = read_or_none(readers.read_mlp, self)
        if mlp is not None:
            return fuse.run_mlp(x, mlp)
        hidden = self.drop1(self.act(self.fc1(x)))
        if "norm" in self._modules:
            hidden = self.norm(hidden)
        return self.drop2(self.fc2(hidden))


ATTN_LAYERS = {"": Attention, "attn": Attention}
MLP_LAYERS: dict[str, Layer] = {"mlp": Mlp, "glumlp": GluMlp, "swiglu": SwiGLU, "swiglupacked": SwiGLUPacked}


class Block(nn.Module):
    """Pre-norm transformer block, (B, N, D) -> (B, N, D), as two fused halves:

        x + drop_path1(ls1(attn(norm1(x))))    layer_norm_attention
        x + drop_path2(ls2(mlp(norm2(x))))     layer_norm_mlp

    In training it saves at most 10 token tensors.

    Args:
        dim, num_heads: D, and H, a divisor of D.
        mlp_ratio: width of the MLP as a multiple of D.
        qkv_bias, proj_bias: biases of the qkv layer, and of the projection and the MLP.
        proj_drop, attn_drop: dropout behind the projection and both layers of the MLP, and of the probabilities.
        init_values: LayerScale's, None or 0 for none.
        drop_path: the probability that a sample's branch is dropped, in [0, 1].
        act_layer, norm_layer, mlp_layer, attn_layer: classes (or partials), called with timm's arguments, or names;
            with classes that the ops do not know, that half of the block runs its submodules one by one.
        device, dtype: of the parameters.
        scale_attn_norm, scale_mlp_norm: a norm in front of the half's last layer; the MLP's, without a gate, makes that
            half four ops.
        qk_norm: of `Attention`.
        depth: the block's number, for attention whose initialisation asks for it.
    """

    def __init__(
        self, dim: int, num_heads: int, mlp_ratio: float = 4.0, qkv_bias: bool = False, proj_bias: bool = True,
        proj_drop: float = 0.0, attn_drop: float = 0.0, init_values: float | None = None, drop_path: float = 0.0,
        act_layer: str | ActLayer = "gelu", norm_layer: str | NormLayer = LayerNorm,
        device: Device = None, dtype: Dtype = None, *, scale_attn_norm: bool = False, scale_mlp_norm: bool = False,
        mlp_layer: str | Layer = Mlp, attn_layer: str | Layer = Attention, depth: int = 0, qk_norm: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        attention = by_name("attn_layer", attn_layer, ATTN_LAYERS)
        mlp = by_name("mlp_layer", mlp_layer, MLP_LAYERS)
        if attention is Attention:
            check_heads("dim", dim, num_heads)
        check_integers(1, dim=dim, num_heads=num_heads)
        check_hidden("dim", dim, mlp_ratio)
        check_init_values(init_values)
        check_rates(proj_drop=proj_drop, attn_drop=attn_drop)
        check_number("drop_path", drop_path, lambda p: 0.0 <= p <= 1.0, "in [0, 1]")
        check_factory(device, dtype)
        act_layer = by_name("act_layer", act_layer, ACT_LAYERS)
        norm = by_name("norm_layer", norm_layer, NORM_LAYERS)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        own = {"depth": depth} if "depth" in inspect.signature(attention).parameters else {}
        own |= {"qk_norm": True} if qk_norm else {}
        self.norm1 = norm(dim, **factory)
        self.attn = attention(
            dim, num_heads=num_heads, qkv_bias=qkv_bias, scale_norm=scale_attn_norm, proj_bias=proj_bias,
            attn_drop=attn_drop, proj_drop=proj_drop, norm_layer=norm, **own, **factory,
        )  # fmt: skip
        self.ls1 = LayerScale(dim, init_values, device, dtype) if init_values else nn.Identity()
        self.drop_path1 = DropPath(drop_path) if drop_path else nn.Identity()
        self.norm2 = norm(dim, **factory)
        self.mlp = mlp(
            in_features=dim, hidden_features=int(dim * mlp_ratio), act_layer=act_layer, bias=proj_bias, drop=proj_drop,
            norm_layer=norm if scale_mlp_norm else None, **factory,
        )  # fmt: skip
        self.ls2 = LayerScale(dim, init_values, device, dtype) if init_values else nn.Identity()
        self.drop_path2 = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        attention = read_or_none(readers.read_attention_half, self)
        if attention is not None:
            x = fuse.run_attention_half(x, attention)
        else:
            x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
        mlp = read_or_none(readers.read_mlp_half, self)
        if mlp is not None:
            return fuse.run_mlp_half(x, mlp)
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class ResPostBlock(Block):
    """Block with the norm at the end of each branch: x + drop_path1(norm1(attn(x))), and the same with the MLP.

    No LayerScale: init_values, if not None, initialises the norms' weights instead (Liu et al. 2021, arXiv:2111.09883).
    """

    def __init__(self, dim: int, num_heads: int, *, init_values: float | None = None, **kwargs: Any) -> None:
        super().__init__(dim, num_heads, **kwargs)
        del self.ls1, self.ls2
        self.init_values = init_values
        self.init_weights()

    def init_weights(self) -> None:
        if self.init_values is not None:
            for norm in (self.norm1, self.norm2):
                nn.init.constant_(norm.get_parameter("weight"), self.init_values)

    reset_parameters = init_weights

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path1(self.norm1(self.attn(x)))
        return x + self.drop_path2(self.norm2(self.mlp(x)))


RmsNorm = RMSNorm  # timm's name of PyTorch's

# What reads timm's modules reads ours
readers.ATTENTION.add(Attention)
readers.MLP.add(Mlp)
