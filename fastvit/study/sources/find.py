"""Finds the source of a model: by a name of the zoo or of timm, a configuration of transformers, or a function."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastvit import zoo
from fastvit.blocks.hooks import without_hooks
from fastvit.modules.arguments import Pair, checked_pair
from fastvit.study.sources.baselines import as_provider, plain_model
from fastvit.study.sources.model_source import ModelSource, equal_as_int, one_line_errors, patch_size_of
from fastvit.study.sources.normalization import IMAGENET, statistics

_ZOO_DEFAULTS = (("img_size", 224), ("patch_size", 16))  # of all constructors of the zoo


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
        return _from_zoo(name)
    if ":" in name:
        return _from_function(name)
    if name.endswith(".json") or "/" in name or Path(name).is_dir():
        return _from_transformers(name)
    names, note = list(zoo.CONFIGS), ""
    if importlib.util.find_spec("timm") is None:
        note = "; timm, which is not installed, has more: pip install timm"
    else:
        try:
            timm = importlib.import_module("timm")
        except Exception as error:  # for example with a torchvision that was built for another torch
            note = f" (timm is installed, but its import fails: {error}; `fastvit doctor` says why)"
        else:
            if timm.is_model(name):
                return _from_timm(name, timm)
            names += timm.list_models()
    near = zoo.nearest(name, dict.fromkeys(names))
    hint = f"; nearest: {', '.join(near)}" if near else "; `fastvit models` lists them"
    if Path(name).is_file():
        hint = " but a file: the model goes first"
    raise ValueError(f"{name!r} is not a known model{hint}{note}")


def _from_zoo(name: str) -> ModelSource:
    config = zoo.config(name)

    def make(provider: str, **options: Any) -> nn.Module:
        return zoo.create_model(name, **options) if provider == "fastvit" else plain_model(name, provider, **options)

    size, patch = (checked_pair(key, config.get(key, default)) for key, default in _ZOO_DEFAULTS)
    return ModelSource(name, "fastvit", make, size, patch, statistics(name), "img_size")


def _from_timm(name: str, timm: Any) -> ModelSource:
    config = timm.get_pretrained_cfg(name)

    def make(provider: str, **options: Any) -> nn.Module:
        with one_line_errors(name):
            model: nn.Module = timm.create_model(name, **options)
        return as_provider(provider, model)

    with torch.device("meta"):
        patch = patch_size_of(timm.create_model(name))
    size = checked_pair("image_size", tuple(config.input_size[1:]) if config else 224)
    normalization = (tuple(config.mean), tuple(config.std)) if config else IMAGENET
    size_option = "img_size" if config is None or config.fixed_input_size else None  # None: most convolutional models
    return ModelSource(name, "timm", make, size, patch, normalization, size_option)


def _from_transformers(name: str) -> ModelSource:
    """Return the source for a `config.json` of transformers, or the folder that has it.

    Raises:
        ValueError: not JSON, no configuration of transformers, or none of a ViT.
    """
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    try:
        values = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a configuration in JSON: {error}") from None
    if not isinstance(values, dict) or "model_type" not in values:
        raise ValueError(f"{path} is no configuration of transformers: it has no model_type")
    transformers = importlib.import_module("transformers")
    with one_line_errors(path):
        config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    config = getattr(config, "vision_config", config)
    size_option = "crop_size" if config.model_type == "vjepa2" else "image_size"
    size, patch = (getattr(config, key, None) for key in (size_option, "patch_size"))
    if size is None or patch is None:
        raise ValueError(f"{path} describes no ViT: {config.model_type} has no image_size and patch_size")

    def make(provider: str, **options: Any) -> nn.Module:
        with one_line_errors(path):
            sized = type(config).from_dict(config.to_dict())
            for key, value in options.items():
                setattr(sized, key, equal_as_int(value))
            model = transformers.AutoModel.from_config(sized)
        return as_provider(provider, model)

    size, patch = (
        checked_pair(key, tuple(value) if isinstance(value, list) else value)
        for key, value in (("image_size", size), ("patch_size", patch))
    )
    return ModelSource(name, "transformers", make, size, patch, size_option=size_option)


def _from_function(name: str) -> ModelSource:
    """Return the source for `module:function`, where function([image_size=, patch_size=]) returns the model.

    Raises:
        ValueError: no such function, or it returns no nn.Module.
        ImportError: no such module.
    """
    module_name, _, function_name = name.partition(":")
    with one_line_errors(name):
        module = importlib.import_module(module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"{module_name} has no function {function_name!r}")
    takes = inspect.signature(function).parameters
    size_option = "img_size" if "img_size" in takes and "image_size" not in takes else "image_size"  # timm's

    def make(provider: str, **options: Any) -> nn.Module:
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in takes.values())
        if unknown := [key for key in options if key not in takes and not takes_any]:
            raise ValueError(f"{name} takes no {unknown[0]}: its model has one only")
        with one_line_errors(name):
            model = function(**{key: equal_as_int(value) for key, value in options.items()})
        if not isinstance(model, nn.Module):
            raise ValueError(f"{name} must return an nn.Module, got {type(model).__name__}")
        return as_provider(provider, model)

    source = ModelSource(name, "function", make, (1, 1), (1, 1))  # until a model has the function's own sizes
    model = source.on_meta("sdpa")
    size = takes[size_option].default if size_option in takes else None
    size = size if size not in (None, inspect.Parameter.empty) else _image_size_of(model)
    size = checked_pair("image_size", size)
    return ModelSource(name, "function", make, size, patch_size_of(model), size_option=size_option)


def from_module(model: nn.Module) -> ModelSource:
    """Return the source for a module as it is, for studies that need no other size or provider. Its copies have no
    data."""

    def make(provider: str, **options: Any) -> nn.Module:
        known: dict[int, Any] = {}
        # weight_norm and pruning set attributes that are results of ops, which cannot be copied
        attributes = [t for module in model.modules() for t in vars(module).values() if isinstance(t, Tensor)]
        for t in (*model.parameters(), *model.buffers(), *attributes):
            empty = torch.empty_like(t, device="meta")
            known[id(t)] = nn.Parameter(empty, t.requires_grad) if isinstance(t, nn.Parameter) else empty
        with without_hooks(model):
            return copy.deepcopy(model, known)

    size = checked_pair("image_size", _image_size_of(model))
    return ModelSource(type(model).__name__, "module", make, size, patch_size_of(model))


def _image_size_of(model: nn.Module) -> Pair:
    """Return the image size that a module of the model names, or its configuration of transformers, or 224."""
    for module in model.modules():
        for key in ("img_size", "image_size"):
            if isinstance(value := getattr(module, key, None), int | tuple):
                return value
        if isinstance(value := getattr(getattr(module, "config", None), "crop_size", None), int):  # V-JEPA 2
            return value
    return 224
