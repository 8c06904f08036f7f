"""layers.SwiGLU, GluMlp and SwiGLUPacked: timm's names, keys and numbers, fused where the ops know the gate."""

from functools import partial
from typing import Any

import pytest
import torch
from library_imports import import_timm
from models import Calls
from oracle import GRADIENT, assert_as_accurate, inputs
from torch import Tensor, nn

import fastvit
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


def test_in_a_block(device: torch.device) -> None:
    block = fastvit.Block(32, 2, mlp_ratio=4, act_layer="silu", mlp_layer="swiglu").to(device)
    x = torch.randn(2, 5, 32, device=device)
    with Calls() as calls:
        got = block(x)
    assert calls.names.count("fastvit::gated_act_fwd") == 1
    half = x + block.attn(block.norm1(x))
    torch.testing.assert_close(got, half + block.mlp(block.norm2(half)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["SwiGLU", "GluMlp"])
def test_initialised_as_timms(kind: str) -> None:
    ours, theirs = (getattr(library, kind)(64, 128) for library in (layers, import_timm().layers))
    for module in (ours, theirs):
        module.init_weights()
    for (key, got), want in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        for a, b in zip(got.chunk(2), want.chunk(2), strict=True):
            assert a.std().item() == pytest.approx(b.std().item(), rel=0.2), key


@pytest.mark.parametrize(
    ("kind", "error", "message", "arguments"),
    [
        ("GluMlp", ValueError, "hidden_features must be even", {"hidden_features": 41}),
        ("GluMlp", TypeError, "gate_last must be True or False", {"gate_last": "yes"}),
        ("GluMlp", ValueError, "act_layer must be a class or one of", {"act_layer": "relu"}),
        ("SwiGLU", TypeError, "align_to must be an integer of at least 0", {"align_to": 1.5}),
        ("SwiGLU", ValueError, "drop must be in [0, 1)", {"drop": 1.0}),
        ("SwiGLU", ValueError, "hidden_features must be at least 1", {"hidden_features": 0}),
    ],
)
def test_bad_arguments(kind: str, error: type[Exception], message: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(error) as raised:
        getattr(layers, kind)(24, **arguments)
    assert str(raised.value).startswith(message)
