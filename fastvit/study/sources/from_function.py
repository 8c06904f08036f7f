"""Models that a function of the user's makes."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from torch import nn

from fastvit.modules.arguments import Pair, checked_pair
from fastvit.study.sources.baselines import as_provider
from fastvit.study.sources.model_source import ModelSource, equal_as_int, one_line_errors, patch_size_of


class FunctionSource(ModelSource):
    """`module:function`, where function([image_size=, patch_size=]) returns the model.

    Raises:
        ValueError: no such function, or it returns no nn.Module.
        ImportError: no such module.
    """

    origin = "function"

    def __init__(self, name: str) -> None:
        super().__init__(name, (1, 1), (1, 1))  # until a model was made with the function's own sizes
        module_name, _, function_name = name.partition(":")
        with one_line_errors(name):
            module = importlib.import_module(module_name)
        self._function = getattr(module, function_name, None)
        if not callable(self._function):
            raise ValueError(f"{module_name} has no function {function_name!r}")
        self._takes = inspect.signature(self._function).parameters
        is_timms = "img_size" in self._takes and "image_size" not in self._takes
        self._size_name = "img_size" if is_timms else "image_size"
        model = self.on_meta("sdpa")
        patch = patch_size_of(model)
        size = self._takes[self._size_name].default if self._size_name in self._takes else None
        size = size if size not in (None, inspect.Parameter.empty) else image_size_of(model)
        self.image_size = checked_pair("image_size", size)
        self.patch_size, self.has_patches = patch or (1, 1), patch is not None

    def make(self, provider: str, **options: Any) -> nn.Module:
        assert self._function is not None
        if "image_size" in options:
            options[self._size_name] = options.pop("image_size")
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in self._takes.values())
        if unknown := [key for key in options if key not in self._takes and not takes_any]:
            raise ValueError(f"{self.name} takes no {unknown[0]}: its model has one only")
        with one_line_errors(self.name):
            model = self._function(**{key: equal_as_int(value) for key, value in options.items()})
        if not isinstance(model, nn.Module):
            raise ValueError(f"{self.name} must return an nn.Module, got {type(model).__name__}")
        return as_provider(provider, model)


def image_size_of(model: nn.Module) -> Pair:
    """Return the image size that a module of the model names, or its configuration of transformers, or 224."""
    for module in model.modules():
        for key in ("img_size", "image_size"):
            if isinstance(value := getattr(module, key, None), int | tuple):
                return value
        if isinstance(value := getattr(getattr(module, "config", None), "crop_size", None), int):  # V-JEPA 2
            return value
    return 224
