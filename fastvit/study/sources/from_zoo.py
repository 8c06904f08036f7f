"""Models of fastvit's own zoo.

Their plain PyTorch form, for "eager" and "sdpa", is `fastvit.reference`'s. EVA's blocks and the distillation token are
not in it: there the plain form is timm's model of the same name and keys, and needs timm.
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from fastvit import reference, zoo
from fastvit.layers import LayerNorm, RMSNorm
from fastvit.modules.arguments import Pair, checked_pair
from fastvit.study.sources.baselines import as_provider
from fastvit.study.sources.model_source import ModelSource, overflows_named
from fastvit.study.sources.normalization import Statistics, statistics
from fastvit.vit import VisionTransformer

_DEFAULTS = (("img_size", 224), ("patch_size", 16))  # of both constructors of the zoo
# The reference's classes for those that the zoo names
_REFERENCE_NORMS = {LayerNorm: nn.LayerNorm, RMSNorm: reference.RMSNorm}
_REFERENCE_MLPS = {"swiglu": reference.SwiGLU, "swiglupacked": reference.SwiGLUPacked}


class ZooSource(ModelSource):
    """A name of `fastvit.list_models()`."""

    origin = "fastvit"

    def __init__(self, name: str) -> None:
        config = zoo.config(name)
        size, patch = (checked_pair(key, config.get(key, default)) for key, default in _DEFAULTS)
        super().__init__(name, size, patch)

    def make(self, provider: str, image_size: tuple[int, int] | None = None, **options: Any) -> nn.Module:
        if image_size is not None:
            options["img_size"] = image_size
        if provider == "fastvit":
            return zoo.create_model(self.name, **options)
        return plain_model(self.name, provider, **options)

    def with_weights(self, weights: str | Path | None, image_size: Pair | None = None) -> nn.Module:
        if weights is None:
            return self.build("fastvit", image_size)
        return self.build("fastvit", image_size, weights=weights, num_classes=0, drop_head=True)

    def normalization(self) -> Statistics:
        return statistics(self.name)

    def running(self) -> AbstractContextManager[None]:
        return overflows_named(self.name)  # any other error of our own model is a bug, and keeps its traceback


def plain_model(name: str, provider: str = "eager", **overrides: Any) -> nn.Module:
    """Make the plain PyTorch model for a name of the zoo, with "eager" attention or "sdpa".

    Raises:
        ValueError: a model whose plain form is timm's, without timm.
    """
    if zoo.model_class(name) is VisionTransformer:
        return as_provider(provider, reference.VisionTransformer(**{**_reference_arguments(name), **overrides}))
    try:
        timm = importlib.import_module("timm")
    except Exception as error:  # for example with a torchvision that was built for another torch
        raise ValueError(f"the plain PyTorch form of {name} is timm's, and timm cannot be imported: {error}") from None
    return as_provider(provider, timm.create_model(name, **overrides))


def _reference_arguments(name: str) -> dict[str, Any]:
    config = zoo.config(name)
    for key in ("norm_layer", "embed_norm_layer"):
        if key in config and not isinstance(config[key], str):
            config[key] = partial(_REFERENCE_NORMS[config[key].func], **config[key].keywords)
    if "mlp_layer" in config:
        config["mlp_layer"] = _REFERENCE_MLPS[config["mlp_layer"]]
    return config
