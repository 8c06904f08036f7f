"""Models of fastvit's own zoo."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from fastvit import reference, zoo
from fastvit.layers import LayerNorm, RMSNorm
from fastvit.modules.arguments import Pair, checked_pair
from fastvit.reference.eva import SwiGLU, SwiGLUPacked
from fastvit.study.sources.baselines import as_provider
from fastvit.study.sources.model_source import ModelSource, overflows_named
from fastvit.study.sources.normalization import Statistics, statistics

_DEFAULTS = (("img_size", 224), ("patch_size", 16))  # of both constructors of the zoo
# The reference's classes for those that the zoo names
_REFERENCE_NORMS = {LayerNorm: nn.LayerNorm, RMSNorm: reference.RMSNorm}
_REFERENCE_MLPS = {"swiglu": SwiGLU, "swiglupacked": SwiGLUPacked}


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
        return as_provider(provider, reference_model(self.name, **options))

    def with_weights(self, weights: str | Path | None, image_size: Pair | None = None) -> nn.Module:
        if weights is None:
            return self.build("fastvit", image_size)
        return self.build("fastvit", image_size, weights=weights, num_classes=0, drop_head=True)

    def normalization(self) -> Statistics:
        return statistics(self.name)

    def running(self) -> AbstractContextManager[None]:
        return overflows_named(self.name)  # any other error of our own model is a bug, and keeps its traceback


def reference_model(name: str, **overrides: Any) -> nn.Module:
    """Make the plain PyTorch model for a name of the zoo."""
    kind = getattr(reference, zoo.model_class(name).__name__)
    return kind(**{**_reference_arguments(name), **overrides})


def _reference_arguments(name: str) -> dict[str, Any]:
    config = zoo.config(name)
    for key in ("norm_layer", "embed_norm_layer"):
        if key in config and not isinstance(config[key], str):
            config[key] = partial(_REFERENCE_NORMS[config[key].func], **config[key].keywords)
    if "mlp_layer" in config:
        config["mlp_layer"] = _REFERENCE_MLPS[config["mlp_layer"]]
    return config
