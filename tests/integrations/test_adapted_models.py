"""Linear layers with adapters of peft, or quantised by PyTorch: these layers run as modules, and all else stays fused,
with the library's own outputs and gradients."""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from known_models import built, parallel
from library_imports import import_library
from library_models import (
    Step,
    accelerate_and_compare,
    assert_steps_agree,
    fused_only,
    gated_vit,
    hugging_face,
    outcome,
    output_of,
    step,
    torchvision_vit,
    vit,
)
from models import Calls, accelerate_as_it_was, close, randomised
from oracle import assert_as_accurate
from torch import Tensor, nn

import fastvit

LORA = "peft.tuners.lora.layer.Linear"
UNFUSED = {"aten::native_layer_norm", "aten::_softmax"}


@pytest.fixture
def peft():
    return import_library("peft")


@pytest.fixture
def image() -> Tensor:
    return torch.randn(2, 3, 32, 32)


def run(model: nn.Module, image: Tensor) -> tuple[Step, list[str]]:
    """Return a step, and the operators that ran."""
    with Calls() as calls:
        result = step(model, lambda m: m(image))
    return result, calls.names


def attention_count(names: list[str]) -> int:
    return names.count("fastvit::attention_fwd")


# ---- LoRA ----


def adapted(peft: Any, model: nn.Module, targets: list[str] | str, **options: Any) -> nn.Module:
    """Return the model with random adapters. peft's model wraps the same modules."""
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, **options)
    return peft.get_peft_model(model, config).base_model.model


timm_vit = partial(vit, init_values=0.3)
scale_norms = partial(vit, qk_norm=True, scale_attn_norm=True, scale_mlp_norm=True, norm_layer="rmsnorm")
SIZES: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "num_heads": 2, "depth": 2, "num_classes": 7}
ours = partial(fastvit.create_model, "vit_tiny_patch16_224", **SIZES)
ADAPTED: dict[str, tuple[Callable[[], nn.Module], list[str] | str, dict[str, Any]]] = {  # the targets and options
    "timm, attention": (timm_vit, ["qkv", "attn.proj"], {}),
    "timm, fc2": (timm_vit, ["fc2"], {}),
    "DoRA and dropout": (timm_vit, ["qkv", "fc2"], {"use_dora": True, "lora_dropout": 0.5}),
    "ViT, q and v": (partial(hugging_face, "ViTModel"), ["q_proj", "v_proj"], {}),
    "ViT, all": (partial(hugging_face, "ViTModel"), "all-linear", {}),
    "SwiGLU, gate": (partial(gated_vit, "SwiGLU", norm=True), ["fc1_g"], {}),
    "GluMlp": (partial(gated_vit, "GluMlp", act_layer=nn.GELU), ["fc1"], {}),
    "norms": (scale_norms, ["qkv", "attn.proj", "fc1"], {}),
    "torchvision": (torchvision_vit, ["mlp.0"], {}),
    "fastvit": (ours, ["qkv", "fc1"], {}),
}


@pytest.mark.parametrize(
    ("name", "order"),
    [*((name, "before") for name in ADAPTED), ("timm, attention", "after"), ("ViT, q and v", "after")],
)
def test_fused_attention_stays_and_gradients_agree(peft, image: Tensor, name: str, order: str) -> None:
    """In training: what is dropped is the same from the same seed."""
    make, targets, options = ADAPTED[name]
    plain = make()
    model = copy.deepcopy(plain)
    if order == "after":
        fastvit.accelerate(model)
    torch.manual_seed(2)
    model = adapted(peft, model, targets, **options).train()
    torch.manual_seed(2)
    want, _ = run(adapted(peft, plain, targets, **options).train(), image)
    if order == "before":
        fastvit.accelerate(model, strict=True)
    got, names = run(model, image)
    assert any("lora_A" in key for key in got.gradients)
    assert not any("base_layer" in key for key in got.gradients)
    assert_steps_agree(got, want)
    assert attention_count(names) == 2
    assert not UNFUSED.intersection(names)


@pytest.mark.parametrize(
    ("name", "targets"), [("SAM, windows with padding", ["qkv", "attn.proj"]), ("Qwen2.5-VL", ["qkv", "proj"])]
)
def test_layers_over_a_grid_and_of_several_lengths(peft, name: str, targets: list[str]) -> None:
    known = built(name, torch.device("cpu"))
    model = adapted(peft, copy.deepcopy(known.model), targets)
    report = accelerate_and_compare(model, known.call)
    assert report.fused("attention")[0] == known.known.count


