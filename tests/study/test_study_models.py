"""`fastvit models`: tokens, parameters, FLOPs and activations of known models."""

import json
from dataclasses import asdict

import pytest
import torch
from library_imports import import_library, import_timm
from study_models import SMALL
from torch.utils.flop_counter import FlopCounterMode

from fastvit.cli import main
from fastvit.study import models
from fastvit.study.memory.peak import saved_bytes
from fastvit.study.models import costs as model_costs
from fastvit.study.sources import find

FEW = (  # LayerScale and registers, gated MLPs with rotary positions, norms of its own and no head
    "vit_small_patch14_reg4_dinov2", "eva02_tiny_patch14_224", "vit_pe_spatial_tiny_patch16_512",
)  # fmt: skip


def test_parameters_of_vit_base_by_hand():
    (cost,) = models("vit_base_patch16_224")
    D, L = 768, 12
    assert asdict(cost.parameters) == {
        "patch_embedding": D * 768 + D,
        "positions": D + 197 * D,
        "attention": L * (4 * D * D + 4 * D),
        "mlp": L * (8 * D * D + 5 * D),
        "norms": (2 * L + 1) * 2 * D,
        "head": 1000 * D + 1000,
        "other": 0,
    }
    assert cost.parameters.total == 86_567_656


@pytest.mark.parametrize(
    "name",
    [*FEW, *(pytest.param(n, marks=pytest.mark.nightly) for n, _ in model_costs.matching("*") if n not in FEW)],
)
def test_flops_and_parameters_are_the_reference_s(name):
    import_timm()  # the plain form of some is timm's
    (cost,) = models(name)
    source = find.find(name)
    with torch.device("meta"):
        reference = source.build("eager").eval().requires_grad_(False)
        images = torch.empty(1, 3, *source.image_size)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        reference(images)
    assert cost.flops == counter.get_total_flops()
    assert cost.parameters.total == sum(p.numel() for p in reference.parameters())
    assert model_costs.parameters_by_part(reference) == cost.parameters
    assert cost.parameters.other == 0


def test_another_size_and_batch():
    small, large = models("vit_tiny_patch16_224", image_size=[(64, 96), (224, 224)], batch=1)
    assert small.grid == (4, 6)
    assert large.grid == (14, 14)
    assert small.parameters.positions == (1 + 25) * 192
    one, four = models("vit_tiny_patch16_224", image_size=64, patch_size=8, batch=[1, 4])
    assert one.tokens == four.tokens == 65
    assert four.flops == 4 * one.flops
    assert four.saved_bytes == 4 * one.saved_bytes


def test_saved_bytes_are_those_of_a_real_step():
    (cost,) = models(SMALL, batch=2)
    model = find.find(SMALL).build("fastvit").bfloat16().train()
    images = torch.randn(2, 3, 32, 32, dtype=torch.bfloat16)
    assert cost.saved_bytes == saved_bytes(lambda: model(images), list(model.parameters()))
    N, D, L = 65, 48, 2
    assert cost.saved_bytes > L * 10 * 2 * N * D * 2  # of every block ten token tensors


# Multiply-adds and parameters as the papers and timm's tables have them
@pytest.mark.parametrize(
    ("name", "parameters", "gigamacs", "fused"),
    [
        ("swin_tiny_patch4_window7_224", 28_288_354, 4.49, True),  # windows: no sequence of all tokens
        ("mixer_b16_224", 59_880_472, 12.60, True),  # tokens, and no attention
        ("torchvision.models:resnet50", 25_557_032, 4.09, False),
    ],
)
def test_models_that_are_no_plain_vits_are_rows_without_tokens(name, parameters, gigamacs, fused):
    import_timm()
    import_library("torchvision")
    larger = {"image_size": [224, 448]} if "resnet" in name else {"batch": [1, 2]}
    small, large = models(name, **larger)
    assert small.parameters.total == parameters
    assert small.parameters.attention == 0 or "swin" in name
    assert round(small.macs / 1e9, 2) == gigamacs
    assert small.fused == fused
    assert (small.patch_size, small.tokens, small.token_pairs, small.grid) == (None,) * 4
    assert large.flops > 1.9 * small.flops


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("foo*", {}, r"no model of the zoo is called 'foo\*'"),
        ("vit_base_patch16_384", {"sort": "colour"}, "sort must be one of name, "),
    ],
)
def test_what_is_wrong_is_named(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        models(name, **arguments)


# ---- the command ----


def test_a_pattern_leaves_out_what_does_not_fit_and_says_so(capsys):
    words = ["models", "vit_tiny_patch16_*", "vit_small_patch14_dinov?", "--image-size", "64", "--sort", "tokens"]
    assert main([*words, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    names = [row["model"] for row in printed["models"]]
    assert set(names) == {"vit_tiny_patch16_224", "vit_tiny_patch16_384", "vit_tiny_patch16_dinov3_qkvb"}
    assert names[0] == "vit_tiny_patch16_dinov3_qkvb"  # four registers
    (left_out,) = printed["left_out"]
    assert left_out.endswith("is not a multiple of the patch size 14 of vit_small_patch14_dinov2; nearest: 70")


def test_one_model_is_shown_in_full(capsys):
    assert main(["models", "vit_base_patch16_384"]) == 0
    out = capsys.readouterr().out
    for text in ("332,929", "331,776", "86,859,496", "28,348,416", "110,968,700,928"):
        assert text in out
