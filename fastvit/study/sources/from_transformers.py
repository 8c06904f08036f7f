"""Models that a configuration file of transformers describes."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from torch import nn

from fastvit.modules.arguments import checked_pair
from fastvit.study.sources.baselines import as_provider
from fastvit.study.sources.model_source import ModelSource, equal_as_int, one_line_errors


class TransformersSource(ModelSource):
    """A `config.json` of transformers, or the folder that has it.

    Raises:
        ValueError: not JSON, no configuration of transformers, or none of a ViT.
        FileNotFoundError: no such file.
        ImportError: transformers is not installed.
    """

    origin = "transformers"

    def __init__(self, name: str) -> None:
        path = Path(name)
        self._path = path / "config.json" if path.is_dir() else path
        values = _read(self._path)
        self._transformers: Any = importlib.import_module("transformers")
        with one_line_errors(self._path):
            config = self._transformers.AutoConfig.for_model(values.pop("model_type"), **values)
        self._config = config = getattr(config, "vision_config", config)
        self._size_name = "crop_size" if config.model_type == "vjepa2" else "image_size"
        if getattr(config, "patch_size", None) is None or getattr(config, self._size_name, None) is None:
            raise ValueError(f"{self._path} describes no ViT: {config.model_type} has no image_size and patch_size")
        size, patch = (checked_pair(key, _as_pair(getattr(config, key))) for key in (self._size_name, "patch_size"))
        super().__init__(name, size, patch)

    def make(self, provider: str, **options: Any) -> nn.Module:
        with one_line_errors(self._path):
            sized = type(self._config).from_dict(self._config.to_dict())
            for key, value in options.items():
                setattr(sized, self._size_name if key == "image_size" else key, equal_as_int(value))
            model = self._transformers.AutoModel.from_config(sized)
        return as_provider(provider, model)


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a configuration in JSON: {error}") from None
    if not isinstance(values, dict) or "model_type" not in values:
        raise ValueError(f"{path} is no configuration of transformers: it has no model_type")
    return values


def _as_pair(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
