"""Model names and the constructor arguments that they stand for, under timm's names and with timm's defaults.

ViT       Dosovitskiy et al. 2021, arXiv:2010.11929; g and G: Zhai et al. 2022, arXiv:2106.04560
DeiT      Touvron et al. 2021, arXiv:2012.12877; DeiT-III: Touvron et al. 2022, arXiv:2204.07118
DINOv2    Oquab et al. 2023, arXiv:2304.07193; registers: Darcet et al. 2023, arXiv:2309.16588
CLIP      Radford et al. 2021, arXiv:2103.00020; LAION's: Cherti et al. 2022, arXiv:2212.07143
SigLIP    Zhai et al. 2023, arXiv:2303.15343; the tower with average pooling in place of its attention pooling
CIFAR     ViTs for 32 px images, our own
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable
from functools import partial
from typing import Any

from fastvit import checkpoints
from fastvit._checkpoint_files import check_weights
from fastvit.layers import LayerNorm
from fastvit.vit import VisionTransformer

Config = dict[str, Any]

_SIZES: dict[str, Config] = {
    "tiny": {"embed_dim": 192, "depth": 12, "num_heads": 3},
    "small": {"embed_dim": 384, "depth": 12, "num_heads": 6},
    "medium": {"embed_dim": 512, "depth": 12, "num_heads": 8},
    "base": {"embed_dim": 768, "depth": 12, "num_heads": 12},
    "large": {"embed_dim": 1024, "depth": 24, "num_heads": 16},
    "so400m": {"embed_dim": 1152, "depth": 27, "num_heads": 16, "mlp_ratio": 3.7362},
    "huge": {"embed_dim": 1280, "depth": 32, "num_heads": 16},
    "giant": {"embed_dim": 1408, "depth": 40, "num_heads": 16, "mlp_ratio": 48 / 11},
    "gigantic": {"embed_dim": 1664, "depth": 48, "num_heads": 16, "mlp_ratio": 64 / 13},
}


def _vit(size: str, patch_size: int, img_size: int, num_classes: int = 1000, **more: Any) -> Config:
    return {"img_size": img_size, "patch_size": patch_size, "num_classes": num_classes, **_SIZES[size], **more}


def _dinov2(size: str, **more: Any) -> Config:
    return _vit(size, 14, 518, num_classes=0, init_values=1e-5, **more)


def _clip(size: str, patch_size: int, img_size: int, num_classes: int = 1000, **more: Any) -> Config:
    return _vit(size, patch_size, img_size, num_classes, pre_norm=True, norm_layer=partial(LayerNorm, eps=1e-5), **more)


def _siglip(size: str, patch_size: int, img_size: int, act_layer: str = "gelu") -> Config:
    gap = {"class_token": False, "global_pool": "avg", "fc_norm": False}
    return _vit(size, patch_size, img_size, num_classes=0, act_layer=act_layer, **gap)


def _cifar(embed_dim: int, depth: int, num_heads: int) -> Config:
    size = {"embed_dim": embed_dim, "depth": depth, "num_heads": num_heads}
    return {"img_size": 32, "patch_size": 4, "num_classes": 10, **size, "pos_drop_rate": 0.1, "proj_drop_rate": 0.1}


def _named(name: str, make: Callable[..., Config], *variants: tuple[Any, ...], **more: Any) -> dict[str, Config]:
    """Models of one kind: what fills the gaps of their name is what `make` takes."""
    return {name.format(*variant): make(*variant, **more) for variant in variants}


CONFIGS: dict[str, Config] = {
    **_named(
        "vit_{}_patch{}_{}", _vit,
        ("tiny", 16, 224), ("tiny", 16, 384), ("small", 16, 224), ("small", 16, 384), ("small", 32, 224),
        ("small", 32, 384), ("base", 8, 224), ("base", 16, 224), ("base", 16, 384), ("base", 32, 224),
        ("base", 32, 384), ("large", 14, 224), ("large", 16, 224), ("large", 16, 384), ("large", 32, 384),
        ("giant", 14, 224), ("gigantic", 14, 224),
    ),
    **_named("vit_{}_patch{}_{}", _vit, ("small", 8, 224), ("large", 32, 224), ("huge", 14, 224), num_classes=0),
    **_named("deit_{}_patch{}_{}", _vit, ("tiny", 16, 224), ("small", 16, 224), ("base", 16, 224), ("base", 16, 384)),
    **_named(
        "deit3_{}_patch{}_{}", _vit,
        ("small", 16, 224), ("small", 16, 384), ("medium", 16, 224), ("base", 16, 224), ("base", 16, 384),
        ("large", 16, 224), ("large", 16, 384), ("huge", 14, 224),
        no_embed_class=True, init_values=1e-6,
    ),
    **_named("vit_{}_patch14_dinov2", _dinov2, ("small",), ("base",), ("large",)),
    **_named(
        "vit_{}_patch14_reg4_dinov2", _dinov2, ("small",), ("base",), ("large",), reg_tokens=4, no_embed_class=True
    ),
    **_named(
        "vit_{}_patch{}_clip_{}", _clip,
        ("base", 32, 224), ("base", 16, 224), ("base", 16, 384), ("large", 14, 224), ("large", 14, 336),
        ("huge", 14, 224),
    ),
    "vit_giant_patch14_clip_224": _clip("giant", 14, 224, num_classes=1024),
    "vit_gigantic_patch14_clip_224": _clip("gigantic", 14, 224, num_classes=1280),
    **_named(
        "vit_{}_patch{}_clip_quickgelu_{}", _clip,
        ("base", 32, 224, 512), ("base", 16, 224, 512), ("large", 14, 224, 768), ("large", 14, 336, 768),
        ("huge", 14, 224, 1024),
        act_layer="quick_gelu",
    ),
    **_named(
        "vit_{}_patch{}_siglip_gap_{}", _siglip,
        ("base", 16, 224), ("base", 16, 256), ("base", 16, 384), ("base", 16, 512), ("large", 16, 256),
        ("large", 16, 384), ("so400m", 14, 224), ("so400m", 14, 378),
    ),
    **_named(
        "vit_{}_patch{}_siglip_gap_{}", _siglip, ("so400m", 16, 256), ("so400m", 16, 384), ("so400m", 16, 512),
        act_layer="gelu_tanh",
    ),
    "vit_cifar_small": _cifar(192, 12, 3),
    "vit_cifar_base": _cifar(384, 12, 6),
    "vit_cifar_large": _cifar(512, 24, 8),
}  # fmt: skip


def config(name: str) -> Config:
    """The constructor arguments that a model's name stands for, as a fresh dict.

    Raises:
        ValueError: unknown name; the message has the nearest ones.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be the name of a model, got {name!r}")
    if name not in CONFIGS:
        near = difflib.get_close_matches(name, CONFIGS)
        hint = f"; nearest: {', '.join(near)}" if near else "; list_models() has them all"
        raise ValueError(f"name is not a known model, got {name!r}{hint}")
    return dict(CONFIGS[name])


