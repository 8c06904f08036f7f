"""Pytest plugin that puts fastvit into the models that the tests of timm or transformers create.

    pytest -p benchmarks.peers.plugin --fastvit accelerate --junitxml FILE ...

Each test starts from the same seed. Its property `models` in FILE is the number of models that fastvit was put into.
"""

from __future__ import annotations

import functools
import random
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastvit
from benchmarks.harness.libraries import load

PLAIN = "plain"
RUNS = {"timm": ("accelerate", "create_model"), "transformers": ("accelerate", "attention")}
MODELS: dict[str, list[str]] = tomllib.loads(Path(__file__).with_name("models.toml").read_text())
# Options of timm's create_model that do not change the model, and their defaults
_GENERAL = {
    "pretrained": False, "pretrained_cfg": None, "pretrained_cfg_overlay": None, "checkpoint_path": None,
    "cache_dir": None, "scriptable": None, "exportable": None, "no_jit": None,
}  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fastvit", choices=(PLAIN, "accelerate", "create_model", "attention"), default=PLAIN)
    parser.addoption("--only", type=Path, help="a file of names of tests: only these")


class Touched:
    """How many models fastvit was put into in the test that runs."""

    count = 0


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "timeout: of pytest-timeout, which is not installed")
    torch.set_num_threads(1)
    load("timm")
    changes = {"accelerate": _accelerated, "create_model": _of_fastvit}
    if change := changes.get(config.getoption("--fastvit")):
        replace_create_model(change)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests of models that are not among MODELS."""
    path = config.getoption("--only")
    only = set(path.read_text().splitlines()) if path else None

    def wanted(item: Any) -> bool:
        name = item.callspec.params.get("model_name") if hasattr(item, "callspec") else None
        known = not isinstance(name, str) or name.partition(".")[0] in MODELS["timm"]
        return known and (only is None or item.name in only)

    kept = set(filter(wanted, items))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    Touched.count = 0
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    try:
        return (yield)
    finally:
        item.user_properties.append(("models", Touched.count))


def replace_create_model(change: Callable[..., Any]) -> None:
    """Replace timm's create_model wherever timm has it. change: (timm's create_model, the arguments of a call)."""
    own = load("timm").create_model

    @functools.wraps(own)
    def create_model(*args: Any, **kwargs: Any) -> Any:
        return change(own, *args, **kwargs)

    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "timm" and getattr(module, "create_model", None) is own:
            module.create_model = create_model  # type: ignore[attr-defined]


def _accelerated(create: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return accelerate(create(*args, **kwargs))


def accelerate(model: Any) -> Any:
    try:
        Touched.count += bool(fastvit.accelerate(model).accelerated)
    except Exception:
        Touched.count += 1  # so that the test counts
        raise
    return model


def _of_fastvit(create: Callable[..., Any], model_name: str, *args: Any, **kwargs: Any) -> Any:
    """Create fastvit's model of that name if both have it and timm's general options are the default, else timm's."""
    options = dict(zip(_GENERAL, args, strict=False)) | kwargs
    name, _, tag = model_name.partition(".")
    general = all(options.pop(key, default) in (default, "") for key, default in _GENERAL.items())
    getter = options.pop("feature_cls", "getter") == "getter"  # how timm's ViTs give features
    timm = load("timm")
    both = name in fastvit.list_models() and timm.is_model(name)
    if not both or not general or not getter or tag not in ("", getattr(timm.get_pretrained_cfg(name), "tag", "")):
        return create(model_name, *args, **kwargs)
    Touched.count += 1
    features_only = options.pop("features_only", False)
    indices = {"out_indices": options.pop("out_indices")} if "out_indices" in options else {}
    model: Any = fastvit.create_model(name, **{key: value for key, value in options.items() if value is not None})
    if features_only:
        config = model.pretrained_cfg
        model = timm.models._features.FeatureGetterNet(model, **indices)
        model.pretrained_cfg = model.default_cfg = config  # as timm's factory does
    return model
