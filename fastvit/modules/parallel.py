"""The block of attention and MLP side by side as a module, under timm's name, arguments and state_dict keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastvit.blocks import read_parallel
from fastvit.blocks.submodules import read_or_none
from fastvit.modules.arguments import (
    Device,
    Dtype,
    by_name,
    check_factory,
    check_flags,
    check_heads,
    check_hidden,
    check_init_values,
    check_number,
    check_rates,
)
from fastvit.modules.norms import NORM_LAYERS, LayerNorm, NormLayer
from fastvit.modules.parts import ACT_LAYERS, ActLayer, DropPath, LayerScale, attend


class ParallelScalingBlock(nn.Module):
    """Attention and MLP side by side, (B, N, D) -> (B, N, D) (Dehghani et al. 2023, arXiv:2302.05442, section 2.1):

        x + drop_path(ls(attn(in_norm(x)) + mlp(in_norm(x))))    layer_norm_attention, layer_norm_mlp

    One layer, `in_proj`, projects into the MLP and to q, k and v. With qkv_bias=False the MLP has a bias of its own
    there, `mlp_bias`, and q, k and v have none. In training the block saves at most 9 token tensors; with proj_drop it
    runs its submodules one by one. A hook on `attn_drop` receives the probabilities (B, H, N, N): they are materialised
    while it is registered.

    Args:
        dim, num_heads: D, and H, a divisor of D; D / H is a multiple of 8 from 16 to 256.
        mlp_ratio: width of the MLP as a multiple of D.
        qkv_bias, proj_bias: biases of the layer into both, and of the layers out of attention and the MLP.
        qk_norm: norm_layer(D / H) as `q_norm` and `k_norm` of q's and k's heads.
        scale_attn_norm, scale_mlp_norm: False; timm's block has no such norms either.
        proj_drop, attn_drop: dropout behind the activation, and of the probabilities; in [0, 1).
        init_values: LayerScale's, None for none.
        drop_path: the probability that a sample's branches are dropped, both together, in [0, 1].
        act_layer: a class, or a name as in `Mlp`; with one that the ops do not know, the submodules run one by one.
        norm_layer: a class or partial, "layernorm" or "rmsnorm".
        mlp_layer, attn_layer, depth: not used, as in timm.
        fuse_out_proj: one layer out of both, `out_proj`, in place of `attn_out_proj` and `mlp_out_proj`.
        device, dtype: of the parameters.
    """

    __module__ = "fastvit.layers"

    def __init__(
        self, dim: int, num_heads: int, mlp_ratio: float = 4.0, qkv_bias: bool = False, qk_norm: bool = False,
        scale_attn_norm: bool = False, scale_mlp_norm: bool = False, proj_bias: bool = True, proj_drop: float = 0.0,
        attn_drop: float = 0.0, init_values: float | None = None, drop_path: float = 0.0,
        act_layer: str | ActLayer = "gelu", norm_layer: str | NormLayer = LayerNorm, mlp_layer: Any = None,
        attn_layer: Any = None, depth: int = 0, fuse_out_proj: bool = False,
        device: Device = None, dtype: Dtype = None,
    ) -> None:  # fmt: skip
        super().__init__()
        check_heads("dim", dim, num_heads)
        check_hidden("dim", dim, mlp_ratio)
        check_flags(qkv_bias=qkv_bias, qk_norm=qk_norm, proj_bias=proj_bias, fuse_out_proj=fuse_out_proj)
        check_left_out(scale_attn_norm=scale_attn_norm, scale_mlp_norm=scale_mlp_norm)
        check_init_values(init_values)
        check_rates(proj_drop=proj_drop, attn_drop=attn_drop)
        check_number("drop_path", drop_path, lambda p: 0.0 <= p <= 1.0, "in [0, 1]")
        check_factory(device, dtype)
        norm = by_name("norm_layer", norm_layer, NORM_LAYERS)
        act = by_name("act_layer", act_layer, ACT_LAYERS)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        hidden = int(dim * mlp_ratio)
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = self.head_dim**-0.5
        self.in_split = [hidden, dim, dim, dim]
        self.in_norm = norm(dim, **factory)
        self.in_proj = nn.Linear(dim, sum(self.in_split), bias=qkv_bias, **factory)
        self.mlp_bias = None if qkv_bias else nn.Parameter(torch.empty(hidden, **factory))
        self.q_norm, self.k_norm = (norm(self.head_dim, **factory) if qk_norm else nn.Identity() for _ in range(2))
        self.attn_drop = nn.Dropout(attn_drop)
        self.mlp_drop = nn.Dropout(proj_drop)
        self.mlp_act = act()

        def out_of(width: int, wanted: bool) -> Any:
            return nn.Linear(width, dim, bias=proj_bias, **factory) if wanted else None

        self.out_proj = out_of(dim + hidden, fuse_out_proj)
        self.attn_out_proj = out_of(dim, not fuse_out_proj)
        self.mlp_out_proj = out_of(hidden, not fuse_out_proj)
        self.ls = nn.Identity() if init_values is None else LayerScale(dim, init_values, device, dtype)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.mlp_bias is not None:
            nn.init.zeros_(self.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        block = read_or_none(read_parallel.read_block, self)
        if block is not None:
            return read_parallel.run_block(x, block)
        hidden, *qkv = self.in_proj(self.in_norm(x)).split(self.in_split, dim=-1)
        q, k, v = (t.unflatten(-1, (self.num_heads, self.head_dim)) for t in qkv)
        attended = attend(self, self.q_norm(q), self.k_norm(k), v).flatten(2)
        hidden = self.mlp_drop(self.mlp_act(hidden if self.mlp_bias is None else hidden + self.mlp_bias))
        if self.out_proj is not None:
            both = self.out_proj(torch.cat((attended, hidden), dim=-1))
        else:
            both = self.attn_out_proj(attended) + self.mlp_out_proj(hidden)
        return x + self.drop_path(self.ls(both))


def check_left_out(**flags: Any) -> None:
    """What wants a branch with layers of its own."""
    check_flags(**flags)
    for name, on in flags.items():
        if on:
            raise ValueError(f"{name} must be False for a ParallelScalingBlock, got {on!r}")
