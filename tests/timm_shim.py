"""Imports timm, which the model tests compare with, also beside a torch that torchvision's binary was not built for.

timm imports torchvision for its data pipeline. A CUDA build of torchvision cannot load its compiled operators beside a
CPU-only torch, and then fails at import, where it registers fake implementations for operators that do not exist.
Declaring their schemas is enough: no test calls them.
"""

import importlib
import importlib.util
import sys
from types import ModuleType

import pytest
import torch

_NMS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_declared: list[torch.library.Library] = []


def import_timm() -> ModuleType:
    """The timm package; skips the test where timm or torchvision is not installed."""
    for package in ("timm", "torchvision"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        _declared.append(library)  # a Library that is collected takes its operators with it
        for operator in ("nms", "qnms"):
            library.define(operator + _NMS)
    return importlib.import_module("timm")
