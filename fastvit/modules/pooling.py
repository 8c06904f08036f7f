"""Pool tokens into one vector: the poolings of `VisionTransformer` by name, and the learnt one."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from fastvit import ops
from fastvit.blocks import read, run, spec
from fastvit.blocks.read_mlp import read_mlp
from fastvit.blocks.spec import HalfSpec
from fastvit.blocks.submodules import read_or_none, submodules
from fastvit.blocks.unchanged import read_once
from fastvit.modules.arguments import (
    Device,
    Dtype,
    by_name,
    check_choice,
    check_hidden,
    check_integers,
    with_known_arguments,
)
from fastvit.modules.attention import cross_attend
from fastvit.modules.mlp import Mlp
from fastvit.modules.norms import NORM_LAYERS, LayerNorm, NormLayer
from fastvit.modules.packing import patch_bounds
from fastvit.modules.parts import ACT_LAYERS, ActLayer, attend, for_call

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


def pool_sequences(
    x: Tensor, global_pool: str, cu_seqlens: Tensor, max_seqlen: int, num_prefix_tokens: int, num_heads: int
) -> Tensor:
    """Pool the patches of every image of x (T, D) -> (B, D) by "avg", "max" or "avgmax". num_prefix_tokens: of every
    image; num_heads: D / num_heads is a head dimension that attention takes."""
    ends, bounds = patch_bounds(cu_seqlens, num_prefix_tokens)
    pooled = []
    if global_pool != "max":  # a mean is what a query of zeros attends to; a kernel sums within images, without atomics
        heads, device = x.unflatten(-1, (num_heads, -1)), x.device.type
        query = heads.new_zeros(cu_seqlens.shape[0] - 1, *heads.shape[1:])
        # a mean keeps its dtype under autocast, which refuses meta tensors
        with contextlib.nullcontext() if device == "meta" else torch.autocast(device, enabled=False):
            lengths: dict[str, Any] = {"cu_seqlens_k": bounds, "max_seqlen_k": max_seqlen}
            pooled.append(ops.attention_varlen(query, heads, heads, ends, 1, **lengths).flatten(1))
    if global_pool != "avg":
        pooled.append(torch.segment_reduce(x, "max", offsets=bounds.long(), axis=0, unsafe=True)[1::2])
    return pooled[0] if len(pooled) == 1 else 0.5 * (pooled[0] + pooled[1])


@with_known_arguments
class AttentionPoolLatent(nn.Module):
    """Pooling by one learnt query (Lee et al. 2019, arXiv:1810.00825; Zhai et al. 2022, arXiv:2106.04560, section 3.2;
    SigLIP, arXiv:2303.15343), (B, N, D) -> (B, D): timm's names and state_dict keys.

        y = proj(softmax(q(latent) k(x)^T / sqrt(d)) v(x))
        y + mlp(norm(y))    layer_norm_mlp

    A hook on `attn_drop` receives the probabilities (B, H, 1, N), of sequences (1, H, B, T).

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
        check_pool_size("num_heads", num_heads, "mlp_ratio", mlp_ratio, "in_features", D)
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

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None,
        *, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None, num_prefix_tokens: int = 0,
    ) -> Tensor:  # fmt: skip
        """Pool.

        Args:
            x: (B, N, D), or (T, D) with cu_seqlens.
            attn_mask: broadcastable to (B, H, 1, N), or None, as in `fastvit.Attention`; a mask of padding (B, N) is
                passed as `mask[:, None, None, :]`.
            cu_seqlens, max_seqlen: x has the tokens of B sequences, as in `fastvit.Attention`.
            num_prefix_tokens: tokens at the beginning of each sequence that are not pooled; with cu_seqlens only.
        """
        for_call(None, x, cu_seqlens, max_seqlen, attn_mask)
        if cu_seqlens is None:
            y = self.proj(cross_attend(self, self.latent, x, attn_mask))[:, 0]
        else:
            q = self.q(self.latent[0]).unflatten(-1, (self.num_heads, -1)).expand(cu_seqlens.shape[0] - 1, -1, -1)
            k, v = self.kv(x).unflatten(-1, (2, self.num_heads, -1)).unbind(1)
            ends, bounds = patch_bounds(cu_seqlens, num_prefix_tokens)
            y = self.proj(attend(self, q, k, v, None, False, ends, 1, bounds, max_seqlen).flatten(1))
        mlp = read_or_none(read_once, _read_mlp_half, self)
        return run.run_mlp_half(y, mlp) if mlp is not None else y + self.mlp(self.norm(y))


def _read_mlp_half(pool: Any) -> HalfSpec[spec.MlpSpec]:
    mlp, norm = submodules(pool, mlp=read.MLP, norm=read.NORM)
    return HalfSpec(read_mlp(mlp), read.read_norm(norm))
