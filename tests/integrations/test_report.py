"""The report of `accelerate`: every module, the true reason, how much is fused, and advice."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from library_imports import import_library
from library_models import SIZES, hugging_face, outcome, vit
from models import Calls, accelerate_as_it_was, close
from torch import nn

import fastvit
from fastvit.integrations.transformers.layers import register_attention

FUSED = "layer_norm_attention, layer_norm_mlp"


def test_lists_every_module_and_prints_a_table() -> None:
    model = vit()
    report = fastvit.accelerate(model)
    assert [e.name for e in report.entries] == [name for name, _ in model.named_modules()]
    assert outcome(report, "blocks.0") == ("accelerated", FUSED)
    assert outcome(report, "blocks.1.mlp.fc1") == ("part of", "blocks.1")
    assert outcome(report, "patch_embed.proj") == ("accelerated", "patch_embed")
    assert outcome(report, "norm") == ("accelerated", "layer_norm")
    assert outcome(report, "head")[0] == "as it was"
    table = repr(report).splitlines()  # what a REPL shows
    assert table[0].split() == ["module", "class", "what"]
    assert any(line.startswith("blocks.* (2)") and FUSED in line for line in table)
    assert table[-2:] == ["4 modules accelerated, 0 skipped", "fused: attention in 2 of 2, MLP in 2 of 2"]


def test_fastvits_own_models_are_fused_already() -> None:
    model = fastvit.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
    report = fastvit.accelerate(model, strict=True)
    assert [e.name for e in report.entries] == [name for name, _ in model.named_modules()]
    assert {(e.status, e.detail) for e in report.entries} == {("as it was", "fused already")}
    assert str(report).splitlines() == [
        "fastvit's own modules are fused already",
        "fused: attention in 1 of 1, MLP in 1 of 1",
    ]
    mixed = str(fastvit.accelerate(nn.Sequential(nn.LayerNorm(8), fastvit.Mlp(8)))).splitlines()
    assert mixed[1].split() == ["0", "LayerNorm", "accelerated", "layer_norm"]
    assert mixed[3:] == ["fastvit's own modules are fused already", "fused: MLP in 1 of 1"]


def test_a_report_that_is_taken_for_the_model_says_so() -> None:
    report = fastvit.accelerate(fastvit.Block(32, 2))
    written = r"`report = fastvit.accelerate\(model\)`"
    with pytest.raises(TypeError, match=f"called as if it were the model: .* in place .* {written}"):
        report(torch.zeros(1, 4, 32))
    for name in ("eval", "to", "parameters", "blocks"):
        with pytest.raises(AttributeError, match=f"no attribute '{name}': .* in place .* {written}"):
            getattr(report, name)
    assert pickle.loads(pickle.dumps(report)) == copy.deepcopy(report) == report


@pytest.mark.parametrize(
    ("library", "name"),
    [("timm", "resnet18"), ("timm", "convnext_atto"), ("timm", "densenet121"), ("torchvision", "resnet18")],
)
def test_convolutional_models_have_nothing_to_skip(library: str, name: str) -> None:
    package = import_library(library)
    model = package.create_model(name) if library == "timm" else getattr(package.models, name)()
    report = fastvit.accelerate(model)
    assert str(report) == "no known ViT in this model"
    with pytest.raises(ValueError, match=f"no module of this {type(model).__name__} is known, .* torch.compile"):
        fastvit.accelerate(model, strict=True)


def test_convnext_of_torchvision_has_norms_only() -> None:
    model = import_library("torchvision").models.convnext_tiny()
    report = fastvit.accelerate(model, strict=True)
    assert {(e.kind, e.detail) for e in report.accelerated} == {("LayerNorm", "layer_norm")}
    assert str(report).endswith("18 modules accelerated, 0 skipped")


RELATIVE, WINDOW = "relative position bias", "window attention"


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("beit_base_patch16_224", {}, f"{RELATIVE}, in timm.models.beit.Attention"),
        ("vit_relpos_small_patch16_224", {}, f"{RELATIVE}, in timm.models.vision_transformer_relpos.RelPosAttention"),
        (
            "vit_relpos_small_patch16_224",
            {"qk_norm": True},
            f"{RELATIVE} and qk-norm, in timm.models.vision_transformer_relpos.RelPosAttention",
        ),
    ],
)
def test_what_is_special_about_an_attention_is_the_reason(name: str, options: dict[str, Any], reason: str) -> None:
    model = vit(name, **options)
    H, W = model.patch_embed.img_size
    image = torch.randn(1, 3, H, W)
    report = accelerate_as_it_was(model, lambda: model(image))
    depth = len(model.blocks)
    assert {e.detail for e in report.entries if e.part == "attention"} == {reason}
    assert report.fused("attention") == (0, depth)
    assert f"fused: attention in 0 of {depth}, MLP in " in str(report)


def test_windows_of_an_unknown_attention_are_a_reason() -> None:
    model = vit("samvit_base_patch16", window_size=2, img_size=64, depth=1)
    attn = model.blocks[0].attn
    attn.__class__ = type("OtherAttention", (type(attn),), {})
    (reason,) = {e.detail for e in fastvit.accelerate(model).entries if e.part == "attention"}
    assert reason.startswith(f"{WINDOW} and {RELATIVE}, in ")


class EvaAttention(nn.Module):
    """A class of no library."""

    def __init__(self, rotary: bool) -> None:
        super().__init__()
        self.qkv, self.proj, self.rope = nn.Linear(16, 48), nn.Linear(16, 16), nn.Identity() if rotary else None


@pytest.mark.parametrize(
    ("rotary", "reason"),
    [(True, "rotary positions, in EvaAttention"), (False, "EvaAttention is not a class that fastvit knows")],
)
def test_rotary_positions_are_the_reason_where_they_are(rotary: bool, reason: str) -> None:
    (entry,) = fastvit.accelerate(nn.ModuleList([EvaAttention(rotary)])).skipped
    assert entry.detail.replace(f"{__name__}.", "") == reason


def test_windows_of_swin() -> None:
    """The blocks are not fused, because of hooks on their parts, so that their attention is reported by itself."""
    timm = import_library("timm")
    model = timm.create_model("swin_tiny_patch4_window7_224", img_size=56, depths=(1, 1), num_classes=0)
    for block in (layer.blocks[0] for layer in model.layers):
        block.norm1.register_forward_hook(print)
    report = fastvit.accelerate(model)
    reasons = {e.detail for e in report.skipped if "Attention" in e.kind}
    assert reasons == {f"{WINDOW} and {RELATIVE}, in timm.models.swin_transformer.WindowAttention"}
    assert report.fused("MLP") == (2, 2)


class ConvAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj, self.local = nn.Linear(16, 48), nn.Linear(16, 16), nn.Conv2d(16, 16, 3)


class PatchEmbed(nn.Module):
    def __init__(self, stride: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, 16, 4, stride)


def test_a_convolution_is_a_reason_in_a_patch_embedding_only() -> None:
    report = fastvit.accelerate(nn.ModuleList([ConvAttention(), PatchEmbed(2), PatchEmbed(4)]))
    assert [e.detail.replace(f"{__name__}.", "") for e in report.skipped] == [
        "ConvAttention is not a class that fastvit knows",
        "its convolution is not one of disjoint patches, in PatchEmbed",
        "PatchEmbed is not a class that fastvit knows",
    ]


class LayerNorm(nn.LayerNorm):
    __module__ = "open_clip.transformer"


def test_classes_are_named_in_full() -> None:
    timm = import_library("timm")

    class MyAttention(timm.layers.attention.Attention):
        __module__ = "mine"
        __qualname__ = "MyAttention"

    report = fastvit.accelerate(vit(norm_layer=LayerNorm))
    norm = "open_clip.transformer.LayerNorm, a subclass of nn.LayerNorm"
    assert outcome(report, "blocks.0") == ("skipped", f"norm1 is {norm}")
    model = nn.ModuleList([LayerNorm(8), MyAttention(32, 2), nn.MultiheadAttention(32, 2)])
    unknown = "is not a class that fastvit knows"
    assert [e.detail for e in fastvit.accelerate(model).skipped] == [
        f"{norm}, {unknown}",
        f"mine.MyAttention, a subclass of timm.layers.attention.Attention, {unknown}",
        f"nn.MultiheadAttention {unknown}",
    ]


@pytest.mark.parametrize("name", ["IJepaModel", "ViTMAEModel", "BeitModel"])
def test_the_advice_works(name: str) -> None:
    model = hugging_face(name, **({"mask_ratio": 0.0} if name == "ViTMAEModel" else {}))
    image = torch.randn(2, 3, 32, 32)
    noise = {"noise": torch.rand(2, 16)} if name == "ViTMAEModel" else {}

    def run() -> tuple[torch.Tensor, int]:
        with Calls() as calls:
            tokens = model(image, **noise).last_hidden_state
        return tokens, calls.names.count("fastvit::attention_fwd")

    report = fastvit.accelerate(model)
    kind = name.removesuffix("Model") + "Attention"
    assert report.advice == (
        f"to fuse the attention of {kind}: fastvit.integrations.transformers.register_attention(), then "
        'model.set_attn_implementation("fastvit")',
    )
    assert " ".join(str(report).split()).endswith(report.advice[0])
    before, count = run()
    assert count == 0
    register_attention()
    model.set_attn_implementation("fastvit")
    after, count = run()
    assert count == 2
    assert close(after, before)
    assert not fastvit.accelerate(model).advice


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a bias": lambda: hugging_face("BeitModel", use_relative_position_bias=True),
    "a shared bias": lambda: hugging_face("BeitModel", use_shared_relative_position_bias=True),
    "a head of 4": lambda: hugging_face("IJepaModel").__class__(
        import_library("transformers").IJepaConfig(**SIZES | {"num_attention_heads": 16})
    ),
    "no skipped attention": lambda: hugging_face("ViTModel"),
    "another library": lambda: vit("beit_base_patch16_224"),
}


@pytest.mark.parametrize("kind", MODELS)
def test_no_advice_where_it_would_not_help(kind: str) -> None:
    assert fastvit.accelerate(MODELS[kind]()).advice == ()


def test_advice_names_the_model_inside() -> None:
    outer = nn.Module()
    outer.tower = hugging_face("IJepaModel")
    (advice,) = fastvit.accelerate(outer).advice
    assert advice.endswith('then model.tower.set_attn_implementation("fastvit")')
