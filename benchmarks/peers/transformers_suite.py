"""`ModelTesterMixin` of transformers for small models of the classes that fastvit knows; collected by pytest.

The sdist of transformers has the mixin but neither the tests of each model, which say how a small one is made, nor two
other mixins that it imports: models are made by coverage/small_transformers.py, and the two are empty.
"""

from __future__ import annotations

import copy
import functools
import importlib
import os
import sys
import types
import unittest
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import fastvit.integrations.transformers.layers
from benchmarks.coverage import small_transformers
from benchmarks.harness.libraries import load
from benchmarks.peers import plugin
from benchmarks.peers.models import small

TESTS = "FASTVIT_PEERS_TRANSFORMERS"  # the folder `tests` of the sdist


def _import_mixin() -> Any:
    package = "tests_of_transformers"
    root = types.ModuleType(package)
    root.__path__ = [os.environ[TESTS]]
    sys.modules[package] = root
    for name, mixin in (
        ("exporters.test_export", "ExportTesterMixin"),
        ("generation.test_utils", "GenerationTesterMixin"),
    ):
        module = types.ModuleType(f"{package}.{name}")
        setattr(module, mixin, type(mixin, (), {}))
        sys.modules[f"{package}.{name}"] = module
        sys.modules.setdefault(f"{package}.{name.partition('.')[0]}", types.ModuleType(name))
    return importlib.import_module(f"{package}.test_modeling_common").ModelTesterMixin


class Tester:
    """The answers to the mixin's questions about small models of one configuration."""

    is_training = True
    batch_size = 2
    num_hidden_layers = 2
    num_labels = small_transformers.LABELS
    num_masks = 4

    def __init__(self, kinds: Sequence[Any]) -> None:
        made = {kind: small(kind) for kind in kinds}
        self.inputs = {kind: small_transformers.inputs(model, self.batch_size) for kind, (model, _) in made.items()}
        self.configs = {kind: config for kind, (_, config) in made.items()}
        self.first = kinds[0]
        model: Any = made[self.first][0]
        own = getattr(model.config, "vision_config", model.config)
        self.hidden_size = getattr(own, "hidden_size", small_transformers.WIDTH)
        self.num_attention_heads = getattr(own, "num_attention_heads", small_transformers.HEADS)
        self.image_size, self.patch_size = getattr(own, "image_size", 64), getattr(own, "patch_size", 16)
        self.mask_length = 16  # patches, where a configuration has images of four patches a side
        self.seq_length = self.encoder_seq_length = self._tokens(model)

    def _tokens(self, model: Any) -> int:
        try:
            with torch.no_grad():
                out = model.eval()(**self.inputs[self.first], output_hidden_states=True)
            return int(out.hidden_states[0].shape[-2])
        except Exception:  # it has no hidden states: tests that want them fail without fastvit, too
            return self.mask_length + 1

    def get_config(self) -> Any:
        return self.configs[self.first]()

    def prepare_config_and_inputs_for_common(self) -> Any:
        return self.prepare_config_and_inputs_for_model_class(self.first)

    def prepare_config_and_inputs_for_model_class(self, kind: type) -> Any:
        return self.configs[kind](), copy.deepcopy(self.inputs[kind])


def _put_in(kind: Any, run: str) -> None:
    """Put fastvit into every model of this class when it has been made."""
    own = kind.__init__

    @functools.wraps(own)
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        if type(self) is kind:
            _change(self, run)

    kind.__init__ = initialise


def _change(model: Any, run: str) -> None:
    if run == "accelerate":
        plugin.accelerate(model)
    elif model.config._attn_implementation == "sdpa":  # the default: eager attention is a test's own choice
        plugin.Touched.count += 1
        model.set_attn_implementation("fastvit")


def _make_tests(models: dict[str, list[str]], run: str) -> None:
    load("transformers").logging.set_verbosity_error()
    mixin = _import_mixin()
    fastvit.integrations.transformers.register_attention()
    for config, names in models.items():
        kinds = tuple(
            getattr(importlib.import_module(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names
        )
        name = f"Test{config.removesuffix('Config')}"
        members = {"model_tester": Tester(kinds), "all_model_classes": kinds, "test_resize_embeddings": False}
        members |= {"_is_composite": hasattr(kinds[0].config_class(), "vision_config"), "__module__": __name__}
        globals()[name] = type(name, (mixin, unittest.TestCase), members)
        for kind in kinds if run != plugin.PLAIN else ():
            _put_in(kind, run)


assert Path(os.environ[TESTS]).is_dir()
_make_tests(plugin.job().models, plugin.job().run)
