"""Where a study's models come from: the zoo, timm, configurations of transformers, anybody's functions."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastvit import integrations, reference, zoo
from fastvit.layers import LayerNorm, RMSNorm
from fastvit.modules.arguments import Pair, checked_pair
from fastvit.reference.eva import Eva as ReferenceEva
from fastvit.reference.eva import SwiGLU, SwiGLUPacked
from fastvit.study.sources import baselines
from fastvit.study.sources.model_source import Subject, embeds_patches, told
from fastvit.zoo.eva import CONFIGS as EVAS

_DEFAULTS = (("img_size", 224), ("patch_size", 16))  # of both constructors of the zoo
# The reference's classes for those that the zoo names
_REFERENCE_NORMS = {LayerNorm: nn.LayerNorm, RMSNorm: reference.RMSNorm}
_REFERENCE_MLPS = {"swiglu": SwiGLU, "swiglupacked": SwiGLUPacked}


class NoFusedForm(ValueError):
    """A model in which fastvit's ops have no block to stand for."""


def find(name: str, *, without_patches: bool = False) -> Subject:
    """The model that a name stands for: one of `fastvit.list_models()`, of timm's, a configuration file of transformers
    (`config.json`, or the folder that has it), or `module:function`, where function([image_size=, patch_size=]) returns
    the model. without_patches: take models without a patch embedding too, such as a ResNet.

    Raises:
        ValueError: an unknown name, with the nearest; a configuration or function that makes no model, or, unless
            `without_patches`, none with a patch embedding.
        FileNotFoundError: no such file.
        ImportError: a module, or a library, that is not installed.
    """
    if name in zoo.CONFIGS:
        return _of_zoo(name)
    if ":" in name:
        return _of_function(name, without_patches)
    if name.endswith(".json") or "/" in name or Path(name).is_dir():
        return _of_configuration(name)
    names, note = list(zoo.CONFIGS), ""
    if importlib.util.find_spec("timm") is not None:
        try:
            timm = importlib.import_module("timm")
        except Exception as error:  # as beside a torchvision of another build
            note = f" (timm is installed, but its import fails: {error})"
        else:
            if timm.is_model(name):
                return _of_timm(name, timm, without_patches)
            names += timm.list_models()
    near = difflib.get_close_matches(name, names)
    hint = f"; nearest: {', '.join(dict.fromkeys(near))}" if near else "; `fastvit models` lists them"
    raise ValueError(f"{name!r} is not a known model{hint}{note}")


def _of_zoo(name: str) -> Subject:
    config = zoo.config(name)

    def make(provider: str, image_size: tuple[int, int] | None = None, **options: Any) -> nn.Module:
        if image_size is not None:
            options["img_size"] = image_size
        if provider == "fused":
            return zoo.create_model(name, **options)
        kind = ReferenceEva if name in EVAS else reference.VisionTransformer
        return _as(provider, kind(**{**reference_arguments(name), **options}))

    size, patch = (checked_pair(key, config.get(key, default)) for key, default in _DEFAULTS)
    return Subject(name, "fastvit", size, patch, make)


def reference_arguments(name: str) -> dict[str, Any]:
    """The arguments that make the plain PyTorch model of a name of the zoo."""
    config = zoo.config(name)
    for key in ("norm_layer", "embed_norm_layer"):
        if key in config and not isinstance(config[key], str):
            config[key] = partial(_REFERENCE_NORMS[config[key].func], **config[key].keywords)
    if "mlp_layer" in config:
        config["mlp_layer"] = _REFERENCE_MLPS[config["mlp_layer"]]
    return config


def _of_timm(name: str, timm: Any, without_patches: bool) -> Subject:
    config = timm.get_pretrained_cfg(name)
    size = checked_pair("image_size", tuple(config.input_size[1:]) if config else 224)
    any_size = config is not None and not config.fixed_input_size  # convolutions: the constructor takes no size

    def make(provider: str, image_size: tuple[int, int] | None = None, **options: Any) -> nn.Module:
        if image_size is not None and not any_size:
            options["img_size"] = image_size
        with told(name):
            model: nn.Module = timm.create_model(name, **options)
        return _as(provider, model)

    with torch.device("meta"):
        patch = _patch_size(timm.create_model(name), name, without_patches)
    return Subject(name, "timm", size, patch or (1, 1), make, patch is not None)


