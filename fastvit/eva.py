"""The Vision Transformer of EVA's blocks: timm's argument names, attributes and state_dict keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastvit.eva_layers import EvaBlock, EvaBlockPostNorm
from fastvit.modules.arguments import (
    Pair,
    by_name,
    check_choice,
    check_flags,
    check_integers,
    check_number,
    check_rates,
)
from fastvit.modules.norms import NORM_LAYERS, NormLayer
from fastvit.rope import RotaryEmbeddingCat, RotaryEmbeddingDinoV3, RotaryEmbeddingMixed
from fastvit.vit import VisionTransformer

__all__ = ["Eva"]

# What `VisionTransformer` makes a block with, and EvaBlock has no use for
_NOT_OF_A_BLOCK = ("proj_bias", "scale_attn_norm", "scale_mlp_norm", "mlp_layer", "attn_layer", "depth")


class Eva(VisionTransformer):
    """EVA (Fang et al. 2022, arXiv:2211.07636), EVA-02 (2023, arXiv:2303.11331), DINOv3 (Simeoni et al. 2025,
    arXiv:2508.10104), Perception Encoder (Bolya et al. 2025, arXiv:2504.13181): image (B, C, H, W) -> logits.

    Args:
        img_size, patch_size, in_chans, num_classes, global_pool, embed_dim, depth, num_heads: as in
            `VisionTransformer`, but patches are averaged by default.
        qkv_bias, qkv_fused, mlp_ratio, swiglu_mlp, swiglu_align_to, scale_mlp, scale_attn_inner, attn_type,
            init_values: of `EvaBlock`.
        norm_layer: a class, or "layernorm" or "rmsnorm".
        num_reg_tokens: registers behind CLS.
        use_abs_pos_emb: learnt positions.
        use_rot_pos_emb: rotary positions, from `rope`, of heads that are rotated by halves if rope_rotate_half.
        rope_type: "cat" for `RotaryEmbeddingCat`, "dinov3" for `RotaryEmbeddingDinoV3`, "mixed" for
            `RotaryEmbeddingMixed`, whose heads are not rotated by halves.
        rope_temperature, rope_grid_indexing, rope_grid_offset (not of "mixed"), ref_feat_shape (of "cat"),
            rope_shift_coords, rope_jitter_coords, rope_rescale_coords (of "dinov3"): of these.
        use_post_norm: blocks are `EvaBlockPostNorm`, with the norm at the end of each branch.
        use_pre_transformer_norm: a norm before the blocks, and no bias in the patch embedding.
        use_fc_norm: a norm behind the pooling; None for one where patches are averaged.
        use_post_transformer_norm: a norm behind the blocks; None for one where use_fc_norm has none.
        head_init_scale: what the head's initial weights are multiplied with.
        patch_drop_rate: as in `VisionTransformer`; 0 with rotary positions, whose tables all samples share.
        qk_norm: of `EvaBlock`.
        options: of `VisionTransformer`: class_token, no_embed_class, attn_pool_num_heads, attn_pool_mlp_ratio,
            dynamic_img_size, dynamic_img_pad, dropout rates, drop_path_rate, mean, std, device, dtype. The pooling
            "map" attends to CLS and registers too, as timm's Eva, unless pool_include_prefix is False.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is allowed, before a parameter is made.
    """

    def __init__(
        self, img_size: Pair = 224, patch_size: Pair = 16, in_chans: int = 3, num_classes: int = 1000,
        global_pool: str = "avg", embed_dim: int = 768, depth: int = 12, num_heads: int = 12, *,
        qkv_bias: bool = True, qkv_fused: bool = True, mlp_ratio: float = 4.0, swiglu_mlp: bool = False,
        swiglu_align_to: int = 0, scale_mlp: bool = False, scale_attn_inner: bool = False, attn_type: str = "eva",
        norm_layer: str | NormLayer = "layernorm", init_values: float | None = None, num_reg_tokens: int = 0,
        class_token: bool = True, use_abs_pos_emb: bool = True, use_rot_pos_emb: bool = False, rope_type: str = "cat",
        rope_temperature: float = 10000.0, rope_grid_offset: float = 0.0, rope_grid_indexing: str = "ij",
        rope_rotate_half: bool = False, ref_feat_shape: Pair | None = None, rope_shift_coords: float | None = None,
        rope_jitter_coords: float | None = None, rope_rescale_coords: float | None = None,
        use_post_norm: bool = False, use_pre_transformer_norm: bool = False, use_fc_norm: bool | None = None,
        use_post_transformer_norm: bool | None = None, patch_drop_rate: float = 0.0, head_init_scale: float = 0.001,
        qk_norm: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        check_integers(1, embed_dim=embed_dim, num_heads=num_heads)
        check_integers(0, num_reg_tokens=num_reg_tokens, swiglu_align_to=swiglu_align_to)
        check_choice("rope_type", rope_type, ("cat", "dinov3", "mixed"))
        if rope_type == "mixed" and rope_rotate_half:
            raise ValueError("rope_rotate_half must be False for rope_type 'mixed', got True")
        check_flags(
            qkv_fused=qkv_fused, swiglu_mlp=swiglu_mlp, scale_mlp=scale_mlp, scale_attn_inner=scale_attn_inner,
            class_token=class_token, use_abs_pos_emb=use_abs_pos_emb, use_rot_pos_emb=use_rot_pos_emb,
            rope_rotate_half=rope_rotate_half, use_post_norm=use_post_norm,
            use_pre_transformer_norm=use_pre_transformer_norm, use_fc_norm=use_fc_norm or False,
            use_post_transformer_norm=use_post_transformer_norm or False,
        )  # fmt: skip
        check_number("head_init_scale", head_init_scale, lambda s: s >= 0.0, "not negative")
        check_rates(patch_drop_rate=patch_drop_rate)
        if patch_drop_rate and use_rot_pos_emb:
            raise ValueError(
                f"patch_drop_rate must be 0 with use_rot_pos_emb=True, got {patch_drop_rate}: the fused ops rotate "
                "every sample by one table"
            )
        include_prefix = options.get("pool_include_prefix", False)
        if global_pool == "map":
            options = {"pool_include_prefix": True, **options}
        fc_norm = global_pool == "avg" if use_fc_norm is None else use_fc_norm
        final_norm = not fc_norm if use_post_transformer_norm is None else use_post_transformer_norm

        def block(dim: int, num_heads: int, **of_vit: Any) -> EvaBlock:
            of_block = {name: value for name, value in of_vit.items() if name not in _NOT_OF_A_BLOCK}
            return (EvaBlockPostNorm if use_post_norm else EvaBlock)(
                dim, num_heads, qkv_fused=qkv_fused, swiglu_mlp=swiglu_mlp, swiglu_align_to=swiglu_align_to,
                scale_mlp=scale_mlp, scale_attn_inner=scale_attn_inner, attn_type=attn_type,
                num_prefix_tokens=int(class_token) + num_reg_tokens, rotate_half=rope_rotate_half, **of_block,
            )  # fmt: skip

        super().__init__(
            img_size, patch_size, in_chans, num_classes, global_pool, embed_dim, depth, num_heads, mlp_ratio, qkv_bias,
            init_values=init_values, class_token=class_token, reg_tokens=num_reg_tokens,
            pos_embed="learn" if use_abs_pos_emb else "none", pre_norm=use_pre_transformer_norm,
            final_norm=fc_norm or final_norm, fc_norm=fc_norm, norm_layer=norm_layer, block_fn=block, fix_init=True,
            patch_drop_rate=patch_drop_rate, qk_norm=qk_norm, **options,
        )  # fmt: skip
        self._include_prefix_without_map = include_prefix
        factory = {name: options.get(name) for name in ("device", "dtype")}
        if fc_norm and final_norm:
            self.norm = by_name("norm_layer", norm_layer, NORM_LAYERS)(embed_dim, **factory)
        self.head_init_scale = head_init_scale
        self._scale_head()
        self.rope: RotaryEmbeddingCat | RotaryEmbeddingDinoV3 | RotaryEmbeddingMixed | None = None
        if use_rot_pos_emb:
            common = embed_dim // num_heads, rope_temperature
            grid: dict[str, Any] = {"grid_offset": rope_grid_offset, "grid_indexing": rope_grid_indexing}
            if rope_type == "mixed":
                self.rope = RotaryEmbeddingMixed(
                    embed_dim, depth, num_heads, rope_temperature, rope_grid_indexing, **factory
                )
            elif rope_type == "cat":
                self.rope = RotaryEmbeddingCat(
                    *common, ref_feat_shape=ref_feat_shape, rotate_half=rope_rotate_half, **grid
                )
            else:
                self.rope = RotaryEmbeddingDinoV3(
                    *common, rotate_half=rope_rotate_half, shift_coords=rope_shift_coords,
                    jitter_coords=rope_jitter_coords, rescale_coords=rope_rescale_coords, **grid,
                )  # fmt: skip

    @torch.no_grad()
    def init_weights(self, mode: str = "", needs_reset: bool = True) -> None:
        """As `VisionTransformer`'s, with tokens and gates as timm's Eva has them."""
        super().init_weights(mode, needs_reset)
        of_timm = (mode or self.weight_init) == ""
        if of_timm:
            for block in self.blocks:  # a gate begins as any other layer, unlike a plain ViT's
                mlp: Any = block.mlp
                for layer in mlp.children():
                    if isinstance(layer, nn.Linear) and layer is not mlp.fc2:
                        nn.init.trunc_normal_(layer.weight, std=0.02)
                        if layer.bias is not None:
                            nn.init.zeros_(layer.bias)
        for token in (self.cls_token, self.reg_token):
            if token is not None:
                nn.init.trunc_normal_(token, std=0.02)
        if of_timm or needs_reset:
            self._scale_head()

    @torch.no_grad()
    def _scale_head(self) -> None:
        if isinstance(self.head, nn.Linear):
            self.head.weight.mul_(self.__dict__.get("head_init_scale", 1.0))

    def _embedded(self, x: Tensor) -> tuple[Any, ...]:
        rope = None if self.rope is None else self.rope.get_embed(self._grid_of(x), x.device)
        return *super()._embedded(x), rope

    def _run_block(self, i: int, x: Tensor, *rest: Any) -> Tensor:
        (rope,) = rest
        return super()._run_block(i, x, rope[i] if isinstance(self.rope, RotaryEmbeddingMixed) else rope)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """As `VisionTransformer`'s. Only the pooling "map" includes CLS and registers by default."""
        super().reset_classifier(num_classes, global_pool)
        if global_pool not in (None, "map"):
            self.pool_include_prefix = self._include_prefix_without_map

    def no_weight_decay(self) -> set[str]:
        mixed = {"rope.freqs"} if isinstance(self.rope, RotaryEmbeddingMixed) else set()
        return super().no_weight_decay() | mixed
