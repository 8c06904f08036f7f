"""Norms of other libraries as modules: how each is read, and which are left alone; and norms without weight in ours."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from library_imports import import_library
from library_models import class_of_transformers, fused_only, outcome
from models import randomised, step
from oracle import GRADIENT, assert_as_accurate, inputs
from torch import nn

import fastvit
from fastvit.integrations.transformers.classes import RMS_NORM

D = 32


def norm_of_timm(name: str) -> nn.Module:
    return getattr(import_library("timm").layers, name)(D, eps=1e-5)


def norm_of_transformers(qualified: str) -> nn.Module:
    _, _, file, _, name = qualified.split(".")
    return class_of_transformers(file, name)(D, eps=1e-5)


def with_a_bias_alone() -> nn.Module:
    norm = nn.LayerNorm(D, eps=1e-5)
    norm.weight = None  # type: ignore[assignment]
    return norm


# Inputs are of the size of eps, so that a wrong eps shows
NORMS: dict[str, Callable[[], nn.Module]] = {
    "nn.RMSNorm": lambda: nn.RMSNorm(D),
    "nn.RMSNorm, eps": lambda: nn.RMSNorm(D, eps=1e-5),
    "timm.RmsNorm": partial(norm_of_timm, "RmsNorm"),
    "timm.RmsNormFp32": partial(norm_of_timm, "RmsNormFp32"),
    "nn.RMSNorm without weight": lambda: nn.RMSNorm(D, elementwise_affine=False),
    "nn.LayerNorm without weight": lambda: nn.LayerNorm(D, eps=1e-5, elementwise_affine=False),
    "nn.LayerNorm with a bias alone": with_a_bias_alone,
    "nn.LayerNorm without bias": lambda: nn.LayerNorm(D, eps=1e-5, bias=False),
    **{name.rpartition(".")[2]: partial(norm_of_transformers, name) for name in sorted(map(str, RMS_NORM))},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", NORMS)
def test_as_the_librarys(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """The mean square of rows is about eps: 1e-5, or PyTorch's 1e-7."""
    norm = randomised(NORMS[name]()).to(device, dtype)
    scale = 3e-4 if name == "nn.RMSNorm" else 3e-3
    x = (inputs("normal", 2, 5, D, dtype=torch.float64, device=device) * scale).to(dtype)
    own = step(norm, x)
    double = copy.deepcopy(norm).double()
    if getattr(norm, "eps", 0.0) is None:
        double.eps = torch.finfo(torch.float32).eps  # as for dtype; float64 has its own
    exact = step(double, x.double())
    model = nn.Sequential(norm)
    report = fastvit.accelerate(model, strict=True)
    assert outcome(report, "0") == ("accelerated", "layer_norm" if "LayerNorm" in name else "rms_norm")
    for got, *others in zip(*(result.values() for result in (step(model, x), own, exact)), strict=True):
        assert_as_accurate(got, *others, factor=GRADIENT, what=name)


@pytest.mark.parametrize("name", [name for name in NORMS if name != "nn.LayerNorm without bias"])
def test_dtypes_under_autocast(name: str, device: torch.device) -> None:
    """Inputs are bfloat16 after a linear layer, and float32 after a sum."""
    norm = randomised(NORMS[name]()).to(device)
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(2, 5, D, dtype=dtype, device=device)
        with torch.autocast(device.type, torch.bfloat16), torch.no_grad():
            want = norm(x)
            with fastvit.accelerated(norm, strict=True), fused_only():
                got = norm(x)
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-2)
