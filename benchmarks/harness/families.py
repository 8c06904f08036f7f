"""Models of other libraries that `fastvit.accelerate` knows, with random weights: small ones, and ViT-B/16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.libraries import load, randomize


@dataclass(frozen=True)
class Architecture:
    """small: arguments that make a model of two blocks for a small image."""

    library: str
    name: str
    build: Callable[..., nn.Module]
    small: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.library}-{self.name}"

    def model(self, *, seed: int = 0) -> nn.Module:
        """Build the model in evaluation mode, with random weights."""
        torch.manual_seed(seed)
        model = self.build(self.name, **self.small).eval()
        randomize(model)
        return model

    def image(self, model: nn.Module, batch: int) -> Tensor:
        """Draw images (B, C, H, W), or videos (B, T, C, H, W) as transformers' models take them."""
        shape = (*frames(model), 3, *image_size(model))
        return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(1))


def image_size(model: Any) -> tuple[int, int]:
    """Return (height, width) as timm, transformers or torchvision stores it."""
    if hasattr(model, "patch_embed"):
        H, W = model.patch_embed.img_size
        return H, W
    config = getattr(model, "config", model)
    size = config.crop_size if hasattr(config, "crop_size") else config.image_size
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def frames(model: Any) -> tuple[int, ...]:
    """Return (T,) for a model of videos, () for one of images."""
    config = getattr(model, "config", None)
    counts = (getattr(config, name, None) for name in ("num_frames", "frames_per_clip"))
    return tuple(count for count in counts if count is not None)


def output(result: Any) -> Tensor:
    """Return the logits; for a headless model all tokens, joined with the pooled ones where they exist."""
    if isinstance(result, Tensor):
        return result
    if isinstance(result, tuple) and not hasattr(result, "last_hidden_state"):
        return torch.cat([t.flatten(1) for t in result], 1)
    if getattr(result, "logits", None) is not None:
        return result.logits
    pooled = getattr(result, "pooler_output", None)
    tokens = result.last_hidden_state
    return tokens if pooled is None else torch.cat([tokens, pooled[:, None]], 1)


def _timm(name: str, **options: Any) -> nn.Module:
    return load("timm").create_model(name, **options)


def _transformers(name: str, **options: Any) -> nn.Module:
    transformers = load("transformers")
    kind = getattr(transformers, name)
    return kind(kind.config_class(**options))


def _torchvision(name: str, **options: Any) -> nn.Module:
    return load("torchvision").models.VisionTransformer(**options)


def _small_transformers(name: str) -> Architecture:
    small = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
    if "Dinov2" not in name:
        small["intermediate_size"] = 160
    if "DINOv3" in name:
        small["num_register_tokens"] = 4
    if name.startswith("VideoMAE"):
        small["num_frames"] = 4
    elif name.startswith("VJEPA2"):
        small = {
            "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 8, "crop_size": 32,
            "frames_per_clip": 4, "pred_num_hidden_layers": 0,  # the predictor's layers are the encoder's
        }  # fmt: skip
    return Architecture("transformers", name, _transformers, small)


def _small_timm(name: str, img_size: int, **more: Any) -> Architecture:
    return Architecture("timm", name, _timm, {"img_size": img_size, "depth": 2, **more})


def _small_torchvision(name: str, patch: int, D: int, heads: int) -> Architecture:
    small = {"image_size": 4 * patch, "patch_size": patch, "num_layers": 2, "num_heads": heads}
    return Architecture("torchvision", name, _torchvision, small | {"hidden_dim": D, "mlp_dim": 2 * D})


ARCHITECTURES = [
    _small_timm("vit_tiny_patch16_224", 64),
    _small_timm("vit_small_patch32_224", 96, drop_path_rate=0.2),
    _small_timm("vit_base_patch16_224", 64),
    _small_timm("vit_base_patch16_clip_quickgelu_224", 64),
    _small_timm("vit_base_patch32_clip_224", 96),
    _small_timm("vit_base_patch16_siglip_gap_224", 64),
    _small_timm("vit_base_patch16_siglip_224", 64),
    _small_timm("vit_so400m_patch14_siglip_224", 56),
    _small_timm("vit_medium_patch16_gap_240", 64),
    _small_timm("vit_huge_patch14_224", 56),
    _small_timm("deit_tiny_patch16_224", 64),
    _small_timm("deit_small_distilled_patch16_224", 64),
    _small_timm("deit3_small_patch16_224", 64),
    _small_timm("vit_small_patch14_dinov2", 70),
    _small_timm("vit_small_patch14_reg4_dinov2", 70),
    _small_timm("vit_small_patch16_rope_224", 64),
    _small_timm("vit_small_patch16_dinov3", 64),
    _small_timm("vit_small_patch16_dinov3_qkvb", 64),
    _small_timm("vit_small_plus_patch16_dinov3", 64),
    _small_timm("eva02_base_patch14_224", 56),
    _small_timm("vit_pe_spatial_tiny_patch16_512", 64),
    _small_timm("eva02_base_patch16_clip_224", 64, embed_dim=192, num_heads=3),
    _small_timm("beit3_base_patch16_224", 64, embed_dim=192, num_heads=3),
    _small_timm("aimv2_large_patch14_224", 56, embed_dim=256, num_heads=2),
    _small_transformers("ViTForImageClassification"),
    _small_transformers("DeiTForImageClassification"),
    _small_transformers("Dinov2Model"),
    _small_transformers("Dinov2WithRegistersModel"),
    _small_transformers("DINOv3ViTModel"),
    _small_transformers("CLIPVisionModel"),
    _small_transformers("SiglipVisionModel"),
    _small_transformers("Aimv2VisionModel"),
    _small_transformers("InternVLVisionModel"),
    _small_transformers("VideoMAEModel"),
    _small_transformers("VJEPA2Model"),
    _small_torchvision("vit_b_16", 16, 192, 3),
    _small_torchvision("vit_b_32", 32, 128, 2),
    _small_torchvision("vit_h_14", 14, 160, 2),
]


VIT_B_16: dict[str, Callable[[int, int], nn.Module]] = {  # of px and depth
    "timm": lambda px, depth: _timm("vit_base_patch16_224", img_size=px, depth=depth),
    "transformers": lambda px, depth: _transformers(
        "ViTForImageClassification", image_size=px, num_hidden_layers=depth, num_labels=1000
    ),
    "torchvision": lambda px, depth: _torchvision(
        "", image_size=px, patch_size=16, num_layers=depth, num_heads=12, hidden_dim=768, mlp_dim=3072
    ),
}
