"""Accelerated models whose MLPs have a gate: every known class, whole blocks, and MLPs that are left alone."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from library_imports import import_library
from library_models import accelerate_and_compare, gated_vit, hugging_face, outcome, vit
from models import Calls, randomised
from stand_ins import defined_in
from torch import Tensor, nn

import fastvit
from fastvit.blocks import read_timm
from fastvit.blocks import run as run_blocks

GIANT = {"img_size": 28, "embed_dim": 96, "mlp_ratio": 4}
DINOV3 = {"use_gated_mlp": True, "hidden_act": "silu", "num_register_tokens": 3}


# name -> the model, and the activation that its MLP is read with
MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "SwiGLU": (partial(gated_vit, "SwiGLU"), "swiglu"),
    "SwiGLU of gelu, with a norm": (partial(gated_vit, "SwiGLU", act_layer=nn.GELU, norm=True), "geglu"),
    "SwiGLU with RMSNorms": (partial(gated_vit, "SwiGLU", norm=True, norms="rmsnorm"), "swiglu"),
    "SwiGLUPacked": (lambda: vit("vit_giant_patch14_reg4_dinov2", **GIANT, num_heads=2, num_classes=7), "swiglu"),
    "GluMlp, value first": (partial(gated_vit, "GluMlp", act_layer=nn.GELU, norm=True), "geglu"),
    "GluMlp without biases": (partial(gated_vit, "GluMlp", act_layer=nn.SiLU, bias=False), "swiglu"),
    "Dinov2": (partial(hugging_face, "Dinov2Model", use_swiglu_ffn=True), "swiglu"),
    "Dinov2WithRegisters": (partial(hugging_face, "Dinov2WithRegistersModel", use_swiglu_ffn=True), "swiglu"),
    "DINOv3": (partial(hugging_face, "DINOv3ViTModel", **DINOV3), "swiglu"),
}


def made(name: str, device: torch.device) -> tuple[nn.Module, Tensor]:
    """Return the model with random parameters, and an image for it."""
    model = randomised(MODELS[name][0]()).to(device)
    size = 28 if name == "SwiGLUPacked" else 32
    return model, torch.randn(2, 3, size, size, device=device)


def mlps(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if name.endswith(".mlp")}


@pytest.mark.parametrize("name", MODELS)
def test_whole_blocks_and_mlps_alone_are_fused(name: str, device: torch.device) -> None:
    model, image = made(name, device)
    with Calls() as calls:
        report = accelerate_and_compare(model, lambda m: m(image), strict=True)
    assert report.fused("attention") == report.fused("MLP") == (2, 2)
    assert all(outcome(report, name)[0] == "part of" for name in mlps(model))
    assert calls.names.count("fastvit::gated_act_fwd") == 2
    fastvit.restore(model)
    mlp = next(iter(mlps(model).values()))
    D = next(p for p in mlp.parameters() if p.dim() == 2).shape[1]
    x = torch.randn(3, D, device=device)  # any number of dimensions
    report = accelerate_and_compare(nn.ModuleList([mlp]), lambda m: m[0](x), strict=True)
    assert report.fused("MLP") == (1, 1)


@pytest.mark.parametrize("name", ["SwiGLU of gelu, with a norm", "GluMlp, value first"])
def test_dropouts_are_those_of_the_layers(name: str, device: torch.device) -> None:
    """One after the product, before the norm, and one after fc2."""
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
    """The class of earlier versions of transformers."""

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
