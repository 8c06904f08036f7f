"""`ModelTesterMixin` of transformers for small models of the classes in models.toml; collected by pytest.

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
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

import fastvit
from benchmarks.coverage import small_transformers
from benchmarks.harness.libraries import load
from benchmarks.peers import plugin

TESTS = os.environ["FASTVIT_PEERS_TESTS"]  # the folder `tests` of the sdist


def _import_mixin() -> Any:
    package = "tests_of_transformers"
    root = types.ModuleType(package)
    root.__path__ = [TESTS]
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
        self.first = kinds[0]
        self.configs = {kind: partial(small_transformers.small_config, kind) for kind in kinds}
        models = {kind: kind(config()) for kind, config in self.configs.items()}  # made before fastvit is put in
        self.inputs = {kind: small_transformers.inputs(model, self.batch_size) for kind, model in models.items()}
        model = models[self.first]
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

    def prepare_config_and_inputs_for_model_class(self, kind: Any) -> Any:
        return self.configs[kind](), copy.deepcopy(self.inputs[kind])


def _put_in(kind: Any) -> None:
    """Accelerate every model of this class when it has been made."""
    own = kind.__init__

    @functools.wraps(own)
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        if type(self) is kind:
            fastvit.accelerate(self)

    kind.__init__ = initialise


def _kinds() -> Iterator[Any]:
    for name in plugin.MODELS["transformers"]:
        module, _, kind = f"transformers.models.{name}".rpartition(".")
        yield getattr(importlib.import_module(module), kind)


def _make_tests() -> None:
    load("transformers").logging.set_verbosity_error()
    mixin, kinds = _import_mixin(), list(_kinds())
    for config in dict.fromkeys(kind.config_class for kind in kinds):
        own = tuple(kind for kind in kinds if kind.config_class is config)
        name = f"Test{config.__name__.removesuffix('Config')}"
        members = {"model_tester": Tester(own), "all_model_classes": own, "test_resize_embeddings": False}
        members |= {"_is_composite": hasattr(config(), "vision_config"), "__module__": __name__}
        globals()[name] = type(name, (mixin, unittest.TestCase), members)
    for kind in kinds if plugin.accelerates else ():
        _put_in(kind)


_make_tests()
