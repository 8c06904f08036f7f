"""Pytest plugin that puts fastvit into the models that another library's tests create.

`python -m benchmarks.peers` loads it. The environment variable FASTVIT_PEERS names a JSON file with the fields of
`Job`. Each test starts from the same seed. Its outcome goes to a file of lines as soon as it is known, with the number
of models in it that fastvit was put into.
"""

from __future__ import annotations

import functools
import json
import os
import random
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastvit
from benchmarks.harness.libraries import load

VARIABLE = "FASTVIT_PEERS"
PLAIN = "plain"
RUNS = {"timm": ("accelerate", "create_model"), "transformers": ("accelerate", "attention")}
# Options of timm's create_model that say nothing about the model that is made, and their defaults
_NEUTRAL = {
    "pretrained": False, "pretrained_cfg": None, "pretrained_cfg_overlay": None, "checkpoint_path": None,
    "cache_dir": None, "scriptable": None, "exportable": None, "no_jit": None,
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A run of one suite. models: names for timm, {configuration: classes} for transformers; of timm's tests with a
    parameter `model_name` only those of these models run. only: ids of tests, whatever their models, or None for all.
    done: ids of tests that are left out. record: the file of outcomes."""

    suite: str
    run: str
    record: str
    models: Any
    only: list[str] | None = None
    done: list[str] = field(default_factory=list)


def job() -> Job:
    return Job(**json.loads(Path(os.environ[VARIABLE]).read_text()))


class Touched:
    """How many models fastvit was put into in the test that runs."""

    count = 0


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "timeout: of pytest-timeout, which is not installed")
    work = job()
    load("timm")
    torch.set_num_threads(1)
    if work.suite == "timm" and work.run != PLAIN:
        replace_create_model(_accelerated if work.run == "accelerate" else _of_fastvit)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(Path(work.record)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    work = job()
    done, only, names = set(work.done), set(work.only or ()), set(work.models)

    def wanted(item: pytest.Item) -> bool:
        if work.only is not None:
            return item.nodeid in only
        return item.nodeid not in done and (work.suite != "timm" or _creates_one_of(names, item))

    kept = set(filter(wanted, items))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def _creates_one_of(names: set[str], item: Any) -> bool:
    """Whether a test of timm is of one of these models, or names the models that it creates by itself."""
    name = item.callspec.params.get("model_name") if hasattr(item, "callspec") else None
    if isinstance(name, str):
        return name.partition(".")[0] in names
    return _speaks_of_create_model(item.function, set())


def _speaks_of_create_model(function: Any, seen: set[Any]) -> bool:
    """Whether it, or a function of its file that it calls, has that name in its code."""
    pending, names = [function.__code__], set()
    while pending:
        code = pending.pop()
        names.update(code.co_names)
        pending += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    seen.add(function)
    called = [function.__globals__.get(name) for name in names]
    inner = [f for f in called if isinstance(f, types.FunctionType) and f.__globals__ is function.__globals__]
    return "create_model" in names or any(_speaks_of_create_model(f, seen) for f in inner if f not in seen)


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


class Recorder:
    """Appends a line for each test when it ends: id, outcome, last error, and `models`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        row = self.found.setdefault(report.nodeid, {"id": report.nodeid, "outcome": "passed", "error": "", "models": 0})
        row["models"] = max([row["models"], *(value for name, value in report.user_properties if name == "models")])
        if report.failed or (report.skipped and row["outcome"] == "passed"):
            row["outcome"] = report.outcome
            row["error"] = one_line(report)
        if report.when not in ("setup", "call", "teardown"):  # the process that ran it has crashed
            row["models"] += 1
        if report.when not in ("setup", "call"):
            with self.path.open("a") as file:
                file.write(json.dumps(self.found.pop(report.nodeid)) + "\n")


def one_line(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        message = " ".join(str(crash.message).split())
        return f"{message[:300]} ({Path(crash.path).name}:{crash.lineno})"
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return " ".join(str(text).split())[-300:]


# ---- timm ----


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
        Touched.count += 1  # so that it counts
        raise
    return model


def _of_fastvit(create: Callable[..., Any], model_name: str, *args: Any, **kwargs: Any) -> Any:
    """Create fastvit's model of that name if both have it and timm's general options are the default, else timm's."""
    options = dict(zip(_NEUTRAL, args, strict=False)) | kwargs
    name, _, tag = model_name.partition(".")
    neutral = all(options.pop(key, default) in (default, "") for key, default in _NEUTRAL.items())
    getter = options.pop("feature_cls", "getter") == "getter"  # what the ViTs of timm give features by
    if name not in shared_names() or not neutral or not getter or tag not in ("", _default_tag(name)):
        return create(model_name, *args, **kwargs)
    Touched.count += 1
    features_only = options.pop("features_only", False)
    indices = {"out_indices": options.pop("out_indices")} if "out_indices" in options else {}
    model: Any = fastvit.create_model(name, **{key: value for key, value in options.items() if value is not None})
    if features_only:
        config = model.pretrained_cfg
        model = load("timm").models._features.FeatureGetterNet(model, **indices)
        model.pretrained_cfg = model.default_cfg = config  # as timm's factory does
    return model


@functools.cache
def shared_names() -> frozenset[str]:
    return frozenset(fastvit.list_models()) & frozenset(load("timm").list_models())


def _default_tag(name: str) -> str:
    found = load("timm").get_pretrained_cfg(name)
    return found.tag or "" if found is not None else ""
