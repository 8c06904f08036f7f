"""timm, torchvision and transformers for the tests, which skip where a library is not installed."""

from types import ModuleType
from typing import Any, cast

import pytest

from benchmarks.harness import libraries


def import_library(name: str) -> ModuleType:
    try:
        return cast(ModuleType, libraries.load(name))
    except ImportError as error:
        pytest.skip(f"{name} cannot be imported: {error}")


def import_timm() -> ModuleType:
    return import_library("timm")


def assert_inputs_are_timms(ours: Any, theirs: Any) -> None:
    """Check that timm's helpers read the same input configuration from both models."""
    from timm.models import get_model_input_config

    assert get_model_input_config(ours) == get_model_input_config(theirs)
    assert ours.default_cfg is ours.pretrained_cfg
    for key in ours.pretrained_cfg.keys() - {"fixed_input_size"}:  # timm's is True for models of any size too
        assert ours.pretrained_cfg[key] == theirs.pretrained_cfg[key], key
