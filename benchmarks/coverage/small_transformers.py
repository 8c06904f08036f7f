"""Every vision class of transformers, small, from its own default configuration.

A vision class has a `forward` that starts with images or takes a grid of patches, and needs no text. Its configuration
must mention heads: convolutional networks have no attention.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.coverage import small_exceptions
from benchmarks.harness.libraries import load

WIDTH, HEADS, HIDDEN, LABELS = 96, 4, 128, 5
_IMAGES = ("pixel_values", "pixel_values_videos", "image", "flattened_patches")
_INDICES = re.compile(r"(ind(ices|exes)|hook_ids)$|^insert_layer_id$")
_LAYERS = re.compile(r"(^|_)((hidden_|encoder_|decoder_|global_|spatial_|temporal_|key_value_)?layers|depth)$")
_HEADS = re.compile(r"(^|_)(attention_)?heads$")
_WIDTHS = re.compile(r"(_size|_sizes|_dim|_channels|_width|_features|d_model)$|^(width|dim)$")
_NO_WIDTHS = re.compile(
    r"image|crop|vocab|patch|window|kernel|position|temporal|merge|chunk|max_|pool|pos_|tubelet|x4_|keypoint|descriptor"
)
_QUERIES = ("num_queries", "two_stage_num_proposals", "num_detection_tokens", "num_query_tokens")


def classes() -> Iterator[tuple[str, type]]:
    """Yield name and class, by model."""
    transformers = load("transformers")
    folder = Path(transformers.__file__).parent
    for path in sorted(folder.glob("models/*/modeling_*.py")):
        if not any(word in path.read_text() for word in _IMAGES):
            continue
        name = ".".join(("transformers", *path.relative_to(folder).with_suffix("").parts))
        module = importlib.import_module(name)
        for kind in list(vars(module).values()):
            own = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel) and kind.__module__ == name
            if own and kind.__name__ not in _TIMM and _is_vision(kind):
                yield kind.__name__, kind


_TIMM = ("TimmBackbone", "TimmWrapperModel", "TimmWrapperForImageClassification")  # timm's models are checked as timm's


def _is_vision(kind: Any) -> bool:
    names = list(inspect.signature(kind.forward).parameters)[1:]
    if kind.config_class is None or not names or any("input_ids" in name for name in names):
        return False
    return (names[0] in _IMAGES or "grid_thw" in names) and "head" in str(kind.config_class().to_dict())


def build(kind: Any, *, narrow: bool = True) -> nn.Module:
    return kind(small_config(kind, narrow=narrow))


def small_config(kind: Any, *, narrow: bool = True) -> Any:
    """Return a small configuration. narrow: reduce the width too, and not only depth and image size."""
    options = shrink(kind.config_class().to_dict(), narrow) | small_exceptions.OPTIONS.get(kind.__name__, {})
    return kind.config_class(**options)


# ---- configurations ----


def shrink(config: dict[str, Any], narrow: bool = True) -> dict[str, Any]:
    """Return the changes of a configuration, nested ones included, for few layers, channels and patches."""
    lists = [value for key, value in config.items() if _INDICES.search(key) and isinstance(value, list | tuple)]
    layers = max(2, *(len(set(value)) for value in lists)) if lists else 2
    changed: dict[str, Any] = {}
    for key, value in config.items():
        if not _follows(key, config) and (new := _smaller(key, value, config, layers, narrow)) != value:
            changed[key] = new
    if "id2label" in config:
        changed["num_labels"] = LABELS
    return changed


def _follows(key: str, config: dict[str, Any]) -> bool:
    """Return whether a backbone derives this entry from its depth and `out_indices`."""
    return key in ("stage_names", "out_features") and "out_indices" in config


def _smaller(key: str, value: Any, config: dict[str, Any], layers: int, narrow: bool) -> Any:
    if isinstance(value, dict):
        if "model_type" not in value or key == "text_config":
            return value
        kept = {name: item for name, item in value.items() if not _follows(name, value)}
        return kept | shrink(value, narrow)
    if isinstance(value, list | tuple):
        return _smaller_list(key, list(value), config, layers, narrow)
    if "drop" in key and isinstance(value, float):
        return 0.0
    if key == "backbone" and value == "resnet50":
        return "resnet10t"
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if _LAYERS.search(key):
        return min(value, layers)
    if key in ("image_size", "pretrain_image_size", "crop_size"):
        return _image_size(config)
    if key in ("num_frames", "frames_per_clip"):
        return 4
    if key in _QUERIES:
        return min(value, 8)
    return _narrower(key, value, config) if narrow else value


def _narrower(key: str, value: int, config: dict[str, Any]) -> int:
    if key == "window_size" and 2 < value < 64:  # of patches, not of pixels
        return 4 if "depths" in config else 2
    if _HEADS.search(key):
        return HEADS
    if key == "head_dim":
        return WIDTH // HEADS
    if not _WIDTHS.search(key) or _NO_WIDTHS.search(key) or value < 64:
        return value
    if isinstance(config.get("num_heads"), list | tuple) and key == "embed_dim":
        return value // 2
    return HIDDEN if re.search("intermediate|ffn|mlp|feedforward", key) else WIDTH


def _smaller_list(key: str, value: list[Any], config: dict[str, Any], layers: int, narrow: bool) -> Any:
    old = next((config[name] for name in config if _LAYERS.search(name) and isinstance(config[name], int)), None)
    if _INDICES.search(key) and value and old and all(isinstance(item, int) and item >= 0 for item in value):
        first = layers - len(set(value)) + (max(value) == old)
        ranks = {item: first + rank for rank, item in enumerate(sorted(set(value)))}
        return [ranks[item] for item in value]
    if key == "image_size":
        return [_image_size(config)] * len(value)
    if key == "backbone_feature_sizes":
        return [[16, 16], [8, 8], [4, 4]]
    if "drop" in key:
        return [0.0] * len(value)
    if narrow and key == "num_key_value_heads_per_layer":
        return [HEADS] * layers
    if old and len(value) == old:
        return value[:layers]
    if key in ("depths", "depth", "blocks_per_stage"):
        return [2] + [1] * (len(value) - 1)
    if narrow and key == "decoder_in_channels":
        return [WIDTH] * len(value)
    if narrow and key == "downsample_channels":
        return [*value[:-1], WIDTH]
    heads = config.get("num_attention_heads")
    if narrow and key == "hidden_sizes" and isinstance(heads, list | tuple) and len(heads) == len(value):
        return [16 * number for number in heads]
    return value


def _image_size(config: dict[str, Any]) -> int:
    """Return four patches a side, or 64 pixels for networks with stages or without patches."""
    patch = config.get("patch_size")
    patch = patch[-1] if isinstance(patch, list | tuple) else patch
    if (
        isinstance(config.get("depth"), list | tuple)
        or "depths" in config
        or "hidden_sizes" in config
        or not isinstance(patch, int)
    ):
        return 64
    return 4 * patch


# ---- inputs ----


def inputs(model: Any, batch: int = 2) -> dict[str, Tensor]:
    """Return the arguments of `forward`: images, and what else it needs."""
    parameters = inspect.signature(type(model).forward).parameters
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    name = type(model).__name__
    if name in small_exceptions.INPUTS:
        return small_exceptions.inputs(name, model.config, normal)
    first = next(key for key in parameters if key != "self")
    config = _vision(model.config)
    channels, size = getattr(config, "num_channels", 3) or 3, _side(config)
    if "grid_thw" in parameters:
        patch, times = config.patch_size, getattr(config, "temporal_patch_size", 1)
        grid = torch.tensor([[1, 4, 4]] * batch)
        found = {first: normal(16 * batch, channels * times * patch * patch), "grid_thw": grid}
        return found | ({"merge_sizes": torch.ones(batch, dtype=torch.long)} if "merge_sizes" in parameters else {})
    frames = getattr(config, "num_frames", None) or getattr(config, "frames_per_clip", None)
    if first == "pixel_values_videos" or (frames and "video" in str(model.input_modalities)):
        return {first: normal(batch, frames or 4, channels, size, size)}
    found = {first: normal(batch, channels, size, size)}
    if "noise" in parameters and isinstance(config.patch_size, int):  # its random masking, fixed
        found["noise"] = torch.rand(batch, (size // config.patch_size) ** 2, generator=generator)
    return found


def _vision(config: Any) -> Any:
    """Return the configuration, perhaps a nested one, that has the image size."""
    if getattr(config, "image_size", None) is None:
        for name in ("vision_config", "backbone_config", "encoder_config", "image_encoder_config"):
            if getattr(config, name, None) is not None:
                return _vision(getattr(config, name))
    return config


def _side(config: Any) -> int:
    size = getattr(config, "image_size", None) or 64
    return size[0] if isinstance(size, list | tuple) else size
