"""EVA's attention and block (Fang et al. 2022, arXiv:2211.07636), also used by DINOv3 and the Perception Encoder.

timm's names, arguments and state_dict keys, with fused ops inside as in `fastvit.layers`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastvit import ops
from fastvit.blocks import read_eva, run
from fastvit.blocks.recompute import DEFAULT
from fastvit.blocks.submodules import read_or_none
from fastvit.blocks.unchanged import read_once_or_none
from fastvit.modules.arguments import (
    Device,
    Dtype,
    by_name,
    check_choice,
    check_factory,
    check_heads,
    check_hidden,
    check_init_values,
    check_integers,
    check_number,
    check_rates,
)
from fastvit.modules.mlp import Mlp, SwiGLU, SwiGLUPacked
from fastvit.modules.norms import NORM_LAYERS, LayerNorm, NormLayer
from fastvit.modules.parts import ACT_LAYERS, ActLayer, DropPath, attend, dropped, for_call, mask_arguments


class EvaAttention(nn.Module):
    """Multi-head self-attention with rotary positions, (B, N, D) -> (B, N, D): q and v have biases, k has none.

    Args:
        dim: D.
        num_heads: H, a divisor of D; D / H is a multiple of 8 from 16 to 256.
        qkv_bias: whether q and v have a bias.
        qkv_fused: one layer for q, k and v, whose biases are parameters of their own, or three.
        num_prefix_tokens: tokens before the patches, which have no rotary position.
        attn_drop, proj_drop: dropout of the probabilities, and after the projection; in [0, 1).
        rotate_half: whether heads are rotated by halves, as in DINOv3, or by neighbours.
        device, dtype: of the parameters.
    """

    __module__ = "fastvit.eva_layers"

    def __init__(
        self, dim: int, num_heads: int = 8, qkv_bias: bool = True, qkv_fused: bool = True, num_prefix_tokens: int = 1,
        attn_drop: float = 0.0, proj_drop: float = 0.0, rotate_half: bool = False,
        device: Device = None, dtype: Dtype = None,
    ) -> None:  # fmt: skip
        super().__init__()
        check_heads("dim", dim, num_heads)
        check_integers(0, num_prefix_tokens=num_prefix_tokens)
        check_rates(attn_drop=attn_drop, proj_drop=proj_drop)
        check_factory(device, dtype)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = self.head_dim**-0.5
        self.num_prefix_tokens = num_prefix_tokens
        self.rotate_half = rotate_half
        self._make_projections(dim, qkv_bias, qkv_fused, factory)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim, **factory)
        self.proj_drop = nn.Dropout(proj_drop)

    def _make_projections(self, dim: int, bias: bool, fused: bool, factory: dict[str, Any]) -> None:
        self.q_bias = self.v_bias = None
        if not fused:
            self._make_three(dim, bias, False, factory)
            return
        self.qkv = nn.Linear(dim, 3 * dim, bias=False, **factory)
        if bias:
            self.q_bias = nn.Parameter(torch.zeros(dim, **factory))
            self.v_bias = nn.Parameter(torch.zeros(dim, **factory))

    def reset_parameters(self) -> None:
        for bias in (self.q_bias, self.v_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def _make_three(self, dim: int, bias: bool, k_bias: bool, factory: dict[str, Any]) -> None:
        self.q_proj = nn.Linear(dim, dim, bias=bias, **factory)
        self.k_proj = nn.Linear(dim, dim, bias=k_bias, **factory)
        self.v_proj = nn.Linear(dim, dim, bias=bias, **factory)

    def _heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v, (B, N, H, d) each, by calling the modules one by one."""
        if "q_proj" in self._modules:
            three = [layer(x) for layer in (self.q_proj, self.k_proj, self.v_proj)]
        else:
            qkv = self.qkv(x)
            if self.q_bias is not None and self.v_bias is not None:
                qkv = qkv + torch.cat((self.q_bias, torch.zeros_like(self.q_bias), self.v_bias))
            three = qkv.chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.num_heads, self.head_dim)) for t in three)
        return q, k, v

    def forward(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False,
        *, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Attend.

        Args:
            x: (B, N, D), or (T, D) with cu_seqlens.
            rope: sin and cos side by side, (N - num_prefix_tokens, 2 * D / H), as `fastvit.rope` makes them. With
                cu_seqlens (T, 2 * D / H); prefix tokens have sines of 0 and cosines of 1.
            attn_mask, is_causal, cu_seqlens, max_seqlen: as in `fastvit.layers.Attention`.
        """
        rotary = read_eva.rotary(self, x, rope, cu_seqlens=cu_seqlens)
        attention = read_once_or_none(read_eva.read_attention, self)
        if cu_seqlens is not None or max_seqlen is not None:
            attention = for_call(attention, x, cu_seqlens, max_seqlen, attn_mask, is_causal)
        if attention is not None:
            return run.run_attention(x, attention, rotary, attn_mask, is_causal)
        q, k, v = self._heads(x)
        if rotary is not None:
            q, k = (ops.rotary(t if cu_seqlens is None else t[None], rotary).view(t.shape) for t in (q, k))
        out = attend(self, q, k, v, **mask_arguments(attn_mask, is_causal, cu_seqlens, max_seqlen))
        return self.proj_drop(self.proj(out.flatten(-2)))


class AttentionRope(EvaAttention):
    """`EvaAttention` whose k has a bias too, as Perception Encoder and ROPE-ViT (Heo et al. 2024, arXiv:2403.13298).

    Args:
        dim, num_heads, num_prefix_tokens, attn_drop, proj_drop, rotate_half, device, dtype: as in `EvaAttention`.
        qkv_bias: whether q, k and v have a bias.
        qkv_fused: one layer for q, k and v, or three.
    """

    __module__ = "fastvit.eva_layers"

    def _make_projections(self, dim: int, bias: bool, fused: bool, factory: dict[str, Any]) -> None:
        self.q_bias = self.v_bias = None
        if fused:
            self.qkv = nn.Linear(dim, 3 * dim, bias=bias, **factory)
        else:
            self._make_three(dim, bias, bias, factory)


ATTENTION = {"eva": EvaAttention, "rope": AttentionRope}


class EvaBlock(nn.Module):
    """Pre-norm block with rotary positions, (B, N, D) -> (B, N, D), as two fused halves like `Block`:

        x + drop_path1(gamma_1 * attn(norm1(x), rope))    layer_norm_attention
        x + drop_path2(gamma_2 * mlp(norm2(x)))           layer_norm_mlp

    Args:
        dim, num_heads: D, and H, a divisor of D.
        qkv_bias, qkv_fused, num_prefix_tokens, rotate_half: as in `EvaAttention`.
        mlp_ratio: width of the MLP as a multiple of D, of each half of a gated one.
        swiglu_mlp: a gated MLP: `SwiGLU` with scale_mlp or swiglu_align_to, else `SwiGLUPacked`.
        swiglu_align_to: its width is raised to a multiple of this, if not 0.
        scale_mlp: a norm before the last layer of the MLP; without a gate, that half runs as four ops.
        attn_type: "eva" for `EvaAttention`, "rope" for `AttentionRope`.
        proj_drop, attn_drop: dropout after the projection and both layers of the MLP, and of the probabilities.
        drop_path: the probability that a sample's branch is dropped, in [0, 1].
        init_values: initial value of gamma_1 and gamma_2, None for none.
        act_layer: of an MLP that is not gated: a class, or a name as in `Mlp`.
        norm_layer: a class or partial, "layernorm" or "rmsnorm".
        device, dtype: of the parameters.
    """

    __module__ = "fastvit.eva_layers"
    fastvit_recompute = DEFAULT
    """Says what the backward pass computes again. `fastvit.fit` gives an instance its own."""

    def __init__(
        self, dim: int, num_heads: int, qkv_bias: bool = True, qkv_fused: bool = True, mlp_ratio: float = 4.0,
        swiglu_mlp: bool = False, swiglu_align_to: int = 0, scale_mlp: bool = False,
        num_prefix_tokens: int = 1, attn_type: str = "eva", rotate_half: bool = False, proj_drop: float = 0.0,
        attn_drop: float = 0.0, drop_path: float = 0.0, init_values: float | None = None,
        act_layer: str | ActLayer = "gelu", norm_layer: str | NormLayer = LayerNorm,
        device: Device = None, dtype: Dtype = None,
    ) -> None:  # fmt: skip
        super().__init__()
        check_heads("dim", dim, num_heads)
        check_hidden("dim", dim, mlp_ratio)
        check_choice("attn_type", attn_type, tuple(ATTENTION))
        check_init_values(init_values)
        check_number("drop_path", drop_path, lambda p: 0.0 <= p <= 1.0, "in [0, 1]")
        check_factory(device, dtype)
        act = by_name("act_layer", act_layer, ACT_LAYERS)
        norm = by_name("norm_layer", norm_layer, NORM_LAYERS)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.norm1 = norm(dim, **factory)
        self.attn = ATTENTION[attn_type](
            dim, num_heads, qkv_bias=qkv_bias, qkv_fused=qkv_fused, num_prefix_tokens=num_prefix_tokens,
            attn_drop=attn_drop, proj_drop=proj_drop, rotate_half=rotate_half, **factory,
        )  # fmt: skip
        self.init_values = init_values
        self.gamma_1 = self._gamma(dim, factory)
        self.drop_path1 = DropPath(drop_path) if drop_path else nn.Identity()
        self.norm2 = norm(dim, **factory)
        hidden, inner_norm = int(dim * mlp_ratio), norm if scale_mlp else None
        options: dict[str, Any] = {"norm_layer": inner_norm, "drop": proj_drop, **factory}
        self.mlp: nn.Module
        if not swiglu_mlp:
            self.mlp = Mlp(dim, hidden, act_layer=act, **options)
        elif scale_mlp or swiglu_align_to:
            self.mlp = SwiGLU(dim, hidden, align_to=swiglu_align_to, **options)
        else:
            self.mlp = SwiGLUPacked(dim, 2 * hidden, **options)
        self.gamma_2 = self._gamma(dim, factory)
        self.drop_path2 = DropPath(drop_path) if drop_path else nn.Identity()

    def _gamma(self, dim: int, factory: dict[str, Any]) -> nn.Parameter | None:
        return None if self.init_values is None else nn.Parameter(torch.full((dim,), self.init_values, **factory))

    def reset_parameters(self) -> None:
        for gamma in (self.gamma_1, self.gamma_2):
            if gamma is not None and self.init_values is not None:
                nn.init.constant_(gamma, self.init_values)

    def forward(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False,
        *, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Run the block: (B, N, D) -> (B, N, D), or with cu_seqlens (T, D) -> (T, D).

        Args:
            rope, attn_mask, is_causal, cu_seqlens, max_seqlen: as in `EvaAttention`. Stochastic depth is drawn once a
                sequence.
        """
        block = read_once_or_none(read_eva.read_block, self)
        if cu_seqlens is not None or max_seqlen is not None:
            block = for_call(block, x, cu_seqlens, max_seqlen, attn_mask, is_causal)
        if block is not None:
            rotary = read_eva.rotary(self, x, rope, cu_seqlens=cu_seqlens)
            return run.run_block(x, block, rotary, attn_mask, is_causal, self.fastvit_recompute)
        attended = self.attn(self.norm1(x), rope, **mask_arguments(attn_mask, is_causal, cu_seqlens, max_seqlen))
        x = x + dropped(self.drop_path1, _scaled(attended, self.gamma_1), cu_seqlens)
        half = read_or_none(read_eva.read_mlp_half, self)
        if cu_seqlens is not None:
            half = for_call(half, x, cu_seqlens, max_seqlen)
        if half is not None:
            return run.run_mlp_half(x, half, recompute=self.fastvit_recompute.mlp)
        return x + dropped(self.drop_path2, _scaled(self.mlp(self.norm2(x)), self.gamma_2), cu_seqlens)


def _scaled(x: Tensor, gamma: Tensor | None) -> Tensor:
    return x if gamma is None else gamma * x
