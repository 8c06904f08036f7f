"""LoRA of peft in accelerated models: attention stays fused, outputs and all gradients are peft's own."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from library_imports import import_library
from library_models import Step, gated_vit, hugging_face, outcome, step, torchvision_vit, vit
from models import Calls, accelerate_as_it_was, close
from oracle import assert_as_accurate
from torch import Tensor, nn

import fastvit
from fastvit.integrations import Report

LORA = "peft.tuners.lora.layer.Linear"


@pytest.fixture
def peft():
    return import_library("peft")


@pytest.fixture
def image() -> Tensor:
    return torch.randn(2, 3, 32, 32)


def timm_vit() -> nn.Module:
    return vit(init_values=0.3, drop_path_rate=0.3, proj_drop_rate=0.2, num_classes=7)


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, list[str]]]] = {
    "timm": (timm_vit, {"attention": ["qkv", "attn.proj"], "qkv": ["qkv"], "fc1": ["fc1"], "fc2": ["qkv", "fc2"]}),
    "ViT": (partial(hugging_face, "ViTModel"), {"q, v": ["q_proj", "v_proj"], "all": ["all-linear"]}),
    "CLIP": (partial(hugging_face, "CLIPVisionModel"), {"q, k, o": ["q_proj", "k_proj", "out_proj"], "fc1": ["fc1"]}),
    "DINOv2": (partial(hugging_face, "Dinov2Model"), {"v, fc2": ["v_proj", "fc2"]}),
    "torchvision": (torchvision_vit, {"the MLP": ["mlp.0"]}),
    "SwiGLU": (
        partial(gated_vit, "SwiGLU", norm=True),
        {"gate": ["fc1_g"], "value": ["fc1_x"], "fc2": ["fc2", "qkv"]},
    ),
    "GluMlp": (partial(gated_vit, "GluMlp", act_layer=nn.GELU), {"both": ["fc1"], "fc2": ["fc2"]}),
    "scale norms": (
        partial(vit, scale_attn_norm=True, scale_mlp_norm=True, norm_layer="rmsnorm", num_classes=7),
        {"proj": ["attn.proj"], "fc1": ["fc1", "qkv"]},
    ),
    "norms of q and k": (partial(vit, qk_norm=True, num_classes=7), {"qkv": ["qkv"]}),
    "fastvit": (partial(fastvit.create_model, "vit_tiny_patch16_224", img_size=32, depth=2), {"all": ["qkv", "fc1"]}),
}
CASES = [(library, targets, "adapt, accelerate") for library, (_, kinds) in MODELS.items() for targets in kinds]
CASES += [(library, next(iter(kinds)), "accelerate, adapt") for library, (_, kinds) in MODELS.items()]


def adapted(peft: Any, model: nn.Module, targets: list[str], **options: Any) -> nn.Module:
    """Return the model with random adapters. peft's model wraps the same modules."""
    chosen = targets[0] if targets == ["all-linear"] else targets
    config = peft.LoraConfig(r=4, target_modules=chosen, init_lora_weights=False, **options)
    return peft.get_peft_model(model, config).base_model.model


def run(model: nn.Module, image: Tensor) -> tuple[Step, list[str]]:
    """Return a step, and the operators that ran."""
    with Calls() as calls:
        found = step(model, lambda m: m(image))
    return found, calls.names


def assert_same(got: Step, want: Step) -> None:
    assert close(got.output, want.output)
    assert got.gradients.keys() == want.gradients.keys()
    for name, grad in want.gradients.items():
        torch.testing.assert_close(got.gradients[name], grad, rtol=1e-4, atol=1e-4 * grad.abs().max().item(), msg=name)


def attention_count(names: list[str]) -> int:
    return sum(name in ("fastvit::attention_fwd", "fastvit::attention_qkvpacked_fwd") for name in names)


