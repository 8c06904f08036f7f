"""Pool tokens into one vector: the poolings of `VisionTransformer` by name, and the learnt one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastvit.blocks import read, read_timm, run, spec
from fastvit.blocks.spec import HalfSpec
from fastvit.blocks.submodules import read_or_none, submodules
from fastvit.modules.arguments import Device, Dtype, by_name, check_choice, check_factory, check_hidden, check_integers
from fastvit.modules.attention import cross_attend
from fastvit.modules.mlp import Mlp
from fastvit.modules.norms import NORM_LAYERS, LayerNorm, NormLayer
from fastvit.modules.parts import ACT_LAYERS, ActLayer

POOLS = ("", "avg", "avgmax", "max", "token", "map")


def check_pool(name: str, pool: Any, class_token: bool) -> None:
    check_choice(name, pool, POOLS)
    if pool == "token" and not class_token:
        raise ValueError(f"{name} 'token' needs class_token=True; 'avg', 'max', 'avgmax', 'map' and '' do not")


def check_pool_size(heads_name: str, num_heads: Any, ratio_name: str, mlp_ratio: Any, dim_name: str, dim: int) -> None:
    """Check the sizes of an `AttentionPoolLatent`, whose heads may have any width."""
    check_integers(1, **{heads_name: num_heads})
    if dim % num_heads:
        raise ValueError(f"{heads_name} must be a divisor of {dim_name} = {dim}, got {num_heads}")
    check_hidden(dim_name, dim, mlp_ratio, ratio_name)


def pool_tokens(x: Tensor, global_pool: str) -> Tensor:
    """Pool (B, N, D) -> (B, D) by "avg", "max" or "avgmax"."""
    if global_pool == "avg":
        return x.mean(dim=1)
    if global_pool == "max":
        return x.amax(dim=1)
    return 0.5 * (x.amax(dim=1) + x.mean(dim=1))


class AttentionPoolLatent(nn.Module):
    """Pooling by one learnt query (Lee et al. 2019, arXiv:1810.00825; Zhai et al. 2022, arXiv:2106.04560, section 3.2;
    SigLIP, arXiv:2303.15343), (B, N, D) -> (B, D): timm's names and state_dict keys.

        y = proj(softmax(q(latent) k(x)^T / sqrt(d)) v(x))
        y + mlp(norm(y))    layer_norm_mlp

    A hook on `attn_drop` receives the probabilities (B, H, 1, N).

    Args:
        in_features: D.
        num_heads: H, a divisor of D. Where D / H is no multiple of 8 from 16 to 256, attention runs as plain PyTorch.
        mlp_ratio: width of the MLP as a multiple of D.
        qkv_bias: whether `q` and `kv` have one.
        norm_layer, act_layer: classes or partials, or names as in `Mlp`.
        device, dtype: of the parameters.
    """

    def __init__(
        self, in_features: int, num_heads: int = 8, mlp_ratio: float = 4.0, qkv_bias: bool = True,
        norm_layer: str | NormLayer = LayerNorm, act_layer: str | ActLayer = "gelu",
        device: Device = None, dtype: Dtype = None,
    ) -> None:  # fmt: skip
        super().__init__()
        D = in_features
        check_integers(1, in_features=D)
        check_pool_size("num_heads", num_heads, "mlp_ratio", mlp_ratio, "in_features", D)
        check_factory(device, dtype)
        norm = by_name("norm_layer", norm_layer, NORM_LAYERS)
        act = by_name("act_layer", act_layer, ACT_LAYERS)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.num_heads = num_heads
        self.scale = (D // num_heads) ** -0.5
        self.latent = nn.Parameter(torch.empty(1, 1, D, **factory))
        self.q = nn.Linear(D, D, bias=qkv_bias, **factory)
        self.kv = nn.Linear(D, 2 * D, bias=qkv_bias, **factory)
        self.attn_drop = nn.Dropout(0.0)
        self.proj = nn.Linear(D, D, **factory)
        self.norm = norm(D, **factory)
        self.mlp = Mlp(D, int(D * mlp_ratio), act_layer=act, **factory)
        self.init_weights()

    def init_weights(self) -> None:
        std = self.latent.shape[-1] ** -0.5
        nn.init.trunc_normal_(self.latent, std=std, a=-2 * std, b=2 * std)

    reset_parameters = init_weights

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """Pool x (B, N, D). attn_mask: broadcastable to (B, H, 1, N), or None, as in `fastvit.Attention`; a mask of
        padding (B, N) is passed as `mask[:, None, None, :]`."""
        y = self.proj(cross_attend(self, self.latent, x, attn_mask))
        mlp = read_or_none(_read_mlp_half, self)
        y = run.run_mlp_half(y, mlp) if mlp is not None else y + self.mlp(self.norm(y))
        return y[:, 0]


def _read_mlp_half(pool: Any) -> HalfSpec[spec.MlpSpec]:
    mlp, norm = submodules(pool, mlp=read.MLP, norm=read.NORM)
    return HalfSpec(read_timm.read_mlp(mlp), read.read_norm(norm))
