"""timm, torchvision and transformers for the tests, which skip where a library is not installed."""

from types import ModuleType
from typing import cast

import pytest

from benchmarks.harness import libraries


def import_library(name: str) -> ModuleType:
    try:
        return cast(ModuleType, libraries.load(name))
    except ImportError as error:
        pytest.skip(f"{name} cannot be imported: {error}")


def import_timm() -> ModuleType:
    return import_library("timm")