def _of_configuration(name: str) -> Subject:
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a configuration in JSON: {error}") from None
    if not isinstance(values, dict) or "model_type" not in values:
        raise ValueError(f"{path} is no configuration of transformers: it has no model_type")
    transformers = importlib.import_module("transformers")
    values = dict(values)
    with told(path):
        config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    config = getattr(config, "vision_config", config)
    if getattr(config, "patch_size", None) is None or getattr(config, "image_size", None) is None:
        raise ValueError(f"{path} describes no ViT: {config.model_type} has no image_size and patch_size")

    def make(provider: str, **options: Any) -> nn.Module:
        with told(path):
            sized = type(config).from_dict(config.to_dict())
            for key, value in options.items():
                setattr(sized, key, _square(value))
            model = transformers.AutoModel.from_config(sized)
        return _as(provider, model)

    size, patch = (checked_pair(key, _pair(getattr(config, key))) for key in ("image_size", "patch_size"))
    return Subject(name, "transformers", size, patch, make)


def _of_function(name: str, without_patches: bool) -> Subject:
    module_name, _, function_name = name.partition(":")
    with told(name):
        module = importlib.import_module(module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"{module_name} has no function {function_name!r}")
    takes = inspect.signature(function).parameters
    spelling = "img_size" if "img_size" in takes and "image_size" not in takes else "image_size"

    def make(provider: str, **options: Any) -> nn.Module:
        if "image_size" in options:
            options[spelling] = options.pop("image_size")
        if unknown := [key for key in options if key not in takes and not _takes_any(takes)]:
            raise ValueError(f"{name} takes no {unknown[0]}: its model has one only")
        with told(name):
            model = function(**{key: _square(value) for key, value in options.items()})
        if not isinstance(model, nn.Module):
            raise ValueError(f"{name} must return an nn.Module, got {type(model).__name__}")
        return _as(provider, model)

    model = Subject(name, "function", (1, 1), (1, 1), make).on_meta("sdpa")
    patch = _patch_size(model, name, without_patches)
    size = takes[spelling].default if spelling in takes else None
    size = size if size not in (None, inspect.Parameter.empty) else _image_size(model)
    return Subject(name, "function", checked_pair("image_size", size), patch or (1, 1), make, patch is not None)


def _as(provider: str, model: nn.Module) -> nn.Module:
    """The model of a library, as a provider runs it."""
    if isinstance(model, reference.VisionTransformer):
        if provider == "fused":
            raise ValueError("the reference has no fused form; the models of fastvit.list_models() have all three")
        return baselines.use_sdpa(model) if provider == "sdpa" else model
    if provider == "fused":
        entries = integrations.accelerate(model).entries
        # a block of both side by side is no part of its own
        if not any(entry.fused and (entry.part or entry.kind == "ParallelScalingBlock") for entry in entries):
            raise NoFusedForm(f"fastvit.accelerate knows no block of {type(model).__name__}: it has no fused form")
    elif provider == "eager":
        baselines.use_eager(model)
    return model


def _patch_size(model: nn.Module, name: str, without_patches: bool) -> tuple[int, int] | None:
    """Return the stride of the first convolution with a stride as wide as its kernel; None if that is allowed."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and embeds_patches(module):
            return module.stride[0], module.stride[1]
    if without_patches:
        return None
    raise ValueError(f"{name} has no patch embedding that strides as wide as its kernel: it is no plain ViT")


def _image_size(model: nn.Module) -> Pair:
    for module in (model, *model.modules()):
        for key in ("img_size", "image_size"):
            if isinstance(value := getattr(module, key, None), int | tuple):
                return value
    return 224


def _takes_any(parameters: Any) -> bool:
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def _pair(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _square(value: Any) -> Any:
    """One integer where (height, width) are equal, which is what some constructors take."""
    return value[0] if isinstance(value, tuple) and value[0] == value[1] else value
