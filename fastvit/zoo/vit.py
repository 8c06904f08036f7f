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

from collections.abc import Callable
from functools import partial
from typing import Any

from fastvit.modules.norms import LayerNorm, RMSNorm

Config = dict[str, Any]

_SIZES: dict[str, Config] = {
    "wee": {"embed_dim": 256, "depth": 14, "num_heads": 4, "mlp_ratio": 5},
    "little": {"embed_dim": 320, "depth": 14, "num_heads": 5, "mlp_ratio": 5.6},
    "tiny": {"embed_dim": 192, "depth": 12, "num_heads": 3},
    "xsmall": {"embed_dim": 256, "depth": 10, "num_heads": 4},
    "small": {"embed_dim": 384, "depth": 12, "num_heads": 6},
    "medium": {"embed_dim": 512, "depth": 12, "num_heads": 8},
    "mediumd": {"embed_dim": 512, "depth": 20, "num_heads": 8},
    "betwixt": {"embed_dim": 640, "depth": 12, "num_heads": 10},
    "base": {"embed_dim": 768, "depth": 12, "num_heads": 12},
    "plus": {"embed_dim": 896, "depth": 12, "num_heads": 14},
    "so150m": {"embed_dim": 896, "depth": 18, "num_heads": 14, "mlp_ratio": 2.572},
    "so150m2": {"embed_dim": 832, "depth": 21, "num_heads": 13, "mlp_ratio": 34 / 13},
    "large": {"embed_dim": 1024, "depth": 24, "num_heads": 16},
    "so400m": {"embed_dim": 1152, "depth": 27, "num_heads": 16, "mlp_ratio": 3.7362},
    "huge": {"embed_dim": 1280, "depth": 32, "num_heads": 16},
    "giantopt": {"embed_dim": 1536, "depth": 40, "num_heads": 16},
    "giant": {"embed_dim": 1408, "depth": 40, "num_heads": 16, "mlp_ratio": 48 / 11},
    "gigantic": {"embed_dim": 1664, "depth": 48, "num_heads": 16, "mlp_ratio": 64 / 13},
}
_AIMV2_SIZES: dict[str, Config] = {  # heads of 128 channels
    "large": {"embed_dim": 1024, "num_heads": 8, "mlp_ratio": 2.75},
    "huge": {"embed_dim": 1536, "num_heads": 12, "mlp_ratio": 2.6667},
    "1b": {"embed_dim": 2048, "num_heads": 16, "mlp_ratio": 2.75},
    "3b": {"embed_dim": 3072, "num_heads": 24, "mlp_ratio": 2.6667},
}
_SWIGLU: Config = {  # DINOv2 giant's
    "num_heads": 24,
    "mlp_ratio": 2 * 4096 / 1536,
    "act_layer": "silu",
    "mlp_layer": "swiglupacked",
}
_TEST_GAP: Config = {"class_token": False, "reg_tokens": 1, "global_pool": "avg", "init_values": 1e-5}


def _vit(size: str, patch_size: int, img_size: int, num_classes: int = 1000, **more: Any) -> Config:
    return {"img_size": img_size, "patch_size": patch_size, "num_classes": num_classes, **_SIZES[size], **more}


def _dinov2(size: str, **more: Any) -> Config:
    return _vit(size, 14, 518, num_classes=0, init_values=1e-5, **more)


def _clip(size: str, patch_size: int, img_size: int, num_classes: int = 1000, **more: Any) -> Config:
    return _vit(size, patch_size, img_size, num_classes, pre_norm=True, norm_layer=partial(LayerNorm, eps=1e-5), **more)


def _gap(size: str, patch_size: int, img_size: int, num_classes: int = 1000, **more: Any) -> Config:
    return _vit(
        size, patch_size, img_size, num_classes, class_token=False, global_pool="avg", **{"fc_norm": False, **more}
    )


def _map(size: str, patch_size: int, img_size: int, num_classes: int = 1000, **more: Any) -> Config:
    return _vit(size, patch_size, img_size, num_classes, class_token=False, global_pool="map", **more)


def _siglip_gap(size: str, patch_size: int, img_size: int, act_layer: str = "gelu") -> Config:
    return _gap(size, patch_size, img_size, num_classes=0, act_layer=act_layer)


def _reg_gap(size: str, reg_tokens: int, img_size: int, **more: Any) -> Config:
    return _gap(size, 16, img_size, reg_tokens=reg_tokens, **more)


def _tips(size: str, **more: Any) -> Config:
    return _vit(size, 14, 448, num_classes=0, init_values=1.0, reg_tokens=1, no_embed_class=True, **more)


def _radio(size: str, version: int, **more: Any) -> Config:
    reg_tokens = {3: 7, 4: 9}[version]
    return _vit(size, 16, 512, num_classes=0, reg_tokens=reg_tokens, no_embed_class=True, final_norm=False, **more)


