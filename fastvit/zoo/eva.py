"""Models of `fastvit.eva.Eva` by name, under timm's names and with timm's defaults.

DINOv3    Simeoni et al. 2025, arXiv:2508.10104; qkvb: with the zero biases of q and v that timm keeps as parameters
LingBot   LingBot-Vision 2026, arXiv:2607.05247: DINOv3's shapes
EVA       Fang et al. 2022, arXiv:2211.07636; EVA-02: 2023, arXiv:2303.11331
PE        Perception Encoder, Bolya et al. 2025, arXiv:2504.13181: core, with attention pooling, lang and spatial
ROPE-ViT  Heo et al. 2024, arXiv:2403.13298; those with registers are timm's
"""

from __future__ import annotations

from functools import partial
from typing import Any

from fastvit.layers import LayerNorm
from fastvit.zoo.vit import Config

_EPS_5 = partial(LayerNorm, eps=1e-5)


def _size(embed_dim: int, depth: int, num_heads: int) -> Config:
    return {"embed_dim": embed_dim, "depth": depth, "num_heads": num_heads}


_TINY, _SMALL, _BASE, _LARGE = _size(192, 12, 3), _size(384, 12, 6), _size(768, 12, 12), _size(1024, 24, 16)
_SWIGLU: Config = {"swiglu_mlp": True, "swiglu_align_to": 8}


def _dinov3(size: Config, **more: Any) -> Config:
    return {
        "img_size": 256, "num_classes": 0, "dynamic_img_size": True, **size, "init_values": 1e-5, "num_reg_tokens": 4,
        "use_abs_pos_emb": False, "use_rot_pos_emb": True, "rope_type": "dinov3", "rope_temperature": 100.0,
        "rope_rotate_half": True, "use_fc_norm": False, "norm_layer": _EPS_5, **more,
    }  # fmt: skip


def _eva02(size: Config, img_size: int, num_classes: int, **more: Any) -> Config:
    return {
        "img_size": img_size, "patch_size": 14, "num_classes": num_classes, **size, "mlp_ratio": 4 * 2 / 3,
        "swiglu_mlp": True, "use_rot_pos_emb": True, "ref_feat_shape": 16, **more,
    }  # fmt: skip


def _eva02_large(size: Config, img_size: int, num_classes: int, **more: Any) -> Config:
    return _eva02(size, img_size, num_classes, qkv_fused=False, scale_mlp=True, **more)


def _pe(size: Config, patch_size: int, img_size: int, **more: Any) -> Config:
    return {
        "img_size": img_size, "patch_size": patch_size, "num_classes": 0, "attn_type": "rope",
        "use_pre_transformer_norm": True, "use_post_transformer_norm": False, "use_fc_norm": False,
        "use_rot_pos_emb": True, "ref_feat_shape": 32, "rope_grid_offset": 1.0, "rope_grid_indexing": "xy",
        "norm_layer": _EPS_5, **size, **more,
    }  # fmt: skip


def _pe_core(size: Config, patch_size: int, img_size: int, num_classes: int, ref_feat_shape: int) -> Config:
    return _pe(
        size, patch_size, img_size, num_classes=num_classes, ref_feat_shape=ref_feat_shape, global_pool="map",
        attn_pool_num_heads=8, attn_pool_mlp_ratio=4.0, use_post_transformer_norm=None, use_fc_norm=None,
    )  # fmt: skip


def _rope(size: Config, **more: Any) -> Config:
    return {
        **size, "attn_type": "rope", "init_values": 1e-5, "global_pool": "token", "use_abs_pos_emb": False,
        "use_rot_pos_emb": True, "rope_grid_indexing": "xy", "rope_temperature": 100.0, **more,
    }  # fmt: skip


def _rope_gap(size: Config, num_reg_tokens: int, **more: Any) -> Config:
    return {
        "img_size": 256, **size, "init_values": 1e-5, "class_token": False, "num_reg_tokens": num_reg_tokens,
        "use_rot_pos_emb": True, "use_abs_pos_emb": False, "ref_feat_shape": 16, **more,
    }  # fmt: skip


_DINOV3: dict[str, tuple[Config, Config]] = {
    "small": (_SMALL, {}),
    "small_plus": (_SMALL, _SWIGLU),
    "base": (_BASE, {}),
    "large": (_LARGE, {}),
    "huge_plus": (_size(1280, 32, 20), _SWIGLU),
}
_GIANT: Config = {"patch_size": 14, **_size(1408, 40, 16), "mlp_ratio": 6144 / 1408}
_PE_GIANT: Config = {**_size(1536, 50, 16), "mlp_ratio": 8960 / 1536, "class_token": False, "rope_grid_offset": 0.0}

