"""Gated MLPs of other libraries alone: their dropouts, and the gates that are left alone."""

from functools import partial
from typing import Any

import pytest
import torch
from library_imports import import_library
from models import randomised
from torch import nn

import fastvit
from fastvit.blocks import read_timm, run


def mlp_of_timm(kind: str, **options: object) -> nn.Module:
    return randomised(getattr(import_library("timm").layers, kind)(64, **options))


@pytest.mark.parametrize("kind", ["SwiGLU", "GluMlp"])
def test_dropouts_are_those_of_the_layers(kind: str, device: torch.device) -> None:
    """One after the product, before the norm, and one after fc2."""
    mlp = mlp_of_timm(kind, act_layer=nn.GELU, norm_layer=nn.LayerNorm, drop=0.25).to(device).train()
    spec = read_timm.read_mlp(mlp)
    assert (spec.drop1, spec.drop2, spec.activation) == (0.25, 0.25, "geglu")
    assert spec.inner_norm is not None
    x = torch.randn(64, 64, device=device)
    with torch.no_grad():
        assert 0.2 < float((run.run_mlp(x, spec) == 0).double().mean()) < 0.3
        mlp.drop1.p = 0.0  # fc2's alone
        dropped, whole = run.run_mlp(x, read_timm.read_mlp(mlp)), mlp.eval()(x)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], whole[kept] / 0.75, rtol=1e-4, atol=1e-5)


LEFT: dict[str, Any] = {
    "act is nn.Sigmoid": ("GluMlp", {}),
    "a gate with relu": ("GluMlp", {"act_layer": nn.ReLU}),
    "a gate with gelu_tanh": ("SwiGLU", {"act_layer": partial(nn.GELU, approximate="tanh")}),
    "norm is nn.Softmax": ("SwiGLU", {"norm_layer": lambda _: nn.Softmax(-1)}),
}


def test_other_gates_are_left_alone() -> None:
    """Those of convolutions are no MLPs."""
    mlps = [mlp_of_timm(kind, **options) for kind, options in LEFT.values()]
    convolution = mlp_of_timm("GluMlp", act_layer=nn.SiLU, use_conv=True)
    report = fastvit.accelerate(nn.ModuleList([*mlps, convolution]))
    assert not report.accelerated
    assert [entry.detail for entry in report.skipped] == [*LEFT]
