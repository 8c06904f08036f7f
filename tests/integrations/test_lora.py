"""LoRA of peft in accelerated models: attention stays fused, outputs and all gradients are peft's own."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from known_models import built
from library_imports import import_library
from library_models import Call, Step, assert_steps_agree, gated_vit, hugging_face, outcome, step, torchvision_vit, vit
from models import Calls, accelerate_as_it_was, close, randomised
from oracle import assert_as_accurate
from torch import Tensor, nn

import fastvit

LORA = "peft.tuners.lora.layer.Linear"


@pytest.fixture
def peft():
    return import_library("peft")


@pytest.fixture
def image() -> Tensor:
    return torch.randn(2, 3, 32, 32)


timm_vit = partial(vit, init_values=0.3, drop_path_rate=0.3, proj_drop_rate=0.2)
scale_norms = partial(vit, scale_attn_norm=True, scale_mlp_norm=True, norm_layer="rmsnorm")
ours = partial(fastvit.create_model, "vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=64, num_heads=2)
MODELS: list[tuple[str, Callable[[], nn.Module], list[str]]] = [
    ("timm", timm_vit, ["qkv", "attn.proj"]),
    ("timm", timm_vit, ["fc1"]),
    ("timm", timm_vit, ["fc2"]),
    ("ViT", partial(hugging_face, "ViTModel"), ["q_proj", "v_proj"]),
    ("ViT", partial(hugging_face, "ViTModel"), ["all-linear"]),
    ("SwiGLU", partial(gated_vit, "SwiGLU", norm=True), ["fc1_g"]),
    ("SwiGLU", partial(gated_vit, "SwiGLU", norm=True), ["fc1_x", "fc2"]),
    ("GluMlp", partial(gated_vit, "GluMlp", act_layer=nn.GELU), ["fc1"]),
    ("scale norms", scale_norms, ["attn.proj", "fc1"]),
    ("norms of q and k", partial(vit, qk_norm=True), ["qkv"]),
    ("torchvision", torchvision_vit, ["mlp.0"]),
    ("fastvit", ours, ["qkv", "fc1"]),
]


def adapted(peft: Any, model: nn.Module, targets: list[str], **options: Any) -> nn.Module:
    """Return the model with random adapters. peft's model wraps the same modules."""
    chosen = targets[0] if targets == ["all-linear"] else targets
    config = peft.LoraConfig(r=4, target_modules=chosen, init_lora_weights=False, **options)
    return peft.get_peft_model(model, config).base_model.model


def run(model: nn.Module, image: Tensor) -> tuple[Step, list[str]]:
    """Return a step, and the operators that ran."""
    with Calls() as calls:
        result = step(model, lambda m: m(image))
    return result, calls.names


def attention_count(names: list[str]) -> int:
    return sum(name in ("fastvit::attention_fwd", "fastvit::attention_qkvpacked_fwd") for name in names)


@pytest.mark.parametrize(
    ("model", "order"),
    [*((model, "adapt, accelerate") for model in MODELS), *((MODELS[i], "accelerate, adapt") for i in (0, 3))],
    ids=lambda value: value if isinstance(value, str) else f"{value[0]}-{value[2]}",
)
def test_fused_attention_stays_and_gradients_agree(peft, image: Tensor, model: Any, order: str) -> None:
    _, make, targets = model
    plain = make()
    model = copy.deepcopy(plain)
    if order == "accelerate, adapt":
        fastvit.accelerate(model)
    torch.manual_seed(2)
    model = adapted(peft, model, targets).eval()
    torch.manual_seed(2)
    want, _ = run(adapted(peft, plain, targets).eval(), image)
    if order == "adapt, accelerate":
        fastvit.accelerate(model, strict=True)
    got, names = run(model, image)
    assert any("lora_A" in name for name in got.gradients)
    assert not any("base_layer" in name for name in got.gradients)
    assert_steps_agree(got, want)
    assert attention_count(names) == 2
    assert not {"aten::native_layer_norm", "aten::_softmax"}.intersection(names)


@pytest.mark.parametrize("name", ["SAM, windows with padding", "Qwen2.5-VL"])
def test_layers_over_a_grid_and_of_several_lengths(peft, name: str) -> None:
    known = built(name, torch.device("cpu"))
    model = adapted(peft, copy.deepcopy(known.model), ["qkv", "proj"] if "Qwen" in name else ["qkv", "attn.proj"])
    want = step(model, known.call)
    report = fastvit.accelerate(model)
    assert report.fused("attention")[0] == known.known.count
    assert_steps_agree(step(model, known.call), want)


def test_dropouts_draw_as_without(peft, image: Tensor) -> None:
    """LoRA's dropout and timm's stochastic depth draw the same from the same seed."""
    model = adapted(peft, timm_vit(), ["qkv", "attn.proj"], lora_dropout=0.5).train()
    drops = {name: m for name, m in model.named_modules() if isinstance(m, nn.Dropout)}
    for name, drop in drops.items():
        drop.train("lora_dropout" in name)  # the others are fused, and draw otherwise
    assert sum(drop.training for drop in drops.values()) == 4
    want, _ = run(model, image)
    evaluated = copy.deepcopy(model).eval()(image)
    fastvit.accelerate(model)
    got, _ = run(model, image)
    assert_steps_agree(got, want)
    assert not close(got.output, evaluated)


