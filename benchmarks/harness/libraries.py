"""Import the libraries whose models are compared, even with a torch that torchvision was not built for, and give their
models weights.

timm and transformers import torchvision for their data pipelines. A CUDA build of torchvision cannot load its compiled
operators with a CPU-only torch, and then fails at import, where it registers fake implementations for operators that
do not exist. Declaring their schemas is enough: nothing here calls them.

    python -m benchmarks.harness.libraries PROGRAM.py ARGUMENTS

runs a program that imports them.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import runpy
import sys
from typing import Any

import torch
from torch import nn

_NMS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_declared: list[torch.library.Library] = []


def load(name: str) -> Any:
    """Import timm, torchvision or transformers; an ImportError where it, or what it needs, is not installed."""
    if importlib.util.find_spec("torchvision") is not None:
        _import_torchvision()  # before timm and transformers import it
    return importlib.import_module(name)


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    """Replace the degenerate values of an initialisation, norms of ones, biases and tokens of zeros, by random ones."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and (name.endswith("weight") or "gamma" in name or "lambda" in name):
            parameter.normal_(1.0, 0.1)
        elif parameter.dim() == 1 or not parameter.any():
            parameter.normal_(0.0, 0.05)


def _import_torchvision() -> None:
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
        importlib.import_module("torchvision")


if __name__ == "__main__":
    load("timm")
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))  # as python itself sets it
    runpy.run_path(sys.argv[0], run_name="__main__")
