"""The pre-norm block, under timm's name, arguments and state_dict keys, and the post-norm block."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fastvit.blocks import read_timm, run
from fastvit.blocks.recompute import DEFAULT
from fastvit.blocks.unchanged import read_once
from fastvit.modules.arguments import Device, Dtype, by_name, check_heads, check_hidden, with_known_arguments
from fastvit.modules.attention import Attention
from fastvit.modules.mlp import GluMlp, Mlp, SwiGLU, SwiGLUPacked
from fastvit.modules.norms import NORM_LAYERS, LayerNorm, NormLayer
from fastvit.modules.parts import (
    ACT_LAYERS,
    ActLayer,
    DropPath,
    LayerFactory,
    LayerScale,
    dropped,
    for_call,
    mask_arguments,
)

MLP_LAYERS: dict[str, LayerFactory] = {"mlp": Mlp, "glumlp": GluMlp, "swiglu": SwiGLU, "swiglupacked": SwiGLUPacked}


@with_known_arguments
class Block(nn.Module):
    """Pre-norm transformer block, (B, N, D) -> (B, N, D), as two fused halves:

        x + drop_path1(ls1(attn(norm1(x))))    layer_norm_attention
        x + drop_path2(ls2(mlp(norm2(x))))     layer_norm_mlp

    In training it saves at most 10 token tensors.

    Args:
        dim, num_heads: D, and H, a divisor of D.
        mlp_ratio: width of the MLP as a multiple of D.
        qkv_bias, proj_bias: biases of the qkv layer, and of the projection and the MLP.
        proj_drop, attn_drop: dropout after the projection and both layers of the MLP, and of the probabilities.
        init_values: initial value of LayerScale; None or 0 for no LayerScale.
        drop_path: the probability that a sample's branch is dropped, in [0, 1].
        act_layer, norm_layer, mlp_layer: classes (or partials), called with timm's arguments, or names; with classes
            that the ops do not know, that half of the block runs its submodules one by one.
        device, dtype: of the parameters.
        qk_norm: norms of q and k, as in `Attention`.
        attn_layer: a class (or partial) with the arguments of `Attention`.
    """

    __module__ = "fastvit.layers"
    fastvit_recompute = DEFAULT
    """Says what the backward pass computes again. `fastvit.fit` gives an instance its own."""
    _read_halves = staticmethod(read_timm.read_halves)
    if TYPE_CHECKING:  # modules here, methods in EvaBlock
        ls1: Callable[[Tensor], Tensor]
        ls2: Callable[[Tensor], Tensor]

    def __init__(
        self, dim: int, num_heads: int, mlp_ratio: float = 4.0, qkv_bias: bool = False, proj_bias: bool = True,
        proj_drop: float = 0.0, attn_drop: float = 0.0, init_values: float | None = None, drop_path: float = 0.0,
        act_layer: str | ActLayer = "gelu", norm_layer: str | NormLayer = LayerNorm,
        device: Device = None, dtype: Dtype = None, *, mlp_layer: str | LayerFactory = Mlp, qk_norm: bool = False,
        attn_layer: LayerFactory = Attention,
    ) -> None:  # fmt: skip
        super().__init__()
        mlp = by_name("mlp_layer", mlp_layer, MLP_LAYERS)
        check_heads("dim", dim, num_heads)
        check_hidden("dim", dim, mlp_ratio)
        act_layer = by_name("act_layer", act_layer, ACT_LAYERS)
        norm = by_name("norm_layer", norm_layer, NORM_LAYERS)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        attn = attn_layer(  # checks the other arguments before it makes the first parameter
            dim, num_heads, qkv_bias=qkv_bias, proj_bias=proj_bias, attn_drop=attn_drop, proj_drop=proj_drop,
            qk_norm=qk_norm, norm_layer=norm, **factory,
        )  # fmt: skip
        self.norm1 = norm(dim, **factory)
        self.attn = attn
        self._add_layer_scale(1, dim, init_values, factory)
        self.drop_path1 = DropPath(drop_path) if drop_path else nn.Identity()
        self.norm2 = norm(dim, **factory)
        self.mlp = mlp(
            in_features=dim, hidden_features=int(dim * mlp_ratio), act_layer=act_layer, bias=proj_bias, drop=proj_drop,
            **factory,
        )  # fmt: skip
        self._add_layer_scale(2, dim, init_values, factory)
        self.drop_path2 = DropPath(drop_path) if drop_path else nn.Identity()

    def _add_layer_scale(self, half: int, dim: int, init_values: float | None, factory: dict[str, Any]) -> None:
        self.add_module(f"ls{half}", LayerScale(dim, init_values, **factory) if init_values else nn.Identity())

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False,
        *, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None, rope: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Run the block: (B, N, D) -> (B, N, D), or with cu_seqlens (T, D) -> (T, D).

        Args:
            attn_mask, is_causal, cu_seqlens, max_seqlen, rope: as in `Attention`. Stochastic depth is drawn once a
                sequence.
        """
        recompute = self.fastvit_recompute
        attention, mlp = read_once(self._read_halves, self)
        if cu_seqlens is not None or max_seqlen is not None:
            attention = for_call(attention, x, cu_seqlens, max_seqlen, attn_mask, is_causal)
        if attention is not None:
            rotary = None if rope is None else read_timm.rotary(self, x, rope, cu_seqlens)
            x = run.run_attention_half(x, attention, rotary, attn_mask, is_causal, recompute.attention)
        else:
            attended = self.attn(self.norm1(x), **mask_arguments(attn_mask, is_causal, cu_seqlens, max_seqlen, rope))
            x = x + dropped(self.drop_path1, self.ls1(attended), cu_seqlens)
            _, mlp = read_once(self._read_halves, self)  # hooks may have changed it
        if cu_seqlens is not None:
            mlp = for_call(mlp, x, cu_seqlens, max_seqlen)
        if mlp is not None:
            return run.run_mlp_half(x, mlp, recompute=recompute.mlp)
        return x + dropped(self.drop_path2, self.ls2(self.mlp(self.norm2(x))), cu_seqlens)


