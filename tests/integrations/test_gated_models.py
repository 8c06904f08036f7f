"""Gated MLPs of other libraries alone: their dropouts, and the gates that are left alone."""

from functools import partial

import pytest
import torch
from library_imports import import_library
from library_models import outcome
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


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("GluMlp", {}, "act is nn.Sigmoid"),
        ("GluMlp", {"act_layer": nn.ReLU}, "a gate with relu"),
        ("SwiGLU", {"act_layer": partial(nn.GELU, approximate="tanh")}, "a gate with gelu_tanh"),
        ("SwiGLU", {"norm_layer": "SimpleNorm"}, "norm is timm.layers.norm.SimpleNorm"),
    ],
)
def test_other_gates_are_left_alone(kind: str, options: dict[str, object], reason: str) -> None:
    if "norm_layer" in options:
        options = {"norm_layer": import_library("timm").layers.SimpleNorm}
    report = fastvit.accelerate(nn.ModuleList([mlp_of_timm(kind, **options)]))
    assert report.fused("MLP")[0] == 0
    assert outcome(report, "0") == ("skipped", reason)


def test_gates_of_convolutions_are_no_mlps() -> None:
    report = fastvit.accelerate(nn.ModuleList([mlp_of_timm("GluMlp", act_layer=nn.SiLU, use_conv=True)]))
    assert not report.accelerated
    assert not report.skipped
