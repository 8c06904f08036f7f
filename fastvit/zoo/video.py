"""Encoders of videos (B, C, T, H, W) by name. timm has none of them; the names are made like timm's.

VideoMAE  Tong et al. 2022, arXiv:2203.12602: a ViT with the Transformer's fixed positions and without CLS. Files of the
          pretraining have the last norm before the pooling, those of fine-tuning after it: fc_norm=True.
V-JEPA 2  Assran et al. 2025, arXiv:2506.09985: rotary positions along frames, rows and columns; the encoder without the
          predictor. Its weights take any number of frames: 64 are those of the last phase of training.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]


def _videomae(embed_dim: int, depth: int, num_heads: int) -> Config:
    return {
        "img_size": 224, "patch_size": 16, "num_frames": 16, "tubelet_size": 2, "num_classes": 0,
        "embed_dim": embed_dim, "depth": depth, "num_heads": num_heads, "class_token": False, "pos_embed": "sincos",
        "global_pool": "avg", "fc_norm": False,
    }  # fmt: skip


def _vjepa2(img_size: int, embed_dim: int, depth: int, num_heads: int, **more: Any) -> Config:
    return {
        "img_size": img_size, "patch_size": 16, "num_frames": 64, "tubelet_size": 2, "num_classes": 0,
        "embed_dim": embed_dim, "depth": depth, "num_heads": num_heads, "attn_type": "rope", "class_token": False,
        "use_abs_pos_emb": False, "use_rot_pos_emb": True, "rope_type": "vjepa2", "use_fc_norm": False,
        "dynamic_img_size": True, **more,
    }  # fmt: skip


_GIANT: Config = {"embed_dim": 1408, "depth": 40, "num_heads": 22, "mlp_ratio": 48 / 11}

VIDEOMAE: dict[str, Config] = {
    "videomae_base_patch16_224": _videomae(768, 12, 12),
    "videomae_large_patch16_224": _videomae(1024, 24, 16),
}
VJEPA2: dict[str, Config] = {
    "vjepa2_large_patch16_256": _vjepa2(256, 1024, 24, 16),
    "vjepa2_huge_patch16_256": _vjepa2(256, 1280, 32, 16),
    "vjepa2_giant_patch16_256": _vjepa2(256, **_GIANT),
    "vjepa2_giant_patch16_384": _vjepa2(384, **_GIANT),
}