class PostNormBlock(Block):
    """Post-norm transformer block of Vaswani et al. 2017 (arXiv:1706.03762), (B, N, D) -> (B, N, D):

        x = norm1(x + drop_path1(ls1(attn(x))))
        x = norm2(x + drop_path2(ls2(mlp(x))))

    The residual sums are in the epilogues of the projection and of fc2. In training it saves at most 12 token tensors,
    `Block` 10. timm's `ResPostBlock` is another block: x + drop_path1(norm1(attn(x))).

    Args:
        dim, num_heads, mlp_ratio, qkv_bias, proj_bias, proj_drop, attn_drop, init_values, drop_path, act_layer,
            norm_layer, mlp_layer, device, dtype, qk_norm, attn_layer: as in `Block`.
    """

    __module__ = "fastvit.layers"

    def forward(  # type: ignore[override]  # no rope
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False,
        *, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Run the block: (B, N, D) -> (B, N, D), or with cu_seqlens (T, D) -> (T, D).

        Args:
            attn_mask, is_causal, cu_seqlens, max_seqlen: as in `Attention`. Stochastic depth is drawn once a sequence.
        """
        attention, mlp = read_once(read_timm.read_halves, self)
        if cu_seqlens is not None or max_seqlen is not None:
            attention = for_call(attention, x, cu_seqlens, max_seqlen, attn_mask, is_causal)
        if attention is not None:
            x = run.run_attention_then_norm(x, attention, attn_mask, is_causal)
        else:
            attended = self.attn(x, **mask_arguments(attn_mask, is_causal, cu_seqlens, max_seqlen))
            x = self.norm1(x + dropped(self.drop_path1, self.ls1(attended), cu_seqlens))
            _, mlp = read_once(read_timm.read_halves, self)  # hooks may have changed it
        if cu_seqlens is not None:
            mlp = for_call(mlp, x, cu_seqlens, max_seqlen)
        if mlp is not None:
            return run.run_mlp_then_norm(x, mlp)
        return self.norm2(x + dropped(self.drop_path2, self.ls2(self.mlp(x)), cu_seqlens))


BLOCKS: dict[str, LayerFactory] = {"block": Block, "postnorm": PostNormBlock}
