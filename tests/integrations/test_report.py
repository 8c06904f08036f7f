"""The report of `accelerate`: every module, the true reason, how much is fused, and advice."""

import copy
import pickle

import pytest
import torch
from library_models import outcome, vit
from torch import nn

import fastvit

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


def unknown(name: str, **parts: nn.Module) -> nn.Module:
    """Return a module of a class that no library has. parts: in addition to qkv and proj."""
    module = type(name, (nn.Module,), {"__module__": "mine"})()
    for part, child in {"qkv": nn.Linear(16, 48), "proj": nn.Linear(16, 16), **parts}.items():
        module.add_module(part, child)
    return module


class LayerNorm(nn.LayerNorm):
    __module__ = "their.transformer"


def test_reasons_of_unknown_classes_and_their_names(timm) -> None:
    """A convolution is a reason in a patch embedding only."""
    own = type("MyAttention", (timm.layers.attention.Attention,), {"__module__": "mine", "__qualname__": "MyAttention"})
    norm = "their.transformer.LayerNorm, a subclass of nn.LayerNorm"
    overlapping = "its convolution is not one of disjoint patches"
    adapted = type("Conv2d", (nn.Conv2d,), {"__module__": "peft.tuners", "__qualname__": "Conv2d"})(3, 16, 4, 4)
    reasons = {
        unknown("ConvAttention", local=nn.Conv2d(16, 16, 3)): f"mine.ConvAttention {UNKNOWN}",
        unknown("PatchEmbed", proj=nn.Conv2d(3, 16, 4, 2)): f"{overlapping}, in mine.PatchEmbed",
        unknown("PatchEmbed", proj=nn.Conv2d(3, 16, 4, 4)): f"mine.PatchEmbed {UNKNOWN}",
        unknown("PatchEmbed", proj=adapted): "its convolution is peft.tuners.Conv2d, a subclass of nn.Conv2d, in mine."
        "PatchEmbed",
        LayerNorm(8): f"{norm}, {UNKNOWN}",
        own(32, 2): f"mine.MyAttention, a subclass of timm.layers.attention.Attention, {UNKNOWN}",
        nn.MultiheadAttention(32, 2): f"nn.MultiheadAttention {UNKNOWN}",
    }
    report = fastvit.accelerate(nn.ModuleList(reasons))
    assert [e.detail for e in report.skipped] == list(reasons.values())
    assert outcome(fastvit.accelerate(vit(norm_layer=LayerNorm)), "blocks.0") == ("skipped", f"norm1 is {norm}")


def test_advice_for_unknown_classes() -> None:
    """It names unknown classes of attention and MLPs, not known ones that are left."""
    model = nn.Sequential(unknown("MyAttention", norm=nn.LayerNorm(16)), vit(depth=1))
    model[1].blocks[0].attn.qkv.register_forward_hook(print)
    report = fastvit.accelerate(model)
    assert report.advice == ('to fuse MyAttention, try torch.compile(model, backend="fastvit")',)
    assert " ".join(str(report).split()).endswith(report.advice[0])
    assert fastvit.accelerate(vit(depth=1)).advice == ()
