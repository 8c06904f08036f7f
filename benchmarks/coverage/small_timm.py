"""Every Vision Transformer of timm and torchvision, small."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.libraries import load

FAMILIES = (
    "vision_transformer", "eva", "beit", "deit", "naflexvit", "vision_transformer_sam", "vision_transformer_relpos",
    "vision_transformer_hybrid", "pit",
)  # fmt: skip
_WIDTH = {"embed_dim": 96, "num_heads": 4}
_OPTIONS: dict[str, dict[str, Any]] = {
    "pit": {"base_dims": (16, 16, 16), "depth": (1, 2, 1), "heads": (2, 4, 8)},
    "vision_transformer_sam": {"depth": 2, "global_attn_indexes": (1,), **_WIDTH},
}


def names() -> Iterator[tuple[str, str]]:
    """Yield family and name of every registered model."""
    timm = load("timm")
    for family in FAMILIES:
        for name in timm.list_models(module=family):
            yield family, name


def build(family: str, name: str) -> nn.Module:
    """Build a model with two blocks of 96 channels and four heads, on four patches a side; wider if it has no such
    options."""
    narrow = _OPTIONS.get(family, {"depth": 2, **_WIDTH}) | ({"num_kv_heads": 2} if "sapiens2" in name else {})
    size = {"img_size": 4 * _patch(name)} if family != "naflexvit" else {}
    wide = {key: value for key, value in narrow.items() if key not in _WIDTH}
    errors: list[Exception] = []
    for options in (narrow | size, wide | size, size):
        try:
            return load("timm").create_model(name, num_classes=10, **options)
        except (TypeError, ValueError, AssertionError, RuntimeError) as error:
            errors.append(error)
    raise errors[0]


def _patch(name: str) -> int:
    """Return the patch size in a model's name, or 16."""
    found = re.search(r"(?:patch|_p|_s)(\d+)(?:_|$)", name)
    return int(found.group(1)) if found else 16


def inputs(name: str) -> dict[str, Tensor]:
    return _images(4 * _patch(name))


def _images(side: int) -> dict[str, Tensor]:
    return {"x": torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1))}


# ---- torchvision ----


TORCHVISION = (
    "vit_b_16", "vit_b_32", "vit_l_16", "vit_l_32", "vit_h_14", "swin_t", "swin_s", "swin_b", "swin_v2_t", "swin_v2_s",
    "swin_v2_b",
)  # fmt: skip


def of_torchvision(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a small model of torchvision, and its inputs."""
    models = load("torchvision").models
    if name.startswith("vit"):
        patch = int(name.rpartition("_")[2])
        size: dict[str, Any] = {"image_size": 4 * patch, "patch_size": patch, "num_layers": 2, "num_heads": 4}
        model = models.VisionTransformer(**size, hidden_dim=96, mlp_dim=128, num_classes=10)
        return model, _images(4 * patch)
    size = {"patch_size": [4, 4], "embed_dim": 32, "depths": [2, 1], "num_heads": [2, 4], "window_size": [4, 4]}
    if "v2" in name:
        swin = models.swin_transformer
        size |= {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2}
    return models.SwinTransformer(**size, stochastic_depth_prob=0.0, num_classes=10), _images(32)
