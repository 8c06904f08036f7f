"""Models whose MLPs have a gate, accelerated: every class that is read, whole blocks, and what is left alone."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from library_imports import import_library
from library_models import hugging_face, outcome, vit
from models import Calls
from oracle import GRADIENT, assert_as_accurate
from stand_ins import defined_in
from torch import Tensor, nn

import fastvit
from fastvit.blocks import read_timm
from fastvit.blocks import run as run_blocks

GIANT = {"img_size": 28, "embed_dim": 96, "mlp_ratio": 4}
DINOV3 = {"use_gated_mlp": True, "hidden_act": "silu", "num_register_tokens": 3}


def of_timm(mlp: str, norm: bool = False, norms: str | None = None, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        layer = partial(getattr(import_library("timm").layers, mlp), **options)
        return vit(mlp_layer=layer, scale_mlp_norm=norm, norm_layer=norms, num_classes=7)

    return build


# name -> the model, and the activation that its MLP is read with
MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "SwiGLU": (of_timm("SwiGLU"), "swiglu"),
    "SwiGLU of gelu, with a norm": (of_timm("SwiGLU", act_layer=nn.GELU, norm=True), "geglu"),
    "SwiGLU with RMSNorms": (of_timm("SwiGLU", norm=True, norms="rmsnorm"), "swiglu"),
    "SwiGLUPacked": (
        lambda: vit("vit_giant_patch14_reg4_dinov2", **GIANT, num_heads=2, num_classes=7), "swiglu",
    ),
    "GluMlp, value first": (of_timm("GluMlp", act_layer=nn.GELU, norm=True), "geglu"),
    "GluMlp without biases": (of_timm("GluMlp", act_layer=nn.SiLU, bias=False), "swiglu"),
    "Dinov2": (lambda: hugging_face("Dinov2Model", use_swiglu_ffn=True), "swiglu"),
    "Dinov2WithRegisters": (lambda: hugging_face("Dinov2WithRegistersModel", use_swiglu_ffn=True), "swiglu"),
    "DINOv3": (lambda: hugging_face("DINOv3ViTModel", **DINOV3), "swiglu"),
}  # fmt: skip


def made(name: str, device: torch.device) -> tuple[nn.Module, Tensor]:
    """With random parameters, and an image for it."""
    torch.manual_seed(0)
    model = MODELS[name][0]().to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    size = 28 if name == "SwiGLUPacked" else 32
    return model, torch.randn(2, 3, size, size, device=device)


def run(model: nn.Module, image: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits or tokens, and every parameter's gradient."""
    model.zero_grad(set_to_none=True)
    out = model(image)
    out = out if isinstance(out, Tensor) else out.last_hidden_state
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out))
    return out.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def mlps(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if name.endswith(".mlp")}


@pytest.mark.parametrize("name", MODELS)
def test_whole_blocks_are_fused(name: str, device: torch.device) -> None:
    model, image = made(name, device)
    want, gradients = run(model, image)
    exact, exact_gradients = run(copy.deepcopy(model).double(), image.double())
    report = fastvit.accelerate(model, strict=True)
    assert report.fused("attention") == report.fused("MLP") == (2, 2)
    assert all(outcome(report, name)[0] == "part of" for name in mlps(model))
    with Calls() as calls:
        got, fused = run(model, image)
    assert calls.names.count("fastvit::gated_act_fwd") == 2
    assert_as_accurate(got, want, exact, what="output")
    assert fused.keys() == gradients.keys()
    largest = max(float(g.abs().max()) for g in exact_gradients.values())
    for key, gradient in exact_gradients.items():
        difference = float((fused[key] - gradient).abs().max())
        assert difference <= 1e-5 * max(float(gradient.abs().max()), 1e-2 * largest), key


@pytest.mark.parametrize("name", MODELS)
def test_a_gated_mlp_alone(name: str, device: torch.device) -> None:
    """(..., D), of any number of dimensions."""
    model, _ = made(name, device)
    mlp = next(iter(mlps(model).values()))
    D = next(p for p in mlp.parameters() if p.dim() == 2).shape[1]
    x = torch.randn(3, D, device=device, requires_grad=True)

    def both(mlp: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        out = mlp(x)
        return out, torch.autograd.grad(out.square().sum(), x)[0]

    want, exact = both(mlp, x), both(copy.deepcopy(mlp).double(), x.double())
    alone = nn.ModuleList([mlp])
    assert fastvit.accelerate(alone, strict=True).fused("MLP") == (1, 1)
    for triple in zip(both(mlp, x), want, exact, strict=True):
        assert_as_accurate(*triple, factor=GRADIENT, what=name)


@pytest.mark.parametrize("name", ["SwiGLU of gelu, with a norm", "GluMlp, value first"])
def test_dropouts_are_those_of_the_layers(name: str, device: torch.device) -> None:
    """Behind the product, before the norm, and behind fc2: of everything but one seed's share."""
    model, _ = made(name, device)
    mlp = next(iter(mlps(model).values()))
    mlp.train()
    assert read_timm.read_mlp(mlp).inner_norm is not None
    mlp.drop1.p = mlp.drop2.p = 0.25
    read = read_timm.read_mlp(mlp)
    assert (read.drop1, read.drop2, read.activation) == (0.25, 0.25, MODELS[name][1])
    x = torch.randn(64, 192, device=device)
    with torch.no_grad():
        out = run_blocks.run_mlp(x, read)
        assert 0.2 < float((out == 0).double().mean()) < 0.3
        mlp.drop1.p = 0.0  # fc2's alone
        dropped, whole = run_blocks.run_mlp(x, read_timm.read_mlp(mlp)), mlp.eval()(x)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], whole[kept] / 0.75, rtol=1e-4, atol=1e-5)


def test_other_gates_are_left_alone(device: torch.device) -> None:
    layers = import_library("timm").layers
    for mlp, reason in (
        (layers.GluMlp(64), "act is nn.Sigmoid"),
        (layers.GluMlp(64, act_layer=nn.ReLU), "a gate with relu"),
        (layers.SwiGLU(64, act_layer=partial(nn.GELU, approximate="tanh")), "a gate with gelu_tanh"),
        (layers.SwiGLU(64, norm_layer=layers.SimpleNorm), "norm is timm.layers.norm.SimpleNorm"),
    ):
        model = nn.ModuleList([mlp]).to(device)
        report = fastvit.accelerate(model)
        assert report.fused("MLP")[0] == 0
        assert outcome(report, "0") == ("skipped", reason)
    convolutions = nn.ModuleList([layers.GluMlp(64, act_layer=nn.SiLU, use_conv=True)])
    assert not fastvit.accelerate(convolutions).accelerated


@defined_in("transformers.models.dinov2.modeling_dinov2")
class Dinov2SwiGLUFFN(nn.Module):
    """As earlier versions of transformers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.weights_in, self.weights_out = nn.Linear(64, 2 * 40), nn.Linear(40, 64)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.weights_in(x).chunk(2, dim=-1)
        return self.weights_out(nn.functional.silu(gate) * value)


def test_both_layers_in_one_of_transformers(device: torch.device) -> None:
    model, x = nn.Sequential(Dinov2SwiGLUFFN()).to(device), torch.randn(2, 5, 64, device=device)
    want = model(x)
    assert fastvit.accelerate(model, strict=True).fused("MLP") == (1, 1)
    torch.testing.assert_close(model(x), want, rtol=1e-5, atol=1e-5)
