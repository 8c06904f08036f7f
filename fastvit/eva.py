"""The Vision Transformer of EVA's blocks: timm's argument names, attributes and state_dict keys."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import nn

from fastvit.modules.arguments import Pair, by_name, check_choice, check_integers, with_known_arguments
from fastvit.modules.eva import ATTENTION, EvaBlock
from fastvit.modules.norms import NORM_LAYERS, NormLayer
from fastvit.modules.rope import RotaryEmbeddingCat, RotaryEmbeddingDinoV3
from fastvit.vit import VisionTransformer, init_linear

__all__ = ["Eva"]


@with_known_arguments
class Eva(VisionTransformer):
    """EVA (Fang et al. 2022, arXiv:2211.07636), EVA-02 (2023, arXiv:2303.11331), DINOv3 (Simeoni et al. 2025,
    arXiv:2508.10104), Perception Encoder (Bolya et al. 2025, arXiv:2504.13181): image (B, C, H, W) -> logits.

    Args:
        img_size, patch_size, in_chans, num_classes, global_pool, embed_dim, depth, num_heads: as in
            `VisionTransformer`, but patches are averaged by default, and the pooling "map" attends to CLS and registers
            too, as in timm's Eva.
        qkv_bias, qkv_fused, mlp_ratio, swiglu_mlp, swiglu_align_to, scale_mlp, attn_type, init_values: as in
            `EvaBlock`.
        norm_layer: a class, or "layernorm" or "rmsnorm".
        num_reg_tokens: the number of registers after CLS.
        use_abs_pos_emb: learnt positions.
        use_rot_pos_emb: rotary positions, from `rope`, of heads that are rotated by halves if rope_rotate_half.
        rope_type: "cat" for `RotaryEmbeddingCat`, "dinov3" for `RotaryEmbeddingDinoV3`.
        rope_temperature, rope_grid_offset, rope_grid_indexing, ref_feat_shape (for "cat" only): their arguments.
        use_pre_transformer_norm: a norm before the blocks, and no bias in the patch embedding.
        use_fc_norm: a norm after the pooling; None for one if patches are averaged.
        use_post_transformer_norm: a norm after the blocks; None for one if there is none after the pooling.
        options: further arguments of `VisionTransformer`: class_token, no_embed_class, attn_pool_num_heads,
            attn_pool_mlp_ratio, dynamic_img_size, dropout rates, drop_path_rate, act_layer, mlp_layer (without
            swiglu_mlp), proj_bias, qk_norm, patch_init, mean, std, device, dtype.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is allowed, before a parameter is made.
    """

    def __init__(
        self, img_size: Pair = 224, patch_size: Pair = 16, in_chans: int = 3, num_classes: int = 1000,
        global_pool: str = "avg", embed_dim: int = 768, depth: int = 12, num_heads: int = 12, *,
        qkv_bias: bool = True, qkv_fused: bool = True, mlp_ratio: float = 4.0, swiglu_mlp: bool = False,
        swiglu_align_to: int = 0, scale_mlp: bool = False, attn_type: str = "eva",
        norm_layer: str | NormLayer = "layernorm", init_values: float | None = None, num_reg_tokens: int = 0,
        class_token: bool = True, use_abs_pos_emb: bool = True, use_rot_pos_emb: bool = False, rope_type: str = "cat",
        rope_temperature: float = 10000.0, rope_grid_offset: float = 0.0, rope_grid_indexing: str = "ij",
        rope_rotate_half: bool = False, ref_feat_shape: Pair | None = None, use_pre_transformer_norm: bool = False,
        use_fc_norm: bool | None = None, use_post_transformer_norm: bool | None = None, **options: Any,
    ) -> None:  # fmt: skip
        if "block_fn" in options:
            raise TypeError("Eva takes no block_fn: its blocks are EvaBlocks")
        check_integers(0, num_reg_tokens=num_reg_tokens, swiglu_align_to=swiglu_align_to)
        check_choice("attn_type", attn_type, tuple(ATTENTION))
        check_choice("rope_type", rope_type, ("cat", "dinov3"))
        check_choice("rope_grid_indexing", rope_grid_indexing, ("ij", "xy"))
        fc_norm = global_pool == "avg" if use_fc_norm is None else use_fc_norm
        final_norm = not fc_norm if use_post_transformer_norm is None else use_post_transformer_norm
        block = partial(
            EvaBlock, qkv_fused=qkv_fused, swiglu_mlp=swiglu_mlp, swiglu_align_to=swiglu_align_to, scale_mlp=scale_mlp,
            attn_type=attn_type, rotate_half=rope_rotate_half, num_prefix_tokens=int(class_token) + num_reg_tokens,
        )  # fmt: skip
        super().__init__(
            img_size, patch_size, in_chans, num_classes, global_pool, embed_dim, depth, num_heads, mlp_ratio, qkv_bias,
            init_values=init_values, class_token=class_token, reg_tokens=num_reg_tokens,
            pos_embed="learn" if use_abs_pos_emb else "none", pre_norm=use_pre_transformer_norm,
            final_norm=fc_norm or final_norm, fc_norm=fc_norm, norm_layer=norm_layer, block_fn=block,
            **options,
        )  # fmt: skip
        factory = {name: options.get(name) for name in ("device", "dtype")}
        if fc_norm and final_norm:
            self.norm = by_name("norm_layer", norm_layer, NORM_LAYERS)(embed_dim, **factory)
        if use_rot_pos_emb:
            options = {"grid_offset": rope_grid_offset, "grid_indexing": rope_grid_indexing}
            if rope_type == "cat":
                options["ref_feat_shape"] = ref_feat_shape
            kind = RotaryEmbeddingCat if rope_type == "cat" else RotaryEmbeddingDinoV3
            self.rope = kind(embed_dim // num_heads, rope_temperature, rotate_half=rope_rotate_half, **options)

    @torch.no_grad()
    def init_weights(self, mode: str = "", needs_reset: bool = True) -> None:
        """Initialise as `VisionTransformer.init_weights` does, with tokens, gates, branches and head as timm's Eva."""
        super().init_weights(mode, needs_reset)
        if mode == "":
            for i, block in enumerate(self.blocks):
                for name in ("attn.proj.weight", "mlp.fc2.weight"):
                    block.get_parameter(name).div_(math.sqrt(2.0 * (i + 1)))
                mlp: Any = block.mlp
                for layer in mlp.children():  # a gate begins like any other layer, unlike a plain ViT's
                    if isinstance(layer, nn.Linear) and layer is not mlp.fc2:
                        init_linear(layer)
        for token in (self.cls_token, self.reg_token):
            if token is not None:
                nn.init.trunc_normal_(token, std=0.02)
        if isinstance(self.head, nn.Linear) and (mode == "" or needs_reset):
            self.head.weight.mul_(0.001)

    def _pools_prefix(self) -> bool:
        return self.global_pool == "map"
