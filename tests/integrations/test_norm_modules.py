"""Norms of other libraries as modules: how each is read, and which are left alone."""

import copy
import importlib
from collections.abc import Callable
from functools import partial

import pytest
import torch
from library_imports import import_library
from library_models import outcome, vit
from models import assert_same_step, randomised, step
from oracle import GRADIENT, assert_as_accurate, inputs
from torch import nn

import fastvit
from fastvit import eva_layers, layers, reference
from fastvit.integrations.transformers.classes import RMS_NORM
from fastvit.modules.pooling import AttentionPoolLatent

D = 32


def of_timm(name: str, **options: object) -> Callable[[], nn.Module]:
    return lambda: getattr(import_library("timm").layers, name)(D, **options)


def of_transformers(qualified: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import_library("transformers")
        module, _, name = qualified.rpartition(".")
        return getattr(importlib.import_module(module), name)(D, eps=1e-5)

    return build


# Inputs are of the size of eps, so that a wrong eps shows
NORMS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "nn.RMSNorm": (lambda: nn.RMSNorm(D), "rms_norm"),
    "nn.RMSNorm, eps": (lambda: nn.RMSNorm(D, eps=1e-5), "rms_norm"),
    "timm.RmsNorm": (of_timm("RmsNorm", eps=1e-5), "rms_norm"),
    "timm.RmsNormFp32": (of_timm("RmsNormFp32", eps=1e-5), "rms_norm"),
    "nn.RMSNorm without weight": (lambda: nn.RMSNorm(D, elementwise_affine=False), "rms_norm"),
    "nn.LayerNorm without weight": (lambda: nn.LayerNorm(D, eps=1e-5, elementwise_affine=False), "layer_norm"),
    "nn.LayerNorm without bias": (lambda: nn.LayerNorm(D, eps=1e-5, bias=False), "layer_norm"),
    **{name.rpartition(".")[2]: (of_transformers(name), "rms_norm") for name in sorted(map(str, RMS_NORM))},
}


def made(name: str, device: torch.device) -> nn.Module:
    return randomised(NORMS[name][0]()).to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", NORMS)
def test_as_the_librarys(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """The mean square of rows is about eps: 1e-5, or PyTorch's 1e-7."""
    norm = made(name, device).to(dtype)
    scale = 3e-4 if name == "nn.RMSNorm" else 3e-3
    x = (inputs("normal", 2, 5, D, dtype=torch.float64, device=device) * scale).to(dtype)
    own = step(norm, x)
    double = copy.deepcopy(norm).double()
    if getattr(norm, "eps", 0.0) is None:
        double.eps = torch.finfo(torch.float32).eps  # as for dtype; float64 has its own
    exact = step(double, x.double())
    model = nn.Sequential(norm)
    report = fastvit.accelerate(model, strict=True)
    assert outcome(report, "0") == ("accelerated", NORMS[name][1])
    for got, *others in zip(*(found.values() for found in (step(model, x), own, exact)), strict=True):
        assert_as_accurate(got, *others, factor=GRADIENT, what=name)


def test_pytorchs_eps_in_float64(device: torch.device) -> None:
    norm = nn.RMSNorm(D, dtype=torch.float64, device=device)
    x = torch.full((2, D), 1e-8, dtype=torch.float64, device=device)
    want = norm(x)
    fastvit.accelerate(norm, strict=True)
    torch.testing.assert_close(norm(x), want)
    assert not torch.allclose(want, x * (x.square().mean(-1, keepdim=True) + 1e-7).rsqrt())


@pytest.mark.parametrize("name", [name for name in NORMS if name != "nn.LayerNorm without bias"])
def test_dtypes_under_autocast(name: str, device: torch.device) -> None:
    """Inputs are bfloat16 after a linear layer, and float32 after a sum."""
    norm = made(name, device)
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(2, 5, D, dtype=dtype, device=device)
        with torch.autocast(device.type, torch.bfloat16), torch.no_grad():
            want = norm(x)
            with fastvit.accelerated(norm, strict=True):
                got = norm(x)
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-2)


def test_what_is_left_alone(device: torch.device) -> None:
    layers = import_library("timm").layers
    layers.set_fast_norm(True)
    try:
        fast = layers.RmsNorm(D)
    finally:
        layers.set_fast_norm(False)
    for norm, reason in (
        (fast, "timm's fast norm is on, which rounds otherwise"),
        (nn.RMSNorm((4, D)), "it normalises more than the last dimension"),
    ):
        report = fastvit.accelerate(nn.ModuleList([norm]).to(device))
        assert outcome(report, "0") == ("skipped", reason)


