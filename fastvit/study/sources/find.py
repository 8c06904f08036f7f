"""Finds the source of a model by its name."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from pathlib import Path

from fastvit import zoo
from fastvit.study.sources.from_function import FunctionSource
from fastvit.study.sources.from_timm import TimmSource
from fastvit.study.sources.from_transformers import TransformersSource
from fastvit.study.sources.from_zoo import ZooSource
from fastvit.study.sources.model_source import ModelSource


def find(name: str, *, without_patches: bool = False) -> ModelSource:
    """Return the source of a model.

    Args:
        name: one of `fastvit.list_models()` or of `timm.list_models()`; a configuration file of transformers
            (`config.json`, or its folder); or `module:function`, where function([image_size=, patch_size=]) returns the
            model.
        without_patches: also take a model without a patch embedding, such as a ResNet.

    Raises:
        ValueError: an unknown name, with the nearest; a configuration or function that makes no model, or, unless
            `without_patches`, none with a patch embedding.
        FileNotFoundError: no such file.
        ImportError: a module, or a library, that is not installed.
    """
    source = _find(name)
    if not (source.has_patches or without_patches):
        raise ValueError(f"{name} has no patch embedding that strides as wide as its kernel: it is no plain ViT")
    return source


def _find(name: str) -> ModelSource:
    if name in zoo.CONFIGS:
        return ZooSource(name)
    if ":" in name:
        return FunctionSource(name)
    if name.endswith(".json") or "/" in name or Path(name).is_dir():
        return TransformersSource(name)
    names, note = list(zoo.CONFIGS), ""
    if importlib.util.find_spec("timm") is not None:
        try:
            timm = importlib.import_module("timm")
        except Exception as error:  # for example with a torchvision that was built for another torch
            note = f" (timm is installed, but its import fails: {error})"
        else:
            if timm.is_model(name):
                return TimmSource(name)
            names += timm.list_models()
    near = difflib.get_close_matches(name, names)
    hint = f"; nearest: {', '.join(dict.fromkeys(near))}" if near else "; `fastvit models` lists them"
    raise ValueError(f"{name!r} is not a known model{hint}{note}")