CONFIGS: dict[str, Config] = {
    **{f"vit_{name}_patch16_dinov3": _dinov3(size, qkv_bias=False, **mlp) for name, (size, mlp) in _DINOV3.items()},
    **{f"vit_{name}_patch16_dinov3_qkvb": _dinov3(size, **mlp) for name, (size, mlp) in _DINOV3.items()},
    "vit_tiny_patch16_dinov3_qkvb": _dinov3(_TINY),
    "vit_7b_patch16_dinov3": _dinov3(
        _size(4096, 40, 32), qkv_bias=False, mlp_ratio=2.0, swiglu_mlp=True, swiglu_align_to=64
    ),
    **{
        f"vit_{name}_patch16_lingbot": _dinov3(size, img_size=512, global_pool="token")
        for name, size in (("small", _SMALL), ("base", _BASE), ("large", _LARGE))
    },
    "vit_giant_patch16_lingbot": _dinov3(
        _size(1536, 40, 24), img_size=512, global_pool="token", qkv_bias=False, mlp_ratio=4 * 2 / 3, **_SWIGLU
    ),
    "eva02_tiny_patch14_224": _eva02(_TINY, 224, 0),
    "eva02_tiny_patch14_336": _eva02(_TINY, 336, 1000),
    "eva02_small_patch14_224": _eva02(_SMALL, 224, 0),
    "eva02_small_patch14_336": _eva02(_SMALL, 336, 1000),
    "eva02_base_patch14_224": _eva02_large(_BASE, 224, 0),
    "eva02_base_patch14_448": _eva02_large(_BASE, 448, 1000),
    "eva02_large_patch14_224": _eva02_large(_LARGE, 224, 0),
    "eva02_large_patch14_448": _eva02_large(_LARGE, 448, 1000),
    **{f"eva_giant_patch14_{px}": {"img_size": px, **_GIANT} for px in (224, 336, 560)},
    "eva_giant_patch14_clip_224": {"num_classes": 1024, "global_pool": "token", **_GIANT},
    "vit_pe_core_tiny_patch16_384": _pe_core(_TINY, 16, 384, 512, 24),
    "vit_pe_core_small_patch16_384": _pe_core(_SMALL, 16, 384, 512, 24),
    "vit_pe_core_base_patch16_224": _pe_core(_BASE, 16, 224, 1024, 14),
    "vit_pe_core_large_patch14_336": _pe_core(_LARGE, 14, 336, 1024, 24),
    "vit_pe_core_gigantic_patch14_448": _pe_core(_PE_GIANT, 14, 448, 1280, 32),
    "vit_pe_spatial_tiny_patch16_512": _pe(_TINY, 16, 512),
    "vit_pe_spatial_small_patch16_512": _pe(_SMALL, 16, 512),
    "vit_pe_spatial_base_patch16_512": _pe(_BASE, 16, 512),
    "vit_pe_spatial_large_patch14_448": _pe(_LARGE, 14, 448),
    "vit_pe_spatial_gigantic_patch14_448": _pe(_PE_GIANT, 14, 448, init_values=0.1),
    "vit_pe_lang_large_patch14_448": _pe(_size(1024, 23, 16), 14, 448, init_values=0.1),
    "vit_pe_lang_gigantic_patch14_448": _pe({**_PE_GIANT, "depth": 47}, 14, 448, init_values=0.1),
    **{
        f"vit_{name}_patch16_rope_224": _rope(size, **more)
        for name, size, more in (("small", _SMALL, {}), ("base", _BASE, {"use_fc_norm": False}), ("large", _LARGE, {}))
    },
    **{
        f"vit_{name}_patch16_rope_ape_224": _rope(size, no_embed_class=True, use_abs_pos_emb=True)
        for name, size in (("small", _SMALL), ("base", _BASE), ("large", _LARGE))
    },
    "vit_medium_patch16_rope_reg1_gap_256": _rope_gap(_size(512, 12, 8), 1),
    "vit_mediumd_patch16_rope_reg1_gap_256": _rope_gap(_size(512, 20, 8), 1, qkv_bias=False),
    "vit_betwixt_patch16_rope_reg4_gap_256": _rope_gap(_size(640, 12, 10), 4),
    "vit_base_patch16_rope_reg1_gap_256": _rope_gap(_BASE, 1),
}