def test_simple_norm_is_another_formula() -> None:
    """It divides x by its deviation, without centring."""
    report = fastvit.accelerate(vit(norm_layer="simplenorm", scale_attn_norm=True))
    assert outcome(report, "blocks.0") == ("skipped", "norm1 is timm.layers.norm.SimpleNorm")
    assert outcome(report, "blocks.0.attn") == ("skipped", "norm is timm.layers.norm.SimpleNorm")
    assert outcome(report, "norm") == ("as it was", "")


def test_the_report_names_the_norms_that_run_by_themselves() -> None:
    model = vit(scale_attn_norm=True, scale_mlp_norm=True, norm_layer="rmsnorm")
    block, branches = fastvit.accelerate(model), fastvit.accelerate(nn.ModuleList([model.blocks[0].attn]))
    assert outcome(block, "blocks.0") == ("accelerated", "layer_norm_attention, layer_norm_mlp")
    assert outcome(branches, "0") == ("accelerated", "attention_qkvpacked, rms_norm, linear")


@pytest.mark.parametrize("kind", ["qkv", "proj", "fc2"])
def test_a_hook_on_the_layer_next_to_an_inner_norm(kind: str, device: torch.device) -> None:
    """That half runs its modules one by one."""
    model = vit(scale_attn_norm=True, scale_mlp_norm=True, norm_layer="rmsnorm", num_classes=3).to(device)
    image = torch.randn(2, 3, 32, 32, device=device)
    fastvit.accelerate(model, strict=True)
    want, seen = model(image), []
    layer = {"qkv": model.blocks[0].attn.qkv, "proj": model.blocks[0].attn.proj, "fc2": model.blocks[0].mlp.fc2}[kind]
    layer.register_forward_hook(lambda *_: seen.append(1))
    with pytest.warns(UserWarning, match=f"{kind} has hooks"):
        torch.testing.assert_close(model(image), want, rtol=1e-4, atol=1e-5)
    assert seen


TAKES_NAMES: dict[str, Callable[..., nn.Module]] = {
    "Attention": partial(fastvit.Attention, 32, 2, qk_norm=True),
    "Mlp": partial(fastvit.Mlp, 32),
    "SwiGLU": partial(layers.SwiGLU, 32),
    "Block": partial(fastvit.Block, 32, 2, qk_norm=True),
    "PatchEmbed": partial(fastvit.PatchEmbed, 16, 4, embed_dim=32),
    "EvaBlock": partial(eva_layers.EvaBlock, 32, 2, scale_mlp=True, swiglu_mlp=True),
    "AttentionPoolLatent": partial(AttentionPoolLatent, 32, 2),
    "reference.Block": partial(reference.Block, 32, 2, qk_norm=True),
    "reference.PatchEmbed": partial(reference.PatchEmbed, 16, 4, embed_dim=32),
}


@pytest.mark.parametrize("name", TAKES_NAMES)
def test_norm_layer_takes_names(name: str) -> None:
    module = TAKES_NAMES[name](norm_layer="rmsnorm")
    kinds = {type(m) for m in module.modules() if "norm" in type(m).__name__.lower()}
    assert kinds == {reference.RMSNorm if name.startswith("reference") else fastvit.RMSNorm}
    if not name.startswith("reference"):
        with pytest.raises(
            ValueError, match=r"norm_layer must be .* \['layernorm', 'rmsnorm'\], got 'rms_norm'; did you"
        ):
            TAKES_NAMES[name](norm_layer="rms_norm")


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_norms_without_weight(kind: str, device: torch.device) -> None:
    """Alone and in blocks, both halves of which are fused; norms inside attention run as modules."""
    norm, plain = {"layer": (fastvit.LayerNorm, nn.LayerNorm), "rms": (fastvit.RMSNorm, nn.RMSNorm)}[kind]
    norm, plain = partial(norm, elementwise_affine=False), partial(plain, elementwise_affine=False, eps=1e-6)
    for ours, theirs in (
        (norm(D), plain(D)),
        (fastvit.Block(D, 2, norm_layer=norm), reference.Block(D, 2, norm_layer=plain)),
        (fastvit.Block(D, 2, norm_layer=norm, qk_norm=True), reference.Block(D, 2, norm_layer=plain, qk_norm=True)),
    ):
        theirs.to(device).load_state_dict(ours.to(device).state_dict())
        assert not any("norm" in key for key in ours.state_dict())
        x = torch.randn(2, 7, D, device=device)
        for model in (ours, torch.compile(ours, backend="aot_eager", fullgraph=True)):
            assert_same_step(model, theirs, x)
    fused = fastvit.accelerate(vit(norm_layer=plain), strict=True)
    assert outcome(fused, "blocks.0") == ("accelerated", "layer_norm_attention, layer_norm_mlp")
