"""Accelerated models with rotary positions: timm's EVA blocks and transformers' DINOv3."""

import copy
import warnings
from typing import Any

import pytest
import torch
from library_imports import import_library
from library_models import accelerate_and_compare, assert_steps_agree, hugging_face, outcome, step
from models import accelerate_as_it_was, close, randomised
from oracle import assert_as_accurate
from torch import nn

import fastvit
from fastvit.study.memory.peak import saved_bytes

BLOCK = "layer_norm_attention, layer_norm_mlp"
POST_NORM = "eva02_enormous_patch14_clip_224"  # whose attention and MLP are fused, but not whole blocks
TIMM = {  # name -> image
    "vit_base_patch16_rope_224": (64, 96),  # interleaved, CLS
    "vit_small_patch16_rope_mixed_ape_224": (64, 96),  # learnt frequencies, a table for each head
    "vit_small_patch16_dinov3": (64, 96),  # halves, CLS and 4 registers
    "vit_medium_patch16_rope_reg1_gap_256": (64, 96),
    "vit_pe_core_tiny_patch16_384": (64, 96),
    "eva_giant_patch14_224": (56, 84),  # without rotary positions
    "eva02_tiny_patch14_224": (56, 84),  # SwiGLU of one
    "eva02_base_patch14_224": (56, 84),  # a norm in SwiGLU; three layers for q, k and v
    "deepseek_vit_412m": (56, 56),  # RMSNorms
    POST_NORM: (56, 56),
}
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in TIMM),
    ("vit_small_patch16_dinov3", {"qk_norm": True, "norm_layer": "LayerNorm"}),
    ("vit_base_patch16_rope_224", {"qk_norm": True, "norm_layer": "RmsNorm"}),
    ("vit_small_patch16_rope_mixed_ape_224", {"qk_norm": True, "norm_layer": "RmsNorm"}),
    ("eva02_base_patch14_224", {"qk_norm": True, "norm_layer": "LayerNorm"}),
]


def eva(name: str, **options: Any) -> nn.Module:
    """Return a model with random parameters, because an initialisation has zeros that would hide errors."""
    small = {"img_size": TIMM[name], "depth": 2, "embed_dim": 64, "num_heads": 2, "num_classes": 7}
    return randomised(import_library("timm").create_model(name, **{**small, **options}).eval())


@pytest.mark.parametrize(("name", "options"), CASES)
def test_timm_float32(name: str, options: dict[str, Any], device: torch.device) -> None:
    if "norm_layer" in options:
        options = {**options, "norm_layer": getattr(import_library("timm").layers, options["norm_layer"])}
    model, image = eva(name, **options).to(device), torch.randn(2, 3, *TIMM[name], device=device)
    report = accelerate_and_compare(model, lambda m: m(image))
    assert report.fused("attention")[0] == 2
    assert report.fused("MLP")[0] >= 2  # an attention pooling has one, too
    blocks = [entry.detail for entry in report.accelerated if entry.kind.endswith("Block")]
    assert blocks == ([] if name == POST_NORM else [BLOCK, BLOCK])


@pytest.mark.parametrize("options", [{}, {"use_gated_mlp": True}, {"key_bias": True, "query_bias": False}], ids=str)
def test_dinov3_of_transformers(options: dict[str, Any], device: torch.device) -> None:
    model, image = hugging_face("DINOv3ViTModel", num_register_tokens=3, **options), torch.randn(2, 3, 32, 40)
    image = image.to(device)
    report = accelerate_and_compare(model.to(device), lambda m: m(image))
    assert report.fused("attention") == report.fused("MLP") == (2, 2)
    assert outcome(report, "embeddings.patch_embeddings") == ("accelerated", "patch_embed")


