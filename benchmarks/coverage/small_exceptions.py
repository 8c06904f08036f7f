"""Options and inputs of transformers' vision classes that the rules of coverage/small_transformers.py do not cover."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Normal = Callable[..., Tensor]

_EXCEPTIONS = tomllib.loads(Path(__file__).with_name("small_options.toml").read_text())["exception"]
OPTIONS: dict[str, dict[str, Any]] = {name: row["options"] for row in _EXCEPTIONS for name in row["classes"]}

_GRID = torch.tensor([[1, 4, 4], [1, 4, 4]])  # two images of 4 x 4 patches
_SIZES = _GRID[:, 1:]


def _places(side: int) -> Tensor:
    """Return the row and column of every patch, (2, side * side, 2)."""
    return torch.cartesian_prod(torch.arange(side), torch.arange(side)).expand(2, -1, 2)


def _patches(normal: Normal) -> Tensor:
    """Return patches, each after its row and column."""
    return torch.cat([_places(4).float(), normal(2, 16, 768)], -1)


# A size of a tensor: a number, a name of the configuration, or factors
_Size = int | str | tuple[int | str, ...]
# Arguments of one or several classes: a tensor, a function that makes one, or the shape of random normal numbers
_INPUTS: dict[str, dict[str, tuple[_Size, ...] | Tensor | Callable[[Normal], Tensor]]] = {
    "LightGlueForKeypointMatching SuperGlueForKeypointMatching EfficientLoFTRModel EfficientLoFTRForKeypointMatching": {
        "pixel_values": (1, 2, 3, 64, 64),
    },
    "TimesformerModel TimesformerForVideoClassification": {
        "pixel_values": (1, "num_frames", 3, "image_size", "image_size"),
    },
    "PPOCRV5MobileRecModel PPOCRV5MobileRecForTextRecognition": {"pixel_values": (2, 3, 96, 96)},
    "VideoMAEForPreTraining": {
        "pixel_values": (1, "num_frames", 3, "image_size", "image_size"),
        "bool_masked_pos": torch.arange(32)[None] % 2 == 0,
    },
    "Pix2StructVisionModel Kosmos2_5VisionModel": {"flattened_patches": _patches},
    "Gemma4VisionModel": {"pixel_values": (2, 36, (3, "patch_size", "patch_size")), "pixel_position_ids": _places(6)},
    "MllamaVisionModel": {
        "pixel_values": (2, 1, "max_num_tiles", 3, "image_size", "image_size"),
        "aspect_ratio_ids": torch.ones(2, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(2, 1, 4, dtype=torch.long),
    },
    "Kimi_K25VisionModel": {"pixel_values": (32, 3, "patch_size", "patch_size"), "grid_thw": _GRID},
    "PaddleOCRVisionTransformer PaddleOCRVisionModel": {
        "pixel_values": (1, 32, 3, "patch_size", "patch_size"),
        "grid_thw": _GRID,
    },
    "MiniCPMOcrVisionModel MiniCPMV4_6VisionModel MiniCPMV4_7VisionModel": {
        "pixel_values": (1, 3, "patch_size", (32, "patch_size")),
        "target_sizes": _SIZES,
    },
    "Molmo2VisionModel": {"pixel_values": (2, 16, (3, "patch_size", "patch_size"))},
    "Siglip2VisionModel Siglip2ForImageClassification": {
        "pixel_values": (2, 16, (3, "patch_size", "patch_size")),
        "pixel_attention_mask": torch.ones(2, 16, dtype=torch.long),
        "spatial_shapes": _SIZES,
    },
    "XCLIPVisionModel": {"pixel_values": ((2, "num_frames"), 3, "image_size", "image_size")},
    "SegGptModel SegGptForImageSegmentation": dict.fromkeys(
        ("pixel_values", "prompt_pixel_values", "prompt_masks"), (2, 3, 32, 32)
    ),
    "OneFormerModel OneFormerForUniversalSegmentation": {
        "pixel_values": (2, 3, 64, 64),
        "task_inputs": torch.arange(2 * 77).view(2, 77),
    },
    "MuseGlimmerVisionModel MuseSparkVisionModel": {
        "pixel_values": (32, (3, "patch_temporal", "patch_size", "patch_size")),
        "grid_thw": _GRID,
    },
    "InklingVisionModel": {"pixel_values": (4, 2, "patch_size", "patch_size", 3)},
    "Inkling2VisionModel": {
        "pixel_values": (32, ("patch_size", "spatial_merge_size"), ("patch_size", "spatial_merge_size"), 3),
        "image_grid_thw": _GRID,
    },
    "PeVideoEncoder": {"pixel_values_videos": (1, 2, 3, 64, 64)},
    # one window of the smallest of three scales
    "DepthProModel DepthProForDepthEstimation": {"pixel_values": (2, 3, (4, "patch_size"), (4, "patch_size"))},
}
INPUTS = {name: arguments for names, arguments in _INPUTS.items() for name in names.split()}


def inputs(name: str, config: Any, normal: Normal) -> dict[str, Tensor]:
    """Return the arguments of a class in INPUTS."""
    sizes = getattr(config, "vision_config", config).to_dict()

    def number(size: _Size) -> int:
        factors = size if isinstance(size, tuple) else (size,)
        return math.prod([sizes[factor] if isinstance(factor, str) else factor for factor in factors])

    found = {}
    for argument, value in INPUTS[name].items():
        if isinstance(value, tuple):
            found[argument] = normal(*map(number, value))
        else:
            found[argument] = value.clone() if isinstance(value, Tensor) else value(normal)
    return found
