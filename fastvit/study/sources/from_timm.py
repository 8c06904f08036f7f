"""Models of timm."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from fastvit.modules.arguments import checked_pair
from fastvit.study.sources.baselines import as_provider
from fastvit.study.sources.model_source import ModelSource, one_line_errors, patch_size_of
from fastvit.study.sources.normalization import Statistics


class TimmSource(ModelSource):
    """A name of `timm.list_models()`. timm is imported here, where it is installed."""

    origin = "timm"

    def __init__(self, name: str) -> None:
        self._timm: Any = importlib.import_module("timm")
        self._config = self._timm.get_pretrained_cfg(name)
        # convolutions take any size, and their constructors none
        self._any_size = self._config is not None and not self._config.fixed_input_size
        with torch.device("meta"):
            patch = patch_size_of(self._timm.create_model(name))
        size = checked_pair("image_size", tuple(self._config.input_size[1:]) if self._config else 224)
        super().__init__(name, size, patch or (1, 1), patch is not None)

    def make(self, provider: str, image_size: tuple[int, int] | None = None, **options: Any) -> nn.Module:
        if image_size is not None and not self._any_size:
            options["img_size"] = image_size
        with one_line_errors(self.name):
            model: nn.Module = self._timm.create_model(self.name, **options)
        return as_provider(provider, model)

    def normalization(self) -> Statistics:
        return tuple(self._config.mean), tuple(self._config.std)
