"""Options and inputs of transformers' vision classes that the rules of coverage/small_transformers.py do not cover."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Inputs = dict[str, Tensor]
Normal = Callable[..., Tensor]
GRID = torch.tensor([[1, 4, 4], [1, 4, 4]])  # two images of 4 x 4 patches

_EXCEPTIONS = tomllib.loads(Path(__file__).with_name("small_options.toml").read_text())["exception"]
OPTIONS: dict[str, dict[str, Any]] = {name: row["options"] for row in _EXCEPTIONS for name in row["classes"]}


def _video(config: Any, normal: Normal) -> Inputs:
    return {"pixel_values": normal(1, config.num_frames, 3, config.image_size, config.image_size)}


def _masked_video(config: Any, normal: Normal) -> Inputs:
    tokens = config.num_frames // config.tubelet_size * (config.image_size // config.patch_size) ** 2
    return _video(config, normal) | {"bool_masked_pos": torch.arange(tokens)[None] % 2 == 0}


def _patches(config: Any, normal: Normal) -> Inputs:
    """Return patches, each after its row and column."""
    places = torch.cartesian_prod(torch.arange(4.0), torch.arange(4.0)).expand(2, 16, 2)
    return {"flattened_patches": torch.cat([places, normal(2, 16, 768)], -1)}


def _positions(config: Any, normal: Normal) -> Inputs:
    places = torch.cartesian_prod(torch.arange(6), torch.arange(6)).expand(2, 36, 2)
    return {"pixel_values": normal(2, 36, 3 * config.patch_size**2), "pixel_position_ids": places}


def _tiles(config: Any, normal: Normal) -> Inputs:
    tiles, side = config.max_num_tiles, config.image_size
    ids, mask = torch.ones(2, 1, dtype=torch.long), torch.ones(2, 1, tiles, dtype=torch.long)
    return {"pixel_values": normal(2, 1, tiles, 3, side, side), "aspect_ratio_ids": ids, "aspect_ratio_mask": mask}


def _flat(config: Any, normal: Normal) -> Inputs:
    return {"pixel_values": normal(2, 16, 3 * config.patch_size**2)}


def _shapes(config: Any, normal: Normal) -> Inputs:
    config = getattr(config, "vision_config", config)
    mask = torch.ones(2, 16, dtype=torch.long)
    return _flat(config, normal) | {"pixel_attention_mask": mask, "spatial_shapes": GRID[:, 1:]}


def _temporal_patches(config: Any, normal: Normal) -> Inputs:
    times = getattr(config, "temporal_patch_size", 0) or getattr(config, "patch_temporal", 1)
    return {"pixel_values": normal(32, 3 * times * config.patch_size**2), "grid_thw": GRID}


def _tokens_of_patches(config: Any, normal: Normal) -> Inputs:
    side = config.patch_size * config.spatial_merge_size
    return {"pixel_values": normal(32, side, side, 3), "image_grid_thw": GRID}


def _batch_of_grids(config: Any, normal: Normal) -> Inputs:
    return {"pixel_values": normal(1, 32, 3, config.patch_size, config.patch_size), "grid_thw": GRID}


def _strip(config: Any, normal: Normal) -> Inputs:
    return {"pixel_values": normal(1, 3, config.patch_size, 32 * config.patch_size), "target_sizes": GRID[:, 1:]}


def _pixels(*shape: int) -> Callable[[Any, Normal], Inputs]:
    return lambda config, normal: {"pixel_values": normal(*shape)}


_PAIR = _pixels(1, 2, 3, 64, 64)
_PROMPTS = ("pixel_values", "prompt_pixel_values", "prompt_masks")
INPUTS: dict[str, Callable[[Any, Normal], Inputs]] = {
    **dict.fromkeys(("LightGlueForKeypointMatching", "SuperGlueForKeypointMatching"), _PAIR),
    **dict.fromkeys(("EfficientLoFTRModel", "EfficientLoFTRForKeypointMatching"), _PAIR),
    **dict.fromkeys(("TimesformerModel", "TimesformerForVideoClassification"), _video),
    **dict.fromkeys(("PPOCRV5MobileRecModel", "PPOCRV5MobileRecForTextRecognition"), _pixels(2, 3, 96, 96)),
    "VideoMAEForPreTraining": _masked_video,
    **dict.fromkeys(("Pix2StructVisionModel", "Kosmos2_5VisionModel"), _patches),
    "Gemma4VisionModel": _positions,
    "MllamaVisionModel": _tiles,
    "Kimi_K25VisionModel": lambda config, normal: {
        "pixel_values": normal(32, 3, config.patch_size, config.patch_size),
        "grid_thw": GRID,
    },
    **dict.fromkeys(("PaddleOCRVisionTransformer", "PaddleOCRVisionModel"), _batch_of_grids),
    **dict.fromkeys(("MiniCPMOcrVisionModel", "MiniCPMV4_6VisionModel", "MiniCPMV4_7VisionModel"), _strip),
    "Molmo2VisionModel": _flat,
    **dict.fromkeys(("Siglip2VisionModel", "Siglip2ForImageClassification"), _shapes),
    "XCLIPVisionModel": lambda config, normal: {
        "pixel_values": normal(2 * config.num_frames, 3, config.image_size, config.image_size)
    },
    **dict.fromkeys(
        ("SegGptModel", "SegGptForImageSegmentation"),
        lambda config, normal: {name: normal(2, 3, 32, 32) for name in _PROMPTS},
    ),
    **dict.fromkeys(
        ("OneFormerModel", "OneFormerForUniversalSegmentation"),
        lambda config, normal: {"pixel_values": normal(2, 3, 64, 64), "task_inputs": torch.arange(2 * 77).view(2, 77)},
    ),
    **dict.fromkeys(("MuseGlimmerVisionModel", "MuseSparkVisionModel"), _temporal_patches),
    "InklingVisionModel": lambda config, normal: {
        "pixel_values": normal(4, 2, config.patch_size, config.patch_size, 3)
    },
    "Inkling2VisionModel": _tokens_of_patches,
    "PeVideoEncoder": lambda config, normal: {"pixel_values_videos": normal(1, 2, 3, 64, 64)},
    **dict.fromkeys(  # one window of the smallest of three scales
        ("DepthProModel", "DepthProForDepthEstimation"),
        lambda config, normal: {"pixel_values": normal(2, 3, 4 * config.patch_size, 4 * config.patch_size)},
    ),
}
