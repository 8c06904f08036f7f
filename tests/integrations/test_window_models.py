"""Accelerated models with attention within shifted windows: Swin of timm and transformers."""

import copy
from typing import Any

import pytest
import torch
from library_imports import import_library
from library_models import accelerate_and_compare, outcome
from models import randomised
from oracle import assert_as_accurate
from torch import Tensor, nn

import fastvit
from fastvit.integrations.transformers import swin

BLOCK = "layer_norm_linear, attention_windows, linear, layer_norm_mlp"
# whole windows and one window; windows that padding fills up; windows larger than the grid
SIZES = {"whole": (56, 7), "padded": (64, 7), "larger": (16, 7)}


def of_timm(size: int = 56, window: int = 7, **options: Any) -> nn.Module:
    """Two stages of a block without a shift and one with it, with random parameters."""
    sizes = {"img_size": size, "window_size": window, "embed_dim": 32, "depths": (2, 2), "num_heads": (2, 4)}
    kind = import_library("timm").models.swin_transformer.SwinTransformer
    return randomised(kind(**sizes, num_classes=5, **options).eval())


def of_transformers(size: int = 56, window: int = 7, **options: Any) -> nn.Module:
    transformers = import_library("transformers")
    sizes = {"image_size": size, "window_size": window, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4]}
    config = transformers.SwinConfig(**sizes, num_labels=5, **options)
    return randomised(transformers.SwinForImageClassification(config).eval())


def logits(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    return out if isinstance(out, Tensor) else out.logits


def image(size: int = 56, device: torch.device | str = "cpu") -> Tensor:
    return torch.randn(2, 3, size, size, device=device)


TIMM: dict[str, tuple[int, dict[str, Any]]] = {
    **{name: (size, {"size": size, "window": window}) for name, (size, window) in SIZES.items()},
    "always cut": (24, {"size": 24, "always_partition": True, "window": 4}),
    "another size": (72, {"size": 56, "strict_img_size": False}),
    "windows with sides": (48, {"size": 48, "window": ((4, 6), (3, 6))}),
    "a head dimension of its own": (56, {"head_dim": 24}),
}


@pytest.mark.parametrize("case", TIMM)
def test_timm(case: str, device: torch.device) -> None:
    size, options = TIMM[case]
    model, x = of_timm(**options).to(device), image(size, device)
    report = accelerate_and_compare(model, lambda m: m(x))
    assert report.fused("attention") == report.fused("MLP") == (4, 4)
    assert outcome(report, "layers.0.blocks.1") == ("accelerated", BLOCK)


@pytest.mark.parametrize("case", ["whole", "padded"])
def test_transformers(case: str, device: torch.device) -> None:
    size, window = SIZES[case]
    model, x = of_transformers(size, window).to(device), image(size, device)
    report = accelerate_and_compare(model, lambda m: m(x).logits, strict=True)
    assert report.fused("attention") == report.fused("MLP") == (4, 4)
    assert outcome(report, "swin.encoder.layers.0.blocks.1") == ("accelerated", BLOCK)


@pytest.mark.parametrize("make", [of_timm, of_transformers])
def test_large_scores(make: Any, device: torch.device) -> None:
    """Scores of hundreds, among which the -100 that both add for the shift hides no token. float64, because errors grow
    with the scores."""
    model, x = make().to(device).double(), image(device=device).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("qkv.weight", "q_proj.weight", "k_proj.weight")):
                parameter.mul_(20)
    accelerate_and_compare(model, lambda m: logits(m, x))


def test_stochastic_depth(device: torch.device) -> None:
    """It drops the same samples as timm's. transformers draws otherwise, and for attention only."""
    model, x = of_timm(drop_path_rate=0.6).to(device).train(), image(device=device)
    accelerate_and_compare(model, lambda m: m(x))
    layer = of_transformers(drop_path_rate=0.6).train().swin.encoder.layers[-1].blocks[-1]
    block = swin.read_layer(layer).block
    assert (block.attention.drop_path, block.mlp.drop_path) == (0.6, 0.0)


@pytest.mark.parametrize("make", [of_timm, of_transformers])
def test_bfloat16_is_as_close_to_float64_as_the_library(make: Any, device: torch.device) -> None:
    model, x = make(64).to(device), image(64, device)
    with torch.no_grad():
        exact = logits(copy.deepcopy(model).bfloat16().double(), x.bfloat16().double())
        model.bfloat16()
        own = logits(model, x.bfloat16())
        fastvit.accelerate(model)
        assert_as_accurate(logits(model, x.bfloat16()), own, exact)


@pytest.mark.parametrize("make", [of_timm, of_transformers])
def test_compiled(make: Any, device: torch.device) -> None:
    model, x = make(32, 4).to(device), image(32, device)
    want = logits(model, x)
    fastvit.accelerate(model)
    torch._dynamo.reset()
    got = logits(torch.compile(model, backend="aot_eager", fullgraph=True), x)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


def test_checkpointed_layers(device: torch.device) -> None:
    model, x = of_transformers(drop_path_rate=0.0).to(device).train(), image(device=device)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    accelerate_and_compare(model, lambda m: logits(m, x))


def test_attention_weights_are_the_librarys(device: torch.device) -> None:
    """Eager attention returns them, so that no layer runs fused while they are collected."""
    model, x = of_transformers(attn_implementation="eager").to(device), image(device=device)
    with torch.no_grad():
        want = model(x, output_attentions=True).attentions
        report = fastvit.accelerate(model)
        got = model(x, output_attentions=True).attentions
    assert report.fused("attention") == (0, 4)
    torch.testing.assert_close(got, want)


def test_a_size_that_the_masks_are_not_for(device: torch.device) -> None:
    """timm's block fails for it as well, where its mask is not made in the call."""
    model = of_timm().to(device)
    block = model.layers[0].blocks[1]
    fastvit.accelerate(model)
    with pytest.warns(UserWarning, match="a grid of 21 x 21, which its mask is not for"), pytest.raises(RuntimeError):
        block(torch.randn(1, 21, 21, 32, device=device))
