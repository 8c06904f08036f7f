"""Pytest plugin that accelerates the models that the tests of timm or transformers create.

    pytest -p benchmarks.peers.plugin --accelerate ...
    pytest -p benchmarks.peers.plugin --last-failed ...     # what passes is a difference, and makes the status 1

Each test starts from the same seed. A difference that deliberate.toml has is an expected failure.
"""

from __future__ import annotations

import functools
import random
import re
import sys
import tomllib
from collections.abc import Generator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastvit
from benchmarks.harness.libraries import load

MODELS: dict[str, list[str]] = tomllib.loads(Path(__file__).with_name("models.toml").read_text())
DELIBERATE = tomllib.loads(Path(__file__).with_name("deliberate.toml").read_text())["difference"]
accelerates = False


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accelerate", action="store_true", help="without it, models stay as they are")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "timeout: of pytest-timeout, which is not installed")
    torch.set_num_threads(1)
    load("timm")
    global accelerates
    accelerates = config.getoption("--accelerate")
    if accelerates:
        replace_create_model()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests of models that are not among MODELS."""

    def wanted(item: Any) -> bool:
        name = item.callspec.params.get("model_name") if hasattr(item, "callspec") else None
        return not isinstance(name, str) or name.partition(".")[0] in MODELS["timm"]

    kept = set(filter(wanted, items))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Generator[None, Any, Any]:
    report = yield
    if report.failed and item.config.getoption("--accelerate") and (reason := meant(item.nodeid, str(call.excinfo))):
        report.outcome, report.wasxfail = "skipped", reason
    return report


def meant(test: str, error: str) -> str:
    """Return why a difference is meant, or ""."""
    error = " ".join(error.split())
    rows = (r for r in DELIBERATE if fnmatchcase(test, r["tests"]) and re.search(r["error"], error))
    return next((row["reason"] for row in rows), "")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if session.config.getoption("lf"):
        reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
        session.exitstatus = int("passed" in reporter.stats)  # a file that cannot be imported counts as a failed test


def replace_create_model() -> None:
    """Replace timm's create_model, wherever timm has it, by one that accelerates what it creates."""
    own = load("timm").create_model

    @functools.wraps(own)
    def create_model(*args: Any, **kwargs: Any) -> Any:
        model = own(*args, **kwargs)
        fastvit.accelerate(model)
        return model

    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "timm" and getattr(module, "create_model", None) is own:
            module.create_model = create_model  # type: ignore[attr-defined]
