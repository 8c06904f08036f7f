"""Model names and the constructor arguments that they stand for, under timm's names and with timm's defaults.

ViT       Dosovitskiy et al. 2021, arXiv:2010.11929; g (giant) and G (gigantic): Zhai et al. 2022,
          arXiv:2106.04560
DeiT      Touvron et al. 2021, arXiv:2012.12877, also distilled; DeiT-III: Touvron et al. 2022, arXiv:2204.07118
DINOv2    Oquab et al. 2023, arXiv:2304.07193; registers: Darcet et al. 2023, arXiv:2309.16588
CLIP      Radford et al. 2021, arXiv:2103.00020; LAION's: Cherti et al. 2022, arXiv:2212.07143
SigLIP    Zhai et al. 2023, arXiv:2303.15343, SigLIP 2: Tschannen et al. 2025, arXiv:2502.14786; *_gap_*: the tower with
          average pooling in place of its attention pooling; patch14_*378: the weights of 384 px too, of which 378 count
AIMv2     Fini et al. 2024, arXiv:2411.14402: RMSNorm, gated MLPs, no biases
EVA       Fang et al. 2022, arXiv:2211.07636; FlexiViT: Beyer et al. 2022, arXiv:2212.08013
TIPS v2   Maninis et al. 2024, arXiv:2410.16512; RADIO: Ranzinger et al. 2023, arXiv:2312.06709
SO150M    shape-optimised, Alabdulmohsin et al. 2023, arXiv:2305.13035; the other sizes with registers are timm's
EVA, EVA-02, DINOv3, Perception Encoder, ROPE-ViT: eva.py
CIFAR     ViTs for 32 px images, our own. The write-up that they follow gives 2.7, 11 and 42 M parameters and 40 MFLOPs
          for them; with its own sizes they have 5.4, 21.3 and 75.7 M, and the small one 365 M multiply-adds
          (`fastvit models 'vit_cifar_*'`). Its recipe trains with drop_path_rate=0.1 too, which no name here sets.
test_vit* timm's for tests, a million parameters and less
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from fastvit.modules.norms import LayerNorm, RMSNorm

Config = dict[str, Any]

_SIZE = "embed_dim", "depth", "num_heads", "mlp_ratio"  # the last if it is not 4
_SIZES: dict[str, tuple[float, ...]] = {
    "wee": (256, 14, 4, 5), "little": (320, 14, 5, 5.6), "tiny": (192, 12, 3), "xsmall": (256, 10, 4),
    "small": (384, 12, 6), "small_plus": (384, 12, 6), "medium": (512, 12, 8), "mediumd": (512, 20, 8),
    "betwixt": (640, 12, 10), "base": (768, 12, 12), "plus": (896, 12, 14), "so150m": (896, 18, 14, 2.572),
    "so150m2": (832, 21, 13, 34 / 13), "large": (1024, 24, 16), "so400m": (1152, 27, 16, 3.7362),
    "huge": (1280, 32, 16), "huge_plus": (1280, 32, 20), "giant": (1408, 40, 16, 48 / 11), "giantopt": (1536, 40, 16),
    "gigantic": (1664, 48, 16, 64 / 13), "7b": (4096, 40, 32, 2.0),
    # PE's gigantic, and AIMv2's with heads of 128 channels
    "pe_gigantic": (1536, 50, 16, 8960 / 1536), "aimv2_large": (1024, 24, 8, 2.75),
    "aimv2_huge": (1536, 24, 12, 2.6667), "aimv2_1b": (2048, 24, 16, 2.75), "aimv2_3b": (3072, 24, 24, 2.6667),
    "vit_cifar_small": (192, 12, 3), "vit_cifar_base": (384, 12, 6), "vit_cifar_large": (512, 24, 8),
    "test_vit": (64, 6, 2, 3), "test_vit2": (64, 8, 2, 3), "test_vit4": (96, 9, 3, 3),
}  # fmt: skip


def named(name: str, variants: str = "", size: str = "", **options: Any) -> dict[str, Config]:
    """Return the constructor arguments of models of one kind, by their names.

    Args:
        name: of the models; what is in braces is "size", a key of _SIZES, or an argument that is an integer.
        variants: a word for each model: the values in its name, and then its num_classes if it is not 1000.
        size: of all models, if their names do not have it.
        options: further arguments of all models.
    """
    fields, models = [*re.findall(r"{(\w+)}", name), "num_classes"], {}
    for variant in variants.split() or [""]:
        values = dict(zip(fields, variant.split("/") if variant else [], strict=False))
        sizes = dict(zip(_SIZE, _SIZES[values.get("size", size)], strict=False))
        integers = {field: int(value) for field, value in values.items() if field != "size"}
        models[name.format(**values)] = {**integers, **sizes, **options}
    return models


EPS_5 = partial(LayerNorm, eps=1e-5)
_RMS_NORM = partial(RMSNorm, eps=1e-5)
_SWIGLU: Config = {  # DINOv2 giant's
    "num_heads": 24, "mlp_ratio": 2 * 4096 / 1536, "act_layer": "silu", "mlp_layer": "swiglupacked",
}  # fmt: skip
_CLIP: Config = {"pre_norm": True, "norm_layer": EPS_5}
_AVERAGED: Config = {"class_token": False, "global_pool": "avg"}
_GAP: Config = {**_AVERAGED, "fc_norm": False}
_SIGLIP: Config = {"class_token": False, "global_pool": "map", "num_classes": 0}
_SIGLIP_GAP: Config = {**_GAP, "num_classes": 0}
_DINOV2: Config = {"patch_size": 14, "img_size": 518, "num_classes": 0, "init_values": 1e-5}
_REG4: Config = {"reg_tokens": 4, "no_embed_class": True}
_TIPS: Config = {
    "patch_size": 14, "img_size": 448, "num_classes": 0, "init_values": 1.0, "reg_tokens": 1, "no_embed_class": True,
}  # fmt: skip
_RADIO: Config = {"img_size": 512, "num_classes": 0, "no_embed_class": True, "final_norm": False}
_AIMV2: Config = {
    **_SIGLIP_GAP, "patch_size": 14, "qkv_bias": False, "proj_bias": False, "norm_layer": _RMS_NORM,
    "embed_norm_layer": _RMS_NORM, "mlp_layer": "swiglu", "act_layer": "silu",
}  # fmt: skip
_CIFAR: Config = {
    "img_size": 32, "patch_size": 4, "num_classes": 10, "patch_init": "kaiming",
    **dict.fromkeys(("pos_drop_rate", "proj_drop_rate", "attn_drop_rate"), 0.1),
}  # fmt: skip
_TEST: Config = {"img_size": 160, "dynamic_img_size": True}
_TEST_GAP: Config = {**_TEST, **_AVERAGED, "reg_tokens": 1, "init_values": 1e-5}

_VIT, _GAPS = "vit_{size}_patch{patch_size}_{img_size}", "vit_{size}_patch{patch_size}_gap_{img_size}"
_REGS = "vit_{size}_patch16_reg{reg_tokens}_gap_{img_size}"
_SIGLIPS, _SIGLIP_GAPS = (f"vit_{{size}}_patch{{patch_size}}_{kind}_{{img_size}}" for kind in ("siglip", "siglip_gap"))
_SIGLIP_1 = "base/16/224 base/16/256 base/16/384 base/16/512 large/16/256 large/16/384 so400m/14/224 so400m/14/378"
_SIGLIP_2 = "base/32/256 large/16/512 so400m/16/256 so400m/16/384 so400m/16/512 giantopt/16/256 giantopt/16/384"
_DEITS = "tiny/16/224 small/16/224 base/16/224 base/16/384"

DISTILLED = named("deit_{size}_distilled_patch{patch_size}_{img_size}", _DEITS)  # of `VisionTransformerDistilled`
CONFIGS: dict[str, Config] = {
    **named(
        _VIT,
        "tiny/16/224 tiny/16/384 small/8/224/0 small/16/224 small/16/384 small/32/224 small/32/384 base/8/224 "
        "base/16/224 base/16/384 base/32/224 base/32/384 large/14/224 large/16/224 large/16/384 large/32/224/0 "
        "large/32/384 huge/14/224/0 giant/14/224 gigantic/14/224",
    ),
    **named(_VIT + "_miil", "base/16/224/11221", qkv_bias=False),
    **named("vit_small_patch16_36x1_224", size="small", depth=36, init_values=1e-5),
    **named("vit_base_patch{patch_size}_plus_{img_size}", "16/240 32/256", "plus", init_values=1e-5),
    **named(
        "vit_intern300m_patch{patch_size}_{img_size}", "14/448/0", "large", init_values=0.1, final_norm=False,
        dynamic_img_size=True,
    ),
    **named(
        "{size}_patch14_{img_size}",
        "aimv2_large/224 aimv2_large/336 aimv2_large/448 aimv2_huge/224 aimv2_huge/336 aimv2_huge/448 aimv2_1b/224 "
        "aimv2_1b/336 aimv2_1b/448 aimv2_3b/224 aimv2_3b/336 aimv2_3b/448",
        **_AIMV2,
    ),
    **named("eva_{size}_patch{patch_size}_{img_size}", "large/14/196 large/14/336", global_pool="avg"),
    **named("flexivit_{size}", "small base large", img_size=240, no_embed_class=True),
    **named("deit_{size}_patch{patch_size}_{img_size}", _DEITS),
    **named(
        "deit3_{size}_patch{patch_size}_{img_size}",
        "small/16/224 small/16/384 medium/16/224 base/16/224 base/16/384 large/16/224 large/16/384 huge/14/224",
        no_embed_class=True, init_values=1e-6,
    ),
    **named(
        _GAPS, "medium/16/240/11821 medium/16/256 medium/16/384 betwixt/16/256", **_GAP, qkv_bias=False,
        init_values=1e-6,
    ),
    **named(_GAPS, "base/16/224", **_GAP, num_heads=16),
    **named(_GAPS, "huge/14/224/0 huge/16/448/0 giant/16/224/0", **_GAP),
    **named(
        _REGS,
        "wee/1/256 little/1/256 little/4/256 medium/1/256 medium/4/256 mediumd/4/256 mediumd/4/384 betwixt/1/256 "
        "betwixt/4/256 betwixt/4/384",
        **_AVERAGED, no_embed_class=True, init_values=1e-5,
    ),
    **named(_REGS, "base/4/256", **_AVERAGED, no_embed_class=True),
    **named(_REGS, "so150m/4/256 so150m/4/384", **_GAP),
    **named(_REGS, "so150m2/1/256 so150m2/1/384 so150m2/1/448", **_AVERAGED, qkv_bias=False, init_values=1e-5),
    **named("vit_{size}_patch14_reg1_tipsv2", "base large so400m", **_TIPS),
    **named("vit_giant_patch14_reg1_tipsv2", size="giantopt", **_TIPS | _SWIGLU),
    **named("vit_{size}_patch16_radio_v3", "base large", **_RADIO, reg_tokens=7, init_values=1e-5),
    **named("vit_huge_patch16_radio_v3", size="huge", **_RADIO, reg_tokens=7),
    **named("vit_{size}_patch16_radio_v4", "huge so400m", **_RADIO, reg_tokens=9),
    **named("vit_giant_patch16_radio_v3", size="giantopt", **_RADIO, reg_tokens=7, num_heads=24),
    **named("vit_{size}_patch14_dinov2", "small base large", **_DINOV2),
    **named("vit_{size}_patch14_reg4_dinov2", "small base large", **_DINOV2 | _REG4),
    **named("vit_giant_patch14_dinov2", size="giantopt", **_DINOV2 | _SWIGLU),
    **named("vit_giant_patch14_reg4_dinov2", size="giantopt", **_DINOV2 | _REG4 | _SWIGLU),
    **named(
        "vit_{size}_patch{patch_size}_clip_{img_size}",
        "xsmall/16/224/512 medium/16/224/512 medium/32/224/512 betwixt/32/224/512 base/32/224 base/32/256/512 "
        "base/32/384 base/32/448 base/16/224 base/16/384 large/14/224 large/14/336 huge/14/224 huge/14/336 "
        "huge/14/378/1024 giant/14/224/1024 gigantic/14/224/1280 gigantic/14/378/1280",
        **_CLIP,
    ),
    **named("vit_base_patch{patch_size}_plus_clip_{img_size}", "16/240/640", "plus", **_CLIP),
    **named(
        "vit_{size}_patch{patch_size}_clip_quickgelu_{img_size}",
        "base/32/224/512 base/16/224/512 large/14/224/768 large/14/336/768 huge/14/224/1024 huge/14/378/1024 "
        "gigantic/14/224/1280",
        **_CLIP, act_layer="quick_gelu",
    ),
    **named(_SIGLIP_GAPS, f"{_SIGLIP_1} so400m/14/448 so400m/14/896", **_SIGLIP_GAP),
    **named(_SIGLIP_GAPS, _SIGLIP_2, **_SIGLIP_GAP, act_layer="gelu_tanh"),
    **named(_SIGLIPS, _SIGLIP_1, **_SIGLIP),
    **named(_SIGLIPS, _SIGLIP_2, **_SIGLIP, act_layer="gelu_tanh"),
    **named(
        "vit_{size}_patch16_reg{reg_tokens}_map_{img_size}", "so150m/4/256", class_token=False, global_pool="map"
    ),
    **named("{size}", "test_vit", **_TEST),
    **named("{size}", "test_vit2", **_TEST_GAP),
    **named("{size}", "test_vit4", **_TEST_GAP, norm_layer="rmsnorm"),
    **named("{size}", "vit_cifar_small vit_cifar_base vit_cifar_large", **_CIFAR),
}  # fmt: skip
