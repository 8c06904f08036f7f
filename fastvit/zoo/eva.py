"""Models of `fastvit.eva.Eva` by name, under timm's names and with timm's defaults.

DINOv3    Simeoni et al. 2025, arXiv:2508.10104; qkvb: with the zero biases of q and v that timm keeps as parameters
LingBot   LingBot-Vision 2026, arXiv:2607.05247: DINOv3's shapes
EVA       Fang et al. 2022, arXiv:2211.07636; EVA-02: 2023, arXiv:2303.11331
PE        Perception Encoder, Bolya et al. 2025, arXiv:2504.13181: core, with attention pooling, lang and spatial
ROPE-ViT  Heo et al. 2024, arXiv:2403.13298; those with registers are timm's
"""

from __future__ import annotations

from fastvit.zoo.vit import EPS_5, Config, named

_SWIGLU: Config = {"swiglu_mlp": True, "swiglu_align_to": 8}
_DINOV3: Config = {
    "img_size": 256, "num_classes": 0, "dynamic_img_size": True, "init_values": 1e-5, "num_reg_tokens": 4,
    "use_abs_pos_emb": False, "use_rot_pos_emb": True, "rope_type": "dinov3", "rope_temperature": 100.0,
    "rope_rotate_half": True, "use_fc_norm": False, "norm_layer": EPS_5,
}  # fmt: skip
_LINGBOT: Config = {**_DINOV3, "img_size": 512, "global_pool": "token"}
_EVA02: Config = {
    "patch_size": 14, "mlp_ratio": 4 * 2 / 3, "swiglu_mlp": True, "use_rot_pos_emb": True, "ref_feat_shape": 16,
}  # fmt: skip
_PE: Config = {
    "attn_type": "rope", "use_pre_transformer_norm": True, "use_rot_pos_emb": True, "rope_grid_offset": 1.0,
    "rope_grid_indexing": "xy", "norm_layer": EPS_5,
}  # fmt: skip
_PE_CORE: Config = {**_PE, "global_pool": "map", "attn_pool_num_heads": 8, "attn_pool_mlp_ratio": 4.0}
_PE_DENSE: Config = {
    **_PE, "num_classes": 0, "ref_feat_shape": 32, "use_post_transformer_norm": False, "use_fc_norm": False,
}  # fmt: skip
_GIGANTIC: Config = {"patch_size": 14, "img_size": 448, "class_token": False, "rope_grid_offset": 0.0}
_ROPE: Config = {
    "attn_type": "rope", "init_values": 1e-5, "global_pool": "token", "use_abs_pos_emb": False,
    "use_rot_pos_emb": True, "rope_grid_indexing": "xy", "rope_temperature": 100.0,
}  # fmt: skip
_ROPE_GAP: Config = {
    "img_size": 256, "init_values": 1e-5, "class_token": False, "use_rot_pos_emb": True, "use_abs_pos_emb": False,
    "ref_feat_shape": 16,
}  # fmt: skip
_CORES, _SPATIALS = (f"vit_pe_{kind}_{{size}}_patch{{patch_size}}_{{img_size}}" for kind in ("core", "spatial"))

CONFIGS: dict[str, Config] = {
    **named("vit_{size}_patch16_dinov3", "small base large", **_DINOV3, qkv_bias=False),
    **named("vit_{size}_patch16_dinov3", "small_plus huge_plus", **_DINOV3, **_SWIGLU, qkv_bias=False),
    **named("vit_{size}_patch16_dinov3_qkvb", "tiny small base large", **_DINOV3),
    **named("vit_{size}_patch16_dinov3_qkvb", "small_plus huge_plus", **_DINOV3, **_SWIGLU),
    **named("vit_{size}_patch16_dinov3", "7b", **_DINOV3, qkv_bias=False, swiglu_mlp=True, swiglu_align_to=64),
    **named("vit_{size}_patch16_lingbot", "small base large", **_LINGBOT),
    **named(
        "vit_giant_patch16_lingbot", size="giantopt", **_LINGBOT, **_SWIGLU, num_heads=24, mlp_ratio=4 * 2 / 3,
        qkv_bias=False,
    ),
    **named("eva02_{size}_patch14_{img_size}", "tiny/224/0 tiny/336 small/224/0 small/336", **_EVA02),
    **named(
        "eva02_{size}_patch14_{img_size}", "base/224/0 base/448 large/224/0 large/448", **_EVA02, qkv_fused=False,
        scale_mlp=True,
    ),
    **named("eva_{size}_patch{patch_size}_{img_size}", "giant/14/224 giant/14/336 giant/14/560"),
    **named("eva_{size}_patch{patch_size}_clip_{img_size}", "giant/14/224/1024", global_pool="token"),
    **named(_CORES, "tiny/16/384/512 small/16/384/512 large/14/336/1024", **_PE_CORE, ref_feat_shape=24),
    **named(_CORES, "base/16/224/1024", **_PE_CORE, ref_feat_shape=14),
    **named(
        "vit_pe_core_gigantic_patch14_448", size="pe_gigantic", **_PE_CORE | _GIGANTIC, num_classes=1280,
        ref_feat_shape=32,
    ),
    **named(_SPATIALS, "tiny/16/512 small/16/512 base/16/512 large/14/448", **_PE_DENSE),
    **named("vit_pe_spatial_gigantic_patch14_448", size="pe_gigantic", **_PE_DENSE | _GIGANTIC, init_values=0.1),
    **named("vit_pe_lang_{size}_patch{patch_size}_{img_size}", "large/14/448", **_PE_DENSE, depth=23, init_values=0.1),
    **named(
        "vit_pe_lang_gigantic_patch14_448", size="pe_gigantic", **_PE_DENSE | _GIGANTIC, depth=47, init_values=0.1
    ),
    **named("vit_{size}_patch16_rope_224", "small large", **_ROPE),
    **named("vit_{size}_patch16_rope_224", "base", **_ROPE, use_fc_norm=False),
    **named(
        "vit_{size}_patch16_rope_ape_224", "small base large", **_ROPE | {"use_abs_pos_emb": True}, no_embed_class=True
    ),
    **named("vit_{size}_patch16_rope_reg{num_reg_tokens}_gap_256", "medium/1 betwixt/4 base/1", **_ROPE_GAP),
    **named("vit_{size}_patch16_rope_reg{num_reg_tokens}_gap_256", "mediumd/1", **_ROPE_GAP, qkv_bias=False),
}  # fmt: skip
