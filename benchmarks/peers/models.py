"""Choose the models that the suites run with: those in which `fastvit.accelerate` fuses something, by its report."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

import fastvit
from benchmarks.coverage import small_transformers
from benchmarks.harness.libraries import load
from benchmarks.harness.provenance import sources, write_json
from fastvit.blocks.submodules import qualified_name
from fastvit.integrations.transformers import layers as known

FOLDERS = ("fastvit", "kernels", "benchmarks/peers")  # what outcomes depend on
SMALL = 5e6  # parameters of a model of transformers


@dataclass(frozen=True)
class Found:
    """timm: the smallest of all models of one class with the same fused modules and the same switches. too_large: those
    of them with more parameters than the limit, which are left out. shared: the same choice among the names that
    `fastvit.create_model` has as well. transformers: {configuration: qualified names of classes}."""

    timm: list[str]
    too_large: list[str]
    shared: list[str]
    transformers: dict[str, list[str]]
    accelerated: int  # timm's names of which these stand for all


def find(limit: float) -> Found:
    """limit: of parameters."""
    timm = load("timm")
    smallest: dict[str, tuple[int, str]] = {}
    ours: dict[str, tuple[int, str]] = {}
    accelerated, names = 0, set(fastvit.list_models())
    for name in timm.list_models():
        model = timm.create_model(name, device="meta")
        switches = sorted((key, str(v)) for key, v in vars(model).items() if isinstance(v, bool | str))
        report = fastvit.accelerate(model)
        if report.accelerated:
            accelerated += 1
            fused = sorted({(entry.kind, entry.detail) for entry in report.accelerated})
            key, size = repr((type(model).__qualname__, fused, switches)), sum(p.numel() for p in model.parameters())
            for chosen in (smallest, ours) if name in names else (smallest,):
                chosen[key] = min(chosen.get(key, (size, name)), (size, name))
    return Found(
        timm=sorted(name for size, name in smallest.values() if size <= limit),
        too_large=sorted(name for size, name in smallest.values() if size > limit),
        shared=sorted(name for size, name in ours.values() if size <= limit),
        transformers=_of_transformers(),
        accelerated=accelerated,
    )


def _of_transformers() -> dict[str, list[str]]:
    """Classes whose small model has a module that fastvit knows by its name; norms of PyTorch alone do not count.
    Models of DepthPro, which stay large, are left out."""
    found: dict[str, list[str]] = {}
    kind: Any
    load("transformers").logging.set_verbosity_error()
    for name, kind in small_transformers.classes():
        model = small(kind)[0]
        if model is not None and sum(p.numel() for p in model.parameters()) < SMALL and _is_known(model):
            found.setdefault(kind.config_class.__name__, []).append(f"{kind.__module__}.{name}")
    return found


def small(kind: Any) -> tuple[Any, Callable[[], Any]]:
    """A small model, or None if this environment cannot make it, and a function that makes its configuration."""
    for narrow in (True, False):
        try:
            config = partial(small_transformers.small_config, kind, narrow=narrow)
            return kind(config()), config
        except Exception:  # a package that is missing, or sizes that do not fit
            continue
    return None, kind.config_class


def _is_known(model: nn.Module) -> bool:
    report = fastvit.accelerate(model)
    return any(qualified_name(model.get_submodule(entry.name)) in known.HANDLERS for entry in report.accelerated)


def found(path: Path, limit: float) -> Found:
    """Read from the file if it was made with this code and this limit; otherwise found, in two minutes, and written."""
    if path.exists():
        data = json.loads(path.read_text())
        if (data.pop("sources"), data.pop("limit")) == (sources(*FOLDERS), limit):
            return Found(**data)
    result = find(limit)
    write_json(path, {"sources": sources(*FOLDERS), "limit": limit, **asdict(result)})
    return result
