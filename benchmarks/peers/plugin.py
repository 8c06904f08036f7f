"""Pytest plugin that accelerates the models that the tests of timm or transformers create.

    pytest -p benchmarks.peers.plugin --accelerate --junitxml FILE ...

Each test starts from the same seed. Its property `models` in FILE is the number of models that fastvit was put into.
"""

from __future__ import annotations

import functools
import random
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastvit
from benchmarks.harness.libraries import load

MODELS: dict[str, list[str]] = tomllib.loads(Path(__file__).with_name("models.toml").read_text())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accelerate", action="store_true", help="without it, models stay as they are")
    parser.addoption("--only", type=Path, help="a file of names of tests: only these")


class Touched:
    """How many models fastvit was put into in the test that runs, and whether it is put into any."""

    count = 0
    accelerates = False


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "timeout: of pytest-timeout, which is not installed")
    torch.set_num_threads(1)
    load("timm")
    Touched.accelerates = config.getoption("--accelerate")
    if Touched.accelerates:
        replace_create_model()


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


def replace_create_model() -> None:
    """Replace timm's create_model, wherever timm has it, by one that accelerates what it creates."""
    own = load("timm").create_model

    @functools.wraps(own)
    def create_model(*args: Any, **kwargs: Any) -> Any:
        return accelerate(own(*args, **kwargs))

    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "timm" and getattr(module, "create_model", None) is own:
            module.create_model = create_model  # type: ignore[attr-defined]


def accelerate(model: Any) -> Any:
    try:
        Touched.count += bool(fastvit.accelerate(model).accelerated)
    except Exception:
        Touched.count += 1  # so that the test counts
        raise
    return model