@pytest.mark.parametrize(("library", "targets", "order"), CASES)
def test_fused_attention_stays_and_gradients_agree(peft, image: Tensor, library: str, targets: str, order: str) -> None:
    make, kinds = MODELS[library]
    torch.manual_seed(0)
    plain = make()
    model = copy.deepcopy(plain)
    if order == "accelerate, adapt":
        fastvit.accelerate(model)
    torch.manual_seed(2)
    model = adapted(peft, model, kinds[targets]).eval()
    torch.manual_seed(2)
    want, _ = run(adapted(peft, plain, kinds[targets]).eval(), image)
    if order == "adapt, accelerate":
        fastvit.accelerate(model, strict=True)
    got, names = run(model, image)
    assert any("lora_A" in name for name in got.gradients)
    assert not any("base_layer" in name for name in got.gradients)
    assert_same(got, want)
    assert attention_count(names) == 2
    assert not {"aten::native_layer_norm", "aten::_softmax"}.intersection(names)


@pytest.mark.parametrize("library", ["timm", "fastvit"])
def test_dropouts_draw_as_without(peft, image: Tensor, library: str) -> None:
    """LoRA's dropout and timm's stochastic depth draw the same from the same seed."""
    model = adapted(peft, MODELS[library][0](), ["qkv", "attn.proj"], lora_dropout=0.5).train()
    drops = {name: m for name, m in model.named_modules() if isinstance(m, nn.Dropout)}
    for name, drop in drops.items():
        drop.train("lora_dropout" in name)  # the others are fused, and draw otherwise
    assert sum(drop.training for drop in drops.values()) == 4
    want, _ = run(model, image)
    evaluated = copy.deepcopy(model).eval()(image)
    fastvit.accelerate(model)
    got, _ = run(model, image)
    assert_same(got, want)
    assert not close(got.output, evaluated)


@pytest.mark.parametrize("variant", ["dora", "two adapters", "scaled", "bfloat16 base", "autocast"])
def test_variants_of_lora_keep_working(peft, image: Tensor, variant: str) -> None:
    options = {"use_dora": True} if variant == "dora" else {"use_rslora": True, "lora_alpha": 32}
    model = adapted(peft, vit(num_classes=7), ["qkv", "fc2"], **options)
    if variant == "two adapters":
        for module in model.modules():
            if f"{type(module).__module__}.{type(module).__name__}" == LORA:
                module.update_layer("more", 2, 8, peft.LoraConfig(r=2, init_lora_weights=False))
                module.set_adapter(["default", "more"])
    context = torch.autocast("cpu", torch.bfloat16, enabled=variant == "autocast")
    if variant == "bfloat16 base":
        for name, tensor in model.named_parameters():
            tensor.data = tensor.data if "lora" in name else tensor.data.bfloat16()
        image = image.bfloat16()
    exact = copy.deepcopy(model).double()(image.double())
    with context:
        want, _ = run(model, image)
        fastvit.accelerate(model, strict=True)
        got, names = run(model, image)
    assert attention_count(names) == 2
    assert got.output.dtype is want.output.dtype
    if variant in ("bfloat16 base", "autocast"):
        assert_as_accurate(got.output, want.output, exact, what="output")
    else:
        assert_same(got, want)


def test_merged_and_disabled_adapters_are_plain_layers(peft, image: Tensor) -> None:
    model = adapted(peft, vit(num_classes=7), ["qkv", "attn.proj", "fc1"])
    layers = [m for m in model.modules() if hasattr(m, "merge")]
    fastvit.accelerate(model)

    @torch.no_grad()
    def names(model: nn.Module = model) -> list[str]:
        with Calls() as calls:
            model(image)
        return calls.names

    def own() -> Tensor:
        bare = copy.deepcopy(model)
        fastvit.restore(bare)
        return bare(image)

    plain = vit(num_classes=7)
    fastvit.accelerate(plain)
    of_plain = names(plain)
    assert names() != of_plain
    before = model(image)
    assert close(before, own())
    for layer in layers:
        layer.merge()
    assert names() == of_plain
    assert close(model(image), before)
    for layer in layers:
        layer.unmerge()
        layer.enable_adapters(False)
    assert names() == of_plain
    assert close(model(image), own())
    assert not close(model(image), before)
    for layer in layers:
        layer.enable_adapters(True)
        layer.merge()
        layer.enable_adapters(False)  # its next forward takes the adapter out of the weight
    base = own()
    assert close(model(image), base)
    assert not any(layer.merged for layer in layers)