def _aimv2(size: str, img_size: int) -> Config:
    norm = partial(RMSNorm, eps=1e-5)
    return {
        "img_size": img_size, "patch_size": 14, "num_classes": 0, "depth": 24, **_AIMV2_SIZES[size],
        "class_token": False, "global_pool": "avg", "fc_norm": False, "qkv_bias": False, "proj_bias": False,
        "norm_layer": norm, "embed_norm_layer": norm, "mlp_layer": "swiglu", "act_layer": "silu",
    }  # fmt: skip


def _cifar(embed_dim: int, depth: int, num_heads: int) -> Config:
    size = {"embed_dim": embed_dim, "depth": depth, "num_heads": num_heads}
    rates = dict.fromkeys(("pos_drop_rate", "proj_drop_rate", "attn_drop_rate"), 0.1)
    return {"img_size": 32, "patch_size": 4, "num_classes": 10, **size, **rates, "patch_init": "kaiming"}


def _test(embed_dim: int, depth: int, mlp_ratio: int, **more: Any) -> Config:
    size = {"embed_dim": embed_dim, "depth": depth, "num_heads": embed_dim // 32, "mlp_ratio": mlp_ratio}
    return {"img_size": 160, "patch_size": 16, "num_classes": 1000, **size, **more}


def _named(name: str, make: Callable[..., Config], *variants: tuple[Any, ...], **more: Any) -> dict[str, Config]:
    """Models of one kind: what fills the gaps of their name is what `make` takes."""
    return {name.format(*variant): make(*variant, **more) for variant in variants}


_DEITS = ("tiny", 16, 224), ("small", 16, 224), ("base", 16, 224), ("base", 16, 384)
DISTILLED = _named("deit_{}_distilled_patch{}_{}", _vit, *_DEITS)  # of `VisionTransformerDistilled`
CONFIGS: dict[str, Config] = {
    **_named(
        "vit_{}_patch{}_{}", _vit,
        ("tiny", 16, 224), ("tiny", 16, 384), ("small", 16, 224), ("small", 16, 384), ("small", 32, 224),
        ("small", 32, 384), ("base", 8, 224), ("base", 16, 224), ("base", 16, 384), ("base", 32, 224),
        ("base", 32, 384), ("large", 14, 224), ("large", 16, 224), ("large", 16, 384), ("large", 32, 384),
        ("giant", 14, 224), ("gigantic", 14, 224),
    ),
    **_named("vit_{}_patch{}_{}", _vit, ("small", 8, 224), ("large", 32, 224), ("huge", 14, 224), num_classes=0),
    "vit_base_patch16_224_miil": _vit("base", 16, 224, num_classes=11221, qkv_bias=False),
    "vit_small_patch16_36x1_224": _vit("small", 16, 224, depth=36, init_values=1e-5),
    "vit_base_patch16_plus_240": _vit("plus", 16, 240, init_values=1e-5),
    "vit_base_patch32_plus_256": _vit("plus", 32, 256, init_values=1e-5),
    "vit_intern300m_patch14_448": _vit(
        "large", 14, 448, num_classes=0, init_values=0.1, final_norm=False, dynamic_img_size=True
    ),
    **_named(
        "aimv2_{}_patch14_{}", _aimv2,
        *((size, img_size) for size in _AIMV2_SIZES for img_size in (224, 336, 448)),
    ),
    **_named("eva_{}_patch{}_{}", _vit, ("large", 14, 196), ("large", 14, 336), global_pool="avg"),
    **_named(
        "flexivit_{}", partial(_vit, patch_size=16, img_size=240), ("small",), ("base",), ("large",),
        no_embed_class=True,
    ),
    **_named("deit_{}_patch{}_{}", _vit, *_DEITS),
    **_named(
        "deit3_{}_patch{}_{}", _vit,
        ("small", 16, 224), ("small", 16, 384), ("medium", 16, 224), ("base", 16, 224), ("base", 16, 384),
        ("large", 16, 224), ("large", 16, 384), ("huge", 14, 224),
        no_embed_class=True, init_values=1e-6,
    ),
    **_named(
        "vit_{}_patch{}_gap_{}", _gap, ("medium", 16, 240, 11821), ("medium", 16, 256), ("medium", 16, 384),
        ("betwixt", 16, 256),
        qkv_bias=False, init_values=1e-6,
    ),
    "vit_base_patch16_gap_224": _gap("base", 16, 224, num_heads=16),
    **_named("vit_{}_patch{}_gap_{}", _gap, ("huge", 14, 224, 0), ("huge", 16, 448, 0), ("giant", 16, 224, 0)),
    **_named(
        "vit_{}_patch16_reg{}_gap_{}", _reg_gap,
        ("wee", 1, 256), ("little", 1, 256), ("little", 4, 256), ("medium", 1, 256), ("medium", 4, 256),
        ("mediumd", 4, 256), ("mediumd", 4, 384), ("betwixt", 1, 256), ("betwixt", 4, 256), ("betwixt", 4, 384),
        no_embed_class=True, init_values=1e-5, fc_norm=None,
    ),
    "vit_base_patch16_reg4_gap_256": _reg_gap("base", 4, 256, no_embed_class=True, fc_norm=None),
    **_named("vit_{}_patch16_reg{}_gap_{}", _reg_gap, ("so150m", 4, 256), ("so150m", 4, 384)),
    **_named(
        "vit_{}_patch16_reg{}_gap_{}", _reg_gap, ("so150m2", 1, 256), ("so150m2", 1, 384), ("so150m2", 1, 448),
        qkv_bias=False, init_values=1e-5, fc_norm=None,
    ),
    **_named("vit_{}_patch14_reg1_tipsv2", _tips, ("base",), ("large",), ("so400m",)),
    "vit_giant_patch14_reg1_tipsv2": _tips("giantopt", **_SWIGLU),
    **_named("vit_{}_patch16_radio_v{}", _radio, ("base", 3), ("large", 3), init_values=1e-5),
    **_named("vit_{}_patch16_radio_v{}", _radio, ("huge", 3), ("huge", 4), ("so400m", 4)),
    "vit_giant_patch16_radio_v3": _radio("giantopt", 3, num_heads=24),
    **_named("vit_{}_patch14_dinov2", _dinov2, ("small",), ("base",), ("large",)),
    **_named(
        "vit_{}_patch14_reg4_dinov2", _dinov2, ("small",), ("base",), ("large",), reg_tokens=4, no_embed_class=True
    ),
    "vit_giant_patch14_dinov2": _dinov2("giantopt", **_SWIGLU),
    "vit_giant_patch14_reg4_dinov2": _dinov2("giantopt", reg_tokens=4, no_embed_class=True, **_SWIGLU),
    **_named(
        "vit_{}_patch{}_clip_{}", _clip,
        ("xsmall", 16, 224, 512), ("medium", 16, 224, 512), ("medium", 32, 224, 512), ("betwixt", 32, 224, 512),
        ("base", 32, 224), ("base", 32, 256, 512), ("base", 32, 384), ("base", 32, 448), ("base", 16, 224),
        ("base", 16, 384), ("large", 14, 224), ("large", 14, 336), ("huge", 14, 224), ("huge", 14, 336),
        ("huge", 14, 378, 1024), ("giant", 14, 224, 1024), ("gigantic", 14, 224, 1280), ("gigantic", 14, 378, 1280),
    ),
    "vit_base_patch16_plus_clip_240": _clip("plus", 16, 240, num_classes=640),
    **_named(
        "vit_{}_patch{}_clip_quickgelu_{}", _clip,
        ("base", 32, 224, 512), ("base", 16, 224, 512), ("large", 14, 224, 768), ("large", 14, 336, 768),
        ("huge", 14, 224, 1024), ("huge", 14, 378, 1024), ("gigantic", 14, 224, 1280),
        act_layer="quick_gelu",
    ),
    **_named(
        "vit_{}_patch{}_siglip_gap_{}", _siglip_gap,
        ("base", 16, 224), ("base", 16, 256), ("base", 16, 384), ("base", 16, 512), ("large", 16, 256),
        ("large", 16, 384), ("so400m", 14, 224), ("so400m", 14, 378), ("so400m", 14, 448),
        ("so400m", 14, 896),
    ),
    **_named(
        "vit_{}_patch{}_siglip_gap_{}", _siglip_gap, ("base", 32, 256), ("large", 16, 512), ("so400m", 16, 256),
        ("so400m", 16, 384), ("so400m", 16, 512), ("giantopt", 16, 256), ("giantopt", 16, 384),
        act_layer="gelu_tanh",
    ),
    **_named(
        "vit_{}_patch{}_siglip_{}", partial(_map, num_classes=0),
        ("base", 16, 224), ("base", 16, 256), ("base", 16, 384), ("base", 16, 512), ("large", 16, 256),
        ("large", 16, 384), ("so400m", 14, 224), ("so400m", 14, 378),
    ),
    **_named(
        "vit_{}_patch{}_siglip_{}", partial(_map, num_classes=0), ("base", 32, 256), ("large", 16, 512),
        ("so400m", 16, 256), ("so400m", 16, 384), ("so400m", 16, 512), ("giantopt", 16, 256), ("giantopt", 16, 384),
        act_layer="gelu_tanh",
    ),
    "vit_so150m_patch16_reg4_map_256": _map("so150m", 16, 256, reg_tokens=4),
    "test_vit": _test(64, 6, 3, dynamic_img_size=True),
    "test_vit2": _test(64, 8, 3, dynamic_img_size=True, **_TEST_GAP),
    "test_vit4": _test(96, 9, 3, dynamic_img_size=True, norm_layer="rmsnorm", **_TEST_GAP),
    "vit_cifar_small": _cifar(192, 12, 3),
    "vit_cifar_base": _cifar(384, 12, 6),
    "vit_cifar_large": _cifar(512, 24, 8),
}  # fmt: skip