def create_model(
    name: str, weights: checkpoints.Weights | None = None, *, drop_head: bool = False, **overrides: Any
) -> VisionTransformer:
    """The model of that name, with random weights or with those of a file.

    create_model("vit_base_patch16_224", img_size=384, num_classes=10, drop_path_rate=0.1)
    create_model("vit_base_patch16_224", weights="model.safetensors", num_classes=10, drop_head=True)

    Args:
        weights: a `.safetensors`, `.pth`, `.pt` or `.bin` file, or a state_dict, of timm, torchvision, Hugging Face
            transformers, Meta's DINOv2, OpenAI's CLIP or open_clip; positions are interpolated to `img_size`. No code
            from a file is run.
        drop_head: leave out the file's head (classifier, pooler, attention pooling); the model's own stays untrained.
        overrides: any argument of `VisionTransformer`. A file does not tell the activation and the norms' eps: where
            the weights want others than the name stands for, they are given here (see `fastvit.checkpoints`).

    Raises:
        ValueError: unknown name; the message has the nearest ones.
        TypeError: an override that `VisionTransformer` does not take; a wrong type of name or weights.
        CheckpointError: a ValueError: a damaged file, or one that does not fit, with the list of what does not.
        FileNotFoundError: no such file.
        ImportError: a `.safetensors` file without the package safetensors.
    """
    if weights is not None:
        check_weights(weights)
    elif drop_head:
        raise ValueError("drop_head=True needs weights")
    if "pretrained" in overrides:
        raise TypeError("pretrained is not an argument: weights='model.safetensors' takes those of a file")
    model = VisionTransformer(**{**config(name), **overrides})
    if weights is not None:
        checkpoints.load(model, weights, drop_head=drop_head)
    return model


def list_models(filter: str = "*") -> list[str]:
    """The names that match a shell-style pattern, sorted: list_models("deit3_*_384")."""
    return sorted(fnmatch.filter(CONFIGS, filter))