@pytest.mark.parametrize("autocast", [False, True])
def test_a_base_in_16_bits_and_autocast(peft, image: Tensor, autocast: bool) -> None:
    model = adapted(peft, vit(), ["qkv", "fc2"]).eval()
    for name, tensor in model.named_parameters() if not autocast else ():
        tensor.data = tensor.data if "lora" in name else tensor.data.bfloat16()
    image = image if autocast else image.bfloat16()
    exact = copy.deepcopy(model).double()(image.double())
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        own = model(image)
        fastvit.accelerate(model, strict=True)
        with fused_only():
            assert_as_accurate(model(image), own, exact, what="output")


def test_merged_and_disabled_adapters_are_plain_layers(peft, image: Tensor) -> None:
    model, plain = adapted(peft, vit(), ["qkv", "attn.proj", "fc1"]), vit().requires_grad_(False)
    layers = [m for m in model.modules() if hasattr(m, "merge")]

    def check() -> tuple[Tensor, bool]:
        """Check the output, and return it and whether the model calls what a plain model calls."""
        with torch.no_grad(), Calls() as calls:
            got = model(image)
        bare = copy.deepcopy(model)
        fastvit.restore(bare)
        assert close(got, bare(image))
        return got, calls.names == plain_calls.names

    fastvit.accelerate(plain)
    with torch.no_grad(), Calls() as plain_calls:
        plain(image)
    fastvit.accelerate(model)
    before, as_plain = check()
    assert not as_plain
    for layer in layers:
        layer.merge()
    merged, as_plain = check()
    assert as_plain
    assert close(merged, before)
    for layer in layers:
        layer.unmerge()
        layer.enable_adapters(False)
    disabled, as_plain = check()
    assert as_plain
    assert not close(disabled, before)
    for layer in layers:
        layer.enable_adapters(True)
        layer.merge()
        layer.enable_adapters(False)  # its next forward takes the adapter out of the weight
    assert not check()[1]
    assert not any(layer.merged for layer in layers)


# ---- int8 ----


def dynamic(model: nn.Module) -> nn.Module:
    """A quantised copy, by PyTorch."""
    quantization = pytest.importorskip("torch.ao.quantization")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch.ao is deprecated
        return quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


@pytest.mark.parametrize(
    "make",
    [timm_vit, partial(gated_vit, "SwiGLU"), partial(hugging_face, "Dinov2Model"), ours],
    ids=["timm", "SwiGLU", "transformers", "fastvit"],
)
def test_all_but_quantised_layers_stays_fused(make: Callable[[], nn.Module], image: Tensor) -> None:
    plain = randomised(make().eval().requires_grad_(False), std=0.05)
    exact = output_of(copy.deepcopy(plain).double()(image.double()))
    model, singly = dynamic(plain), dynamic(plain)
    for module in singly.modules():  # a hook inside each fused span
        module.register_forward_hook(lambda *_: None)
    report = fastvit.accelerate(model, strict=True)
    with fused_only(), Calls() as calls:
        got = output_of(model(image))
    # Not equal: if attention rounds differently, an input of a layer may become the next int8
    assert_as_accurate(got, output_of(singly(image)), exact, what="output")
    assert torch.cosine_similarity(got.flatten().double(), exact.flatten(), dim=0) > 0.99
    assert (got - exact).abs().max() > 1e-3 * exact.abs().max()  # it is quantised
    assert report.fused("attention") == (2, 2)
    assert attention_count(calls.names) == 2
    assert not UNFUSED.intersection(calls.names)


# ---- reports ----


def test_the_report_names_layers_that_run_as_modules(peft) -> None:
    report = fastvit.accelerate(adapted(peft, vit(), ["qkv"]))
    expected = f"layer_norm, attention_qkvpacked, linear, layer_norm_mlp; attn.qkv as {LORA}"
    assert outcome(report, "blocks.0") == ("accelerated", expected)
    assert outcome(report, "blocks.0.attn.qkv") == ("as it was", "called in blocks.0")
    report = fastvit.accelerate(dynamic(vit()))
    expected = "layer_norm, attention_qkvpacked; attn.qkv, attn.proj, mlp.fc1, mlp.fc2 as torch.ao."
    assert outcome(report, "blocks.0")[1].startswith(expected)
    assert (report.fused("attention"), report.fused("MLP")) == ((2, 2), (0, 2))


def test_a_layer_of_attention_and_the_mlp_in_one(image: Tensor) -> None:
    """The whole block runs by its modules, because an op reads that layer in two parts."""
    model = dynamic(parallel()())
    report = accelerate_as_it_was(model, lambda: model(image))
    reason = "an adapter or a quantised weight on a layer that is attention's and the MLP's"
    assert outcome(report, "blocks.0") == ("skipped", reason)
