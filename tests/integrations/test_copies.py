"""Classes of transformers that are known because they have the code of a known class."""

from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
from known_models import small, small_inputs
from library_imports import import_library
from library_models import TEXT, fused_only, output_of
from models import close

import fastvit
from fastvit.integrations.transformers import classes, copies

CODE = '''
import logging
import torch
from torch import nn

logger = logging.getLogger(__name__)

def scaled(x, by=2.0):
    return helper(x) * by

def helper(x):
    return x + 1

class Own(nn.Module):
    """A docstring."""

    @property
    def factor(self):
        return 3.0

    def finish(self, x):
        return [item for item in (x,) if item is not None][0]

    def forward(self, hidden: "torch.Tensor", mask=None, *, deep=False):
        """Another one."""
        logger.debug("called")
        before = hidden.shape
        return self.finish(scaled(hidden)).reshape(before) * self.factor
'''


def code_of(name: str, code: str) -> Any:
    """Return what is compared of a class in a model's file in transformers."""
    module = ModuleType(f"transformers.models.{name}.modeling_{name}")
    exec(code, module.__dict__)
    return copies._code_of(module.Own)


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("before", "after", True),
        ("A docstring", "Words", True),
        ('"""Another one."""', "", True),
        (': "torch.Tensor"', "", True),
        ("mask", "masks", False),
        ("mask=None", "mask=False", False),
        ("deep=False", "deep=True", False),
        ("by=2.0", "by=2", False),
        ("x + 1", "x + 1.0", False),
        ("return 3.0", "return 3.5", False),
        ("(x,) if", "(x, x) if", False),
        ("logger.debug", "logger.info", False),
        ("def helper(x)", "def helper(x, y=0)", False),
        ("    def forward", "    @torch.no_grad()\n    def forward", False),
        ("class Own(nn.Module):", "class Own(nn.Identity):\n    def __call__(self, x): return x\n", False),
    ],
)
def test_all_that_a_call_runs_is_compared(old: str, new: str, same: bool) -> None:
    assert old in CODE
    assert (code_of("mine", CODE) == code_of("yours", CODE.replace(old, new))) == same


def test_a_copy_is_found_again_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has its fused forwards from a pickle, and its classes in no table."""
    model = small("altclip.AltCLIPVisionModel")
    inputs = small_inputs(model)
    want = output_of(model(**inputs))
    fastvit.accelerate(model, strict=True)
    monkeypatch.setattr(copies, "_learnt", set())
    for table in copies._TABLES:
        for name in [name for name in table if "altclip" in str(name) and name not in classes.ATTENTION]:
            table.discard(name) if isinstance(table, set) else table.pop(name)
    with fused_only():
        assert close(output_of(model(**inputs)), want)


def test_a_file_of_another_model_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision raises RuntimeError where it does not fit torch."""
    error = RuntimeError("operator torchvision::nms does not exist")
    monkeypatch.setattr("importlib.import_module", Mock(side_effect=error))
    assert copies._class("transformers.models.yolos.modeling_yolos.YolosLayer") is None


def test_language_models_are_left_alone() -> None:
    """Their norms have the code of RMSNorms of vision towers."""
    transformers = import_library("transformers")
    model = transformers.LlamaModel(transformers.LlamaConfig(**TEXT))
    report = fastvit.accelerate(model)
    assert not report.accelerated
