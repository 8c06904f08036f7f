"""layers.SwiGLU, GluMlp, SwiGLUPacked, Mlp with a norm: timm's names, keys and numbers, fused where the ops can."""

from functools import partial
from typing import Any

import pytest
import torch
from library_imports import import_timm
from models import Calls
from oracle import GRADIENT, assert_as_accurate, inputs
from torch import Tensor, nn

from fastvit import layers

NORM = partial(nn.LayerNorm, eps=1e-6)
# name -> the class, its arguments, and whether they are fused
CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "SwiGLU": ("SwiGLU", {"hidden_features": 40}, True),
    "SwiGLU, aligned, of gelu": ("SwiGLU", {"hidden_features": 41, "align_to": 8, "act_layer": nn.GELU}, True),
    "SwiGLU with a norm": ("SwiGLU", {"hidden_features": 40, "norm_layer": NORM, "out_features": 8}, True),
    "SwiGLUPacked": ("SwiGLUPacked", {"hidden_features": 80, "bias": False}, True),
    "GluMlp of gelu": ("GluMlp", {"hidden_features": 80, "act_layer": nn.GELU, "norm_layer": NORM}, True),
    "GluMlp": ("GluMlp", {}, False),  # of sigmoid
    "Mlp with a norm": ("Mlp", {"hidden_features": 40, "norm_layer": NORM}, False),
}


def outcomes(module: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().to(next(module.parameters()).dtype).requires_grad_()
    out = module(x)
    dout = inputs("normal", *out.shape, dtype=out.dtype, device=x.device, seed=3)
    return [out, *torch.autograd.grad(out, [x, *module.parameters()], dout)]


@pytest.mark.parametrize("name", CASES)
def test_as_timms(name: str, device: torch.device) -> None:
    kind, arguments, fused = CASES[name]
    ours, theirs, double = (
        getattr(library, kind)(24, **arguments).to(device) for library in (layers, *[import_timm().layers] * 2)
    )
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for module in (theirs, double):
        module.load_state_dict(ours.state_dict())
    x = torch.randn(2, 5, 24, device=device)
    with Calls() as calls:
        got = outcomes(ours, x)
    assert ("fastvit::gated_act_fwd" in calls.names) == fused
    for triple in zip(got, outcomes(theirs, x), outcomes(double.double(), x), strict=True):
        assert_as_accurate(*triple, factor=GRADIENT, what=name)


@pytest.mark.parametrize("name", ["SwiGLU", "GluMlp of gelu"])
def test_hooks_are_called(name: str, device: torch.device) -> None:
    """Then its submodules run by themselves."""
    kind, arguments, _ = CASES[name]
    module, x = getattr(layers, kind)(24, **arguments).to(device), torch.randn(3, 24, device=device)
    want, seen = module(x), []
    module.act.register_forward_hook(lambda *_: seen.append(1))
    torch.testing.assert_close(module(x), want)
    assert seen
