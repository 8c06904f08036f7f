"""A model that exists already."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from fastvit.modules.arguments import Pair, checked_pair
from fastvit.study.sources.from_function import image_size_of
from fastvit.study.sources.hooks import without_hooks
from fastvit.study.sources.model_source import ModelSource, patch_size_of


class ModuleSource(ModelSource):
    """A module as it is, for studies that need no other patch size or provider. Its copies have no data."""

    origin = "module"

    def __init__(self, model: nn.Module) -> None:
        patch = patch_size_of(model)
        size = checked_pair("image_size", image_size_of(model))
        super().__init__(type(model).__name__, size, patch or (1, 1), patch is not None)
        self._model = model

    def make(self, provider: str, **options: Any) -> nn.Module:
        raise NotImplementedError("a module that exists is copied, not made")

    def on_meta(
        self, provider: str = "fastvit", image_size: Pair | None = None, patch_size: Pair | None = None, **options: Any
    ) -> nn.Module:
        """Return a copy on the meta device. The arguments are those of the base; all sizes are the model's own."""
        known: dict[int, Any] = {}
        # weight_norm and pruning set attributes that are results of ops, which cannot be copied
        attributes = [t for module in self._model.modules() for t in vars(module).values() if isinstance(t, Tensor)]
        for t in (*self._model.parameters(), *self._model.buffers(), *attributes):
            empty = torch.empty_like(t, device="meta")
            known[id(t)] = nn.Parameter(empty, t.requires_grad) if isinstance(t, nn.Parameter) else empty
        with without_hooks(self._model):
            return copy.deepcopy(self._model, known)
