"""The report of `accelerate`: every module, the true reason, how much is fused, and advice."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from known_models import sam_of_timm, swin_of_timm
from library_models import hugging_face, outcome, vit
from models import Calls, accelerate_as_it_was, close
from torch import nn

import fastvit
from fastvit.integrations.transformers.layers import register_attention

FUSED = "layer_norm_attention, layer_norm_mlp"
UNKNOWN = "is not a class that fastvit knows"


def test_lists_every_module_and_prints_a_table() -> None:
    model = vit()
    report = fastvit.accelerate(model)
    assert [e.name for e in report.entries] == [name for name, _ in model.named_modules()]
    assert outcome(report, "blocks.0") == ("accelerated", FUSED)
    assert outcome(report, "blocks.1.mlp.fc1") == ("part of", "blocks.1")
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
    lines = ["fastvit's own modules are fused already", "fused: attention in 1 of 1, MLP in 1 of 1"]
    assert str(report).splitlines() == lines
    mixed = str(fastvit.accelerate(nn.Sequential(nn.LayerNorm(8), fastvit.Mlp(8)))).splitlines()
    assert mixed[1].split() == ["0", "LayerNorm", "accelerated", "layer_norm"]
    assert mixed[3:] == [lines[0], "fused: MLP in 1 of 1"]


def test_a_report_that_is_taken_for_the_model_says_so() -> None:
    report = fastvit.accelerate(fastvit.Block(32, 2))
    written = r"`report = fastvit.accelerate\(model\)`"
    with pytest.raises(TypeError, match=f"called as if it were the model: .* in place .* {written}"):
        report(torch.zeros(1, 4, 32))
    for name in ("eval", "blocks"):
        with pytest.raises(AttributeError, match=f"no attribute '{name}': .* in place .* {written}"):
            getattr(report, name)
    assert pickle.loads(pickle.dumps(report)) == copy.deepcopy(report) == report


def test_convolutional_models_have_nothing_to_skip(timm) -> None:
    model = timm.create_model("convnext_atto")
    assert str(fastvit.accelerate(model)) == "no known ViT in this model"
    with pytest.raises(ValueError, match=r"no module of this ConvNeXt is known, .* torch.compile"):
        fastvit.accelerate(model, strict=True)


def test_what_is_special_about_an_attention_is_the_reason() -> None:
    model, image = vit("vit_relpos_small_patch16_224", qk_norm=True), torch.randn(1, 3, 32, 32)
    report = accelerate_as_it_was(model, lambda: model(image))
    (detail,) = {e.detail for e in report.entries if e.part == "attention"}
    assert detail.startswith("relative position bias and qk-norm, in timm.models.")
    assert "fused: attention in 0 of 2, MLP in " in str(report)


def test_windows_of_an_unknown_attention_are_a_reason() -> None:
    """Those of Swin too, if hooks on a block's parts leave its attention alone."""
    model, swin = sam_of_timm(window_size=2, use_rel_pos=True), swin_of_timm()
    for block in model.blocks[:1]:
        block.attn.__class__ = type("OtherAttention", (type(block.attn),), {})
    for layer in swin.layers:
        layer.blocks[0].norm1.register_forward_hook(print)
    for each, name in ((model, "OtherAttention"), (swin, "WindowAttention")):
        report = fastvit.accelerate(each)
        (reason,) = {e.detail for e in report.skipped if e.kind == name}
        assert reason.startswith("window attention and relative position bias, in ")


def of_no_library(name: str, **parts: nn.Module) -> nn.Module:
    """Return a module of a class that no library has. parts: in addition to qkv and proj."""
    module = type(name, (nn.Module,), {"__module__": "mine"})()
    for part, child in {"qkv": nn.Linear(16, 48), "proj": nn.Linear(16, 16), **parts}.items():
        module.add_module(part, child)
    return module


class LayerNorm(nn.LayerNorm):
    __module__ = "open_clip.transformer"


def test_reasons_of_unknown_classes_and_their_names(timm) -> None:
    """A convolution is a reason in a patch embedding only."""
    own = type("MyAttention", (timm.layers.attention.Attention,), {"__module__": "mine", "__qualname__": "MyAttention"})
    norm = "open_clip.transformer.LayerNorm, a subclass of nn.LayerNorm"
    overlapping = "its convolution is not one of disjoint patches"
    reasons = {
        of_no_library("EvaAttention", rope=nn.Identity()): "rotary positions, in mine.EvaAttention",
        of_no_library("ConvAttention", local=nn.Conv2d(16, 16, 3)): f"mine.ConvAttention {UNKNOWN}",
        of_no_library("PatchEmbed", proj=nn.Conv2d(3, 16, 4, 2)): f"{overlapping}, in mine.PatchEmbed",
        of_no_library("PatchEmbed", proj=nn.Conv2d(3, 16, 4, 4)): f"mine.PatchEmbed {UNKNOWN}",
        LayerNorm(8): f"{norm}, {UNKNOWN}",
        own(32, 2): f"mine.MyAttention, a subclass of timm.layers.attention.Attention, {UNKNOWN}",
        nn.MultiheadAttention(32, 2): f"nn.MultiheadAttention {UNKNOWN}",
    }
    report = fastvit.accelerate(nn.ModuleList(reasons))
    assert [e.detail for e in report.skipped] == list(reasons.values())
    assert outcome(fastvit.accelerate(vit(norm_layer=LayerNorm)), "blocks.0") == ("skipped", f"norm1 is {norm}")


@pytest.mark.parametrize("name", ["IJepaModel", "BeitModel"])
def test_the_advice_works(name: str) -> None:
    model, image = hugging_face(name), torch.randn(2, 3, 32, 32)

    def run() -> tuple[torch.Tensor, int]:
        with Calls() as calls:
            tokens = model(image).last_hidden_state
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
    "a head of 4": lambda: hugging_face("IJepaModel", num_attention_heads=16),
    "no skipped attention": lambda: hugging_face("ViTModel"),
    "another library": lambda: vit("beit_base_patch16_224"),
}


@pytest.mark.parametrize("kind", MODELS)
def test_no_advice_where_it_would_not_help(kind: str) -> None:
    assert fastvit.accelerate(MODELS[kind]()).advice == ()


def test_advice_names_the_model_inside() -> None:
    (advice,) = fastvit.accelerate(nn.ModuleDict({"tower": hugging_face("IJepaModel")})).advice
    assert advice.endswith('then model.tower.set_attn_implementation("fastvit")')
