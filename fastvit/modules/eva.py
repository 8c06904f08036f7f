"""EVA's attention and block (Fang et al. 2022, arXiv:2211.07636), also used by DINOv3 and the Perception Encoder."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fastvit.blocks import read_timm
from fastvit.modules.arguments import Device, Dtype, by_name, check_choice, with_known_arguments
from fastvit.modules.attention import Attention
from fastvit.modules.block import MLP_LAYERS, Block
from fastvit.modules.mlp import Mlp, SwiGLU, SwiGLUPacked
from fastvit.modules.norms import NORM_LAYERS, LayerNorm, NormLayer
from fastvit.modules.parts import ActLayer, LayerFactory


@with_known_arguments
class AttentionRope(Attention):
    """`fastvit.layers.Attention` of Perception Encoder and ROPE-ViT (Heo et al. 2024, arXiv:2403.13298).

    Args:
        dim, num_heads, qkv_bias, qkv_fused, num_prefix_tokens, attn_drop, proj_drop, rotate_half, device, dtype: as in
            `fastvit.layers.Attention`.
        options: its further arguments: proj_bias, qk_norm, norm_layer.
    """

    __module__ = "fastvit.layers"
    _k_bias = True

    def __init__(
        self, dim: int, num_heads: int = 8, qkv_bias: bool = True, qkv_fused: bool = True, num_prefix_tokens: int = 1,
        attn_drop: float = 0.0, proj_drop: float = 0.0, rotate_half: bool = False,
        device: Device = None, dtype: Dtype = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            dim, num_heads, qkv_bias, attn_drop=attn_drop, proj_drop=proj_drop, device=device, dtype=dtype,
            qkv_fused=qkv_fused, k_bias=self._k_bias, num_prefix_tokens=num_prefix_tokens, rotate_half=rotate_half,
            **options,
        )  # fmt: skip

    def forward(  # type: ignore[override]
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False,
        *, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Attend as `Attention.forward`, with timm's order of the arguments."""
        return super().forward(x, attn_mask, is_causal, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, rope=rope)


class EvaAttention(AttentionRope):
    """`AttentionRope` whose k has no bias.

    Args:
        dim, num_heads, qkv_bias, qkv_fused, num_prefix_tokens, attn_drop, proj_drop, rotate_half, device, dtype,
            options: as in `AttentionRope`.
    """

    __module__ = "fastvit.layers"
    _k_bias = False


ATTENTION: dict[str, LayerFactory] = {"eva": EvaAttention, "rope": AttentionRope}


@with_known_arguments
class EvaBlock(Block):
    """`Block` with rotary positions, whose LayerScale is two parameters of its own:

        x + drop_path1(gamma_1 * attn(norm1(x), rope))    layer_norm_attention
        x + drop_path2(gamma_2 * mlp(norm2(x)))           layer_norm_mlp

    Args:
        dim, num_heads: D, and H, a divisor of D.
        qkv_bias, qkv_fused, num_prefix_tokens, rotate_half: as in `fastvit.layers.Attention`.
        mlp_ratio: width of the MLP as a multiple of D, of each half of a gated one.
        swiglu_mlp: a gated MLP: `SwiGLU` with scale_mlp or swiglu_align_to, else `SwiGLUPacked`.
        swiglu_align_to: its width is raised to a multiple of this, if not 0.
        scale_mlp: a norm before the last layer of the MLP; without a gate, that half runs as four ops.
        attn_type: "eva" for `EvaAttention`, "rope" for `AttentionRope`.
        proj_drop, attn_drop: dropout after the projection and both layers of the MLP, and of the probabilities.
        drop_path: the probability that a sample's branch is dropped, in [0, 1].
        init_values: initial value of gamma_1 and gamma_2, None for none.
        act_layer, mlp_layer: of an MLP that is not gated: as in `Block`.
        norm_layer: a class or partial, "layernorm" or "rmsnorm".
        device, dtype: of the parameters.
        options: further arguments of `Block`: proj_bias, qk_norm.
    """

    __module__ = "fastvit.layers"
    _read_halves = staticmethod(read_timm.read_eva_halves)

    def __init__(
        self, dim: int, num_heads: int, qkv_bias: bool = True, qkv_fused: bool = True, mlp_ratio: float = 4.0,
        swiglu_mlp: bool = False, swiglu_align_to: int = 0, scale_mlp: bool = False,
        num_prefix_tokens: int = 1, attn_type: str = "eva", rotate_half: bool = False, proj_drop: float = 0.0,
        attn_drop: float = 0.0, drop_path: float = 0.0, init_values: float | None = None,
        act_layer: str | ActLayer = "gelu", norm_layer: str | NormLayer = LayerNorm,
        device: Device = None, dtype: Dtype = None, *, mlp_layer: str | LayerFactory = Mlp, **options: Any,
    ) -> None:  # fmt: skip
        check_choice("attn_type", attn_type, tuple(ATTENTION))
        attn = partial(
            ATTENTION[attn_type], qkv_fused=qkv_fused, num_prefix_tokens=num_prefix_tokens, rotate_half=rotate_half
        )
        plain_mlp = by_name("mlp_layer", mlp_layer, MLP_LAYERS)
        inner_norm = by_name("norm_layer", norm_layer, NORM_LAYERS) if scale_mlp else None

        def mlp(hidden_features: int, act_layer: ActLayer, **others: Any) -> nn.Module:
            if scale_mlp:
                others["norm_layer"] = inner_norm
            if not swiglu_mlp:
                made: nn.Module = plain_mlp(hidden_features=hidden_features, act_layer=act_layer, **others)
                return made
            if scale_mlp or swiglu_align_to:
                return SwiGLU(hidden_features=hidden_features, align_to=swiglu_align_to, **others)
            return SwiGLUPacked(hidden_features=2 * hidden_features, **others)

        super().__init__(
            dim, num_heads, mlp_ratio, qkv_bias, proj_drop=proj_drop, attn_drop=attn_drop, init_values=init_values,
            drop_path=drop_path, act_layer=act_layer, norm_layer=norm_layer, device=device, dtype=dtype,
            mlp_layer=mlp, attn_layer=attn, **options,
        )  # fmt: skip
        self.init_values = init_values

    def _add_layer_scale(self, half: int, dim: int, init_values: float | None, factory: dict[str, Any]) -> None:
        gamma = None if init_values is None else nn.Parameter(torch.full((dim,), init_values, **factory))
        self.register_parameter(f"gamma_{half}", gamma)

    def reset_parameters(self) -> None:
        for gamma in self._parameters.values():
            if gamma is not None and self.init_values is not None:
                nn.init.constant_(gamma, self.init_values)

    def ls1(self, x: Tensor) -> Tensor:
        gamma: Any = self.gamma_1
        return x if gamma is None else gamma * x

    def ls2(self, x: Tensor) -> Tensor:
        gamma: Any = self.gamma_2
        return x if gamma is None else gamma * x

    def forward(  # type: ignore[override]
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False,
        *, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Run the block as `Block.forward`, with timm's order of the arguments."""
        return super().forward(x, attn_mask, is_causal, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, rope=rope)