@pytest.mark.parametrize("variant", ["dora", "bfloat16 base", "autocast"])
def test_variants_of_lora_keep_working(peft, image: Tensor, variant: str) -> None:
    model = adapted(peft, vit(), ["qkv", "fc2"], use_dora=variant == "dora")
    if variant == "bfloat16 base":
        for name, tensor in model.named_parameters():
            tensor.data = tensor.data if "lora" in name else tensor.data.bfloat16()
        image = image.bfloat16()
    exact = copy.deepcopy(model).double()(image.double())
    with torch.autocast("cpu", torch.bfloat16, enabled=variant == "autocast"):
        want, _ = run(model, image)
        fastvit.accelerate(model, strict=True)
        got, names = run(model, image)
    assert attention_count(names) == 2
    assert got.output.dtype is want.output.dtype
    assert_as_accurate(got.output, want.output, exact, what="output")
    if variant == "dora":
        assert_steps_agree(got, want)


def test_merged_and_disabled_adapters_are_plain_layers(peft, image: Tensor) -> None:
    model, plain = adapted(peft, vit(), ["qkv", "attn.proj", "fc1"]), vit()
    layers = [m for m in model.modules() if hasattr(m, "merge")]
    fastvit.accelerate(plain)
    _, plain_names = run(plain, image)

    def check(runs_plain_layers: bool) -> Tensor:
        fastvit.restore(model)
        want = copy.deepcopy(model)(image)
        fastvit.accelerate(model)
        got, names = run(model, image)
        assert close(got.output, want)
        assert (len(names) <= len(plain_names)) == runs_plain_layers
        return want

    before = check(runs_plain_layers=False)
    for layer in layers:
        layer.merge()
    assert close(check(runs_plain_layers=True), before)
    for layer in layers:
        layer.unmerge()
        layer.enable_adapters(False)
    assert not close(check(runs_plain_layers=True), before)
    for layer in layers:
        layer.enable_adapters(True)
        layer.merge()
        layer.enable_adapters(False)  # its next forward takes the adapter out of the weight
    check(runs_plain_layers=False)
    assert not any(layer.merged for layer in layers)


def test_the_report_names_layers_that_run_as_modules(peft) -> None:
    report = fastvit.accelerate(adapted(peft, vit(), ["qkv"]))
    expected = f"layer_norm, attention_qkvpacked, linear, layer_norm_mlp; attn.qkv as {LORA}"
    assert outcome(report, "blocks.0") == ("accelerated", expected)
    assert outcome(report, "blocks.0.attn.qkv") == ("as it was", "called in blocks.0")
    assert outcome(report, "blocks.0.attn.proj") == ("part of", "blocks.0")
    report = fastvit.accelerate(adapted(peft, hugging_face("CLIPVisionModel"), ["all-linear"]))
    status, detail = outcome(report, "encoder.layers.0")
    assert status == "accelerated"
    ops, _, called = detail.partition("; ")
    assert ops == "layer_norm, attention"
    assert {"self_attn.v_proj", "self_attn.out_proj", "mlp.fc2"} < {*called.removesuffix(f" as {LORA}").split(", ")}
    assert (report.fused("attention"), report.fused("MLP")) == ((2, 2), (0, 2))


@pytest.mark.parametrize(("tuner", "order"), [("Lora", "before"), ("Lora", "after"), ("IA3", "before")])
def test_other_tuners_and_an_adapted_patch_embedding(peft, image: Tensor, tuner: str, order: str) -> None:
    """They run their own forward. The target proj includes the convolution patch_embed.proj."""
    options = {"feedforward_modules": []} if tuner == "IA3" else {"init_lora_weights": False}
    model = vit()
    if order == "after":
        fastvit.accelerate(model)
    config = getattr(peft, f"{tuner}Config")(target_modules=["qkv", "proj"], **options)
    model = peft.get_peft_model(model, config).base_model.model.eval()
    if tuner == "IA3":
        randomised(model)
    kind = type(model.patch_embed.proj)
    got = [model(image)] if order == "after" else []
    fastvit.restore(model)
    want = model(image)
    report = fastvit.accelerate(model)
    assert all(close(out, want) for out in (*got, model(image)))
    reason = f"its convolution is {kind.__module__}.{kind.__name__}, in timm.layers.patch_embed.PatchEmbed"
    assert outcome(report, "patch_embed") == ("skipped", reason)
    if tuner == "IA3":
        assert outcome(report, "blocks.0") == ("skipped", "qkv is peft.tuners.ia3.layer.Linear")


def test_under_compile(peft, image: Tensor) -> None:
    model = adapted(peft, vit(depth=1, init_values=0.3), ["qkv", "fc1"])
    call: Call = lambda m: m(image)  # noqa: E731
    want = step(model, call)
    fastvit.accelerate(model)
    torch._dynamo.reset()
    assert_steps_agree(step(torch.compile(model, backend="aot_eager", fullgraph=True), call), want)


def test_a_mask_with_adapters(peft) -> None:
    """Attention between layers that are called gets the mask."""
    block = adapted(peft, vit(), ["qkv"]).blocks[0].eval()
    x, mask = torch.randn(2, 5, 64), torch.rand(2, 1, 5, 5) > 0.3
    mask[..., 0] = True
    unmasked = block(x)
    report = accelerate_as_it_was(block, lambda: block(x, attn_mask=mask))
    assert outcome(report, "")[0] == "accelerated"
    assert not close(block(x, attn_mask=mask), unmasked)