@pytest.mark.parametrize("name", ["vit_small_patch16_dinov3", "vit_base_patch16_rope_224"])
def test_float32_tables_in_a_16_bit_model(name: str, device: torch.device) -> None:
    model = eva(name).to(device, torch.bfloat16)
    image = torch.randn(2, 3, 64, 96, device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        exact, own = copy.deepcopy(model).double()(image.double()), model(image)
        fastvit.accelerate(model)
        assert_as_accurate(model(image), own, exact, what="logits")


def test_jittered_positions_of_training_are_the_librarys(device: torch.device) -> None:
    model = hugging_face("DINOv3ViTModel", pos_embed_jitter=2.0, pos_embed_rescale=2.0).to(device).train()
    image = torch.randn(2, 3, 32, 32, device=device)
    torch.manual_seed(5)
    want = model(image).last_hidden_state
    fastvit.accelerate(model)
    torch.manual_seed(5)
    assert close(model(image).last_hidden_state, want)
    assert not close(model(image).last_hidden_state, want)


def test_checkpointing_of_transformers(device: torch.device) -> None:
    model = hugging_face("DINOv3ViTModel", pos_embed_rescale=None).to(device)
    image = torch.randn(2, 3, 32, 32, device=device)
    fastvit.accelerate(model)
    want = step(model, lambda m: m(image))
    model.train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable()
    assert_steps_agree(step(model, lambda m: m(image)), want)


@pytest.mark.parametrize("name", ["vit_small_patch16_dinov3", "vit_small_patch16_rope_mixed_ape_224"])
def test_compiled_without_a_break(name: str, device: torch.device) -> None:
    model = eva(name).to(device)
    image = torch.randn(2, 3, *TIMM[name], device=device)
    fastvit.accelerate(model)
    want = step(model, lambda m: m(image))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_steps_agree(step(compiled, lambda m: m(image)), want)


def test_it_saves_less_than_the_library(device: torch.device) -> None:
    model = eva("vit_small_patch16_dinov3", embed_dim=128).to(device)
    x = torch.randn(2, 29, 128, device=device)
    rope = torch.randn(24, 128, device=device)
    saved = [saved_bytes(lambda: model.blocks[0](x, rope=rope), list(model.parameters()))]
    fastvit.accelerate(model)
    saved.append(saved_bytes(lambda: model.blocks[0](x, rope=rope), list(model.parameters())))
    assert saved[1] < 0.75 * saved[0], saved


def test_positions_that_do_not_fit_are_the_librarys_affair(device: torch.device) -> None:
    """Broadcasting could take a table for fewer tokens for one of all."""
    model = eva("vit_small_patch16_dinov3").to(device)
    block, x = model.blocks[0], torch.randn(2, 29, 64, device=device)
    fastvit.accelerate(model)
    with pytest.warns(UserWarning, match="rotary positions for 20 of 29 tokens"), pytest.raises(RuntimeError):
        block(x, rope=torch.randn(20, 64, device=device))


def test_a_mask_is_honoured(device: torch.device) -> None:
    model = eva("vit_small_patch16_dinov3").to(device)
    block, x, rope = model.blocks[0], torch.randn(2, 29, 64, device=device), torch.randn(24, 64, device=device)
    mask = torch.ones(29, 29, dtype=torch.bool, device=device).tril()
    want = block(x, rope=rope, attn_mask=mask)
    fastvit.accelerate(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert close(block(x, rope=rope, attn_mask=mask), want)
    assert not close(block(x, rope=rope), want)


def test_what_is_left_alone() -> None:
    timm = import_library("timm")
    options = {"dim": 64, "num_heads": 2, "scale_norm": False, "norm_layer": timm.layers.RmsNorm}
    mixed, half, other = (timm.models.eva.EvaAttention(**options, qk_norm=True) for _ in range(3))
    mixed.k_norm.eps, half.q_norm, other.q_norm = 1e-3, nn.Identity(), timm.layers.SimpleNorm(32)
    for attention, reason in (
        (timm.models.eva.EvaAttention(**options, gated=True), "a gate in attention"),
        (mixed, "q_norm and k_norm are of two kinds"),
        (half, "q_norm is nn.Identity"),
        (other, "q_norm is timm.layers.norm.SimpleNorm"),
    ):
        model, x = nn.ModuleList([attention]), torch.randn(1, 5, 64)
        report = accelerate_as_it_was(model, lambda model=model, x=x: model[0](x))
        assert outcome(report, "0") == ("skipped", reason)


def test_attention_alone_and_with_a_hook(device: torch.device) -> None:
    """Attention runs in steps with any layers; a hook on a norm makes the module's own forward run."""
    timm = import_library("timm")
    rope = torch.randn(6, 64, device=device)
    for fused in (True, False):
        attention = timm.layers.AttentionRope(
            64, 2, qk_norm=True, qkv_fused=fused, norm_layer=timm.layers.RmsNorm, device=device
        )
        x = torch.randn(2, 7, 64, device=device)
        want, model = attention(x, rope), nn.ModuleList([attention])
        assert outcome(fastvit.accelerate(model), "0") == ("accelerated", "qk_norm, attention, linear")
        assert close(attention(x, rope), want)
        seen = []
        attention.k_norm.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of which there is one for all modules of a class
            assert close(attention(x, rope), want)
        assert seen