def test_the_report_names_layers_that_run_as_modules(peft) -> None:
    def report(library: str, targets: list[str]) -> Report:
        return fastvit.accelerate(adapted(peft, MODELS[library][0](), targets))

    of = report("timm", ["qkv"])
    expected = f"layer_norm, attention_qkvpacked, linear, layer_norm_mlp; attn.qkv as {LORA}"
    assert outcome(of, "blocks.0") == ("accelerated", expected)
    assert outcome(of, "blocks.0.attn.qkv") == ("as it was", "called in blocks.0")
    assert outcome(of, "blocks.0.attn.qkv.base_layer")[0] == "as it was"
    assert outcome(of, "blocks.0.attn.proj") == ("part of", "blocks.0")
    of = report("CLIP", ["q_proj", "v_proj", "out_proj", "fc1", "fc2"])
    names = "self_attn.v_proj, self_attn.q_proj, self_attn.out_proj, mlp.fc1, mlp.fc2"
    status, detail = outcome(of, "encoder.layers.0")
    assert status == "accelerated"
    ops, _, called = detail.partition("; ")
    assert ops == "layer_norm, attention"
    assert sorted(called.removesuffix(f" as {LORA}").split(", ")) == sorted(names.split(", "))
    assert (of.fused("attention"), of.fused("MLP")) == ((2, 2), (0, 2))


def test_other_tuners_fall_back_with_their_name(peft, image: Tensor) -> None:
    config = peft.IA3Config(target_modules=["qkv"], feedforward_modules=[], init_ia3_weights=False)
    model = peft.get_peft_model(vit(), config).base_model.model
    report = accelerate_as_it_was(model, lambda: model(image))
    assert outcome(report, "blocks.0") == ("skipped", "qkv is peft.tuners.ia3.layer.Linear")


@pytest.mark.filterwarnings("ignore:.*runs its own forward instead of fastvit's")
@pytest.mark.parametrize("order", ["accelerate, adapt", "adapt, accelerate"])
@pytest.mark.parametrize("tuner", ["Lora", "OFT", "IA3"])
def test_an_adapted_patch_embedding(peft, image: Tensor, tuner: str, order: str) -> None:
    """The target proj includes the convolution patch_embed.proj."""
    options: dict[str, Any] = {"feedforward_modules": []} if tuner == "IA3" else {}

    def adapt(model: nn.Module) -> nn.Module:
        torch.manual_seed(2)
        config = getattr(peft, f"{tuner}Config")(target_modules=["qkv", "proj"], **options)
        model = peft.get_peft_model(model, config).base_model.model.eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) / 8)
        return model

    torch.manual_seed(0)
    plain = vit(num_classes=7)
    model = copy.deepcopy(plain)
    if order == "accelerate, adapt":
        fastvit.accelerate(model)
        model = adapt(model)
    else:
        model = adapt(model)
        report = fastvit.accelerate(model)
        kind = type(model.patch_embed.proj)
        reason = f"its convolution is {kind.__module__}.{kind.__name__}, in timm.layers.patch_embed.PatchEmbed"
        assert outcome(report, "patch_embed") == ("skipped", reason)
    assert_same(run(model, image)[0], run(adapt(plain), image)[0])


def test_under_compile(peft, image: Tensor) -> None:
    model = adapted(peft, timm_vit(), ["qkv", "fc1"]).eval()
    want, _ = run(model, image)
    fastvit.accelerate(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_same(step(compiled, lambda m: m(image)), want)


@pytest.mark.parametrize("targets", [["qkv"], ["attn.proj"]], ids=str)
def test_a_mask_with_adapters(peft, targets: list[str]) -> None:
    """Attention between layers that are called gets the mask."""
    block = adapted(peft, vit(num_classes=0), targets).blocks[0].eval()
    x, mask = torch.randn(2, 5, 192), torch.rand(2, 1, 5, 5) > 0.3
    mask[..., 0] = True
    want, unmasked = block(x, attn_mask=mask), block(x)
    report = fastvit.accelerate(block)
    assert outcome(report, "")[0] == "accelerated"
    with Calls() as calls:
        assert close(block(x, attn_mask=mask), want)
    assert "fastvit::attention_qkvpacked_fwd" in calls.names
    assert not close(want, unmasked)
