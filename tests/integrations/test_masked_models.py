"""Accelerated models of other libraries whose attention has a mask, shared keys, norms over all heads, or sequences of
several lengths; and blocks with attention and MLP side by side."""

import importlib
import warnings
from typing import Any

import pytest
import torch
from library_imports import import_library
from library_models import SIZES, Call, accelerate_and_compare, assert_steps_agree, outcome, step, vit
from models import Calls, accelerate_as_it_was, close, randomised
from torch import nn

import fastvit
from benchmarks.coverage import small_transformers
from fastvit.blocks.submodules import CannotFuse
from fastvit.integrations.forward import checked_mask
from fastvit.integrations.transformers.layers import register_attention


def check(model: nn.Module, call: Call, *ops: str, fused: tuple[int, int] = (2, 2)) -> None:
    """Accelerated, a model gives what it gave, with that many attention modules fused, and runs these ops."""
    with Calls() as calls:
        report = accelerate_and_compare(model, call)
    assert report.fused("attention") == fused, str(report)
    assert {f"fastvit::{op}" for op in ops} <= {*calls.names}, calls.names


def of_transformers(name: str, **options: Any) -> nn.Module:
    """Return a model of transformers with random weights and the sizes of a small vision configuration."""
    kind = getattr(import_library("transformers"), name)
    return randomised(kind(kind.config_class(**{**SIZES, **options})).eval())


# ---- masks ----


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_pixtral(implementation: str, device: torch.device) -> None:
    """Two images of other sizes in one sequence, which a mask keeps apart."""
    model = of_transformers("PixtralVisionModel", head_dim=16).to(device)
    model.set_attn_implementation(implementation)
    images, sizes = torch.randn(2, 3, 32, 32, device=device), torch.tensor([[32, 32], [16, 24]])
    check(model, lambda m: m(images, image_sizes=sizes), "rotary", "attention_qkvpacked_fwd")
    alone = model(images[1:, :, :16, :24], image_sizes=sizes[1:]).last_hidden_state
    assert close(model(images, image_sizes=sizes).last_hidden_state[:, 16:], alone)


def test_siglip2_with_padded_images(device: torch.device) -> None:
    model = of_transformers("Siglip2VisionModel", num_patches=16, vision_use_head=False).to(device)
    pixels, visible = torch.randn(2, 16, 192, device=device), torch.ones(2, 16, dtype=torch.int32, device=device)
    visible[1, 9:] = 0
    shapes = torch.tensor([[4, 4], [3, 3]], device=device)
    call = lambda m: m(pixels, pixel_attention_mask=visible, spatial_shapes=shapes)  # noqa: E731
    unmasked = model(pixels, torch.ones_like(visible), shapes).last_hidden_state
    check(model, call, "attention_qkvpacked_fwd")
    assert not close(call(model).last_hidden_state[1], unmasked[1])


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "eva02_tiny_patch14_224"])
@pytest.mark.parametrize("kind", ["bool", "float", "causal"])
def test_blocks_of_timm(kind: str, name: str, device: torch.device) -> None:
    """The mask of a call, given to a block and to attention alone."""
    model = import_library("timm").create_model(name, num_classes=0, depth=1).eval()
    block = randomised(model).to(device).blocks[0]
    x = torch.randn(2, 5, 192, device=device)
    mask = torch.rand(2, 1, 5, 5, device=device) > 0.3
    mask[..., 0] = True
    seen: dict[str, Any] = {"attn_mask": mask}
    if kind == "float":
        seen = {"attn_mask": torch.randn(5, 5, device=device).masked_fill(~mask, -torch.inf)}
    elif kind == "causal":
        seen = {"is_causal": True}
    accelerate_as_it_was(model, lambda: (block(x, **seen), block.attn(x, **seen)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not close(block(x, **seen), block(x))


def test_a_mask_and_causality_are_left_to_timm(device: torch.device) -> None:
    """Its attention raises, or ignores the mask without scaled_dot_product_attention."""
    model = randomised(vit(num_classes=0)).to(device)
    block, x = model.blocks[0], torch.randn(2, 5, 192, device=device)
    block.attn.fused_attn = False
    mask = torch.eye(5, dtype=torch.bool, device=device)
    accelerate_as_it_was(model, lambda: block(x, mask, True), "a mask and is_causal")


def test_a_learnt_bias_has_its_gradient(device: torch.device) -> None:
    model = randomised(vit(num_classes=0)).to(device)
    x = torch.randn(2, 5, 192, device=device)
    bias = torch.randn(1, 3, 5, 5, device=device, requires_grad=True)
    (want,) = torch.autograd.grad(model.blocks[0](x, attn_mask=bias).square().sum(), bias)
    fastvit.accelerate(model)
    (got,) = torch.autograd.grad(model.blocks[0](x, attn_mask=bias).square().sum(), bias)
    assert close(got, want)


def test_naflex(device: torch.device) -> None:
    """Images of other sizes, padded to one number of patches."""
    model = import_library("timm").create_model("naflexvit_base_patch16_gap", embed_dim=64, depth=2, num_heads=2)
    model = randomised(model.eval()).to(device)
    inputs = {"patches": torch.randn(2, 12, 768, device=device), "patch_valid": torch.ones(2, 12, dtype=torch.bool)}
    inputs["patch_coord"] = torch.stack(torch.meshgrid(torch.arange(3), torch.arange(4), indexing="ij"), -1)
    inputs["patch_coord"] = inputs["patch_coord"].view(1, 12, 2).repeat(2, 1, 1).to(device)
    inputs["patch_valid"] = inputs["patch_valid"].to(device)
    inputs["patch_valid"][1, 8:] = False
    check(model, lambda m: m(inputs), "attention_qkvpacked_fwd")


def test_masks_that_no_op_takes_are_the_library_s() -> None:
    """`fused_forward` then runs the module's own forward, which test_transformers.py tests."""
    taken = torch.ones(2, 1, 1, 17)
    assert checked_mask(taken, 17) is taken
    of_tokens, of_other_keys = torch.ones(2, 17, dtype=torch.bool), torch.ones(2, 1, 17, 5)
    of_integers, of_three_dimensions = torch.zeros(17, 17, dtype=torch.int64), torch.ones(2, 17, 17)
    for mask in (of_tokens, of_other_keys, of_integers, of_three_dimensions, "blocks"):
        with pytest.raises(CannotFuse, match="an attention mask of"):
            checked_mask(mask, 17)


# ---- keys that heads share, norms over all heads ----


@pytest.mark.parametrize("qk_norm", [False, True])
def test_sapiens2(qk_norm: bool, device: torch.device) -> None:
    """The second layer has two heads of keys for four of queries."""
    options = {"num_key_value_heads_per_layer": [4, 2], "num_register_tokens": 2, "layerscale_value": 0.5}
    model = of_transformers("Sapiens2Model", use_qk_norm=qk_norm, **options).to(device)
    image = torch.randn(2, 3, 32, 32, device=device)
    check(model, lambda m: m(image), "attention_fwd", "rotary")


def with_shared_keys(**options: Any) -> nn.Module:
    """Return an attention of timm with two heads of keys for four of queries."""
    layers = import_library("timm").layers
    return layers.AttentionRope(64, 4, qkv_fused=False, num_kv_heads=2, norm_layer=layers.RmsNorm, **options)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_attention_rope_of_timm(qk_norm: bool, device: torch.device) -> None:
    model = nn.ModuleList([randomised(with_shared_keys(qk_norm=qk_norm, rotate_half=True))]).to(device)
    x, rope = torch.randn(2, 7, 64, device=device), torch.randn(6, 32, device=device)
    mask = torch.rand(7, 7, device=device) > 0.2
    masks: list[dict[str, Any]] = [{}, {"attn_mask": mask}, {"is_causal": True}]
    report = accelerate_as_it_was(model, lambda: [model[0](x, rope, **seen) for seen in masks])
    norm = ["rms_norm"] * qk_norm
    assert outcome(report, "0") == ("accelerated", ", ".join([*norm, "attention", "linear"]))


def test_sapiens2_of_timm(device: torch.device) -> None:
    sizes = {"embed_dim": 64, "num_heads": 4, "depth": 2, "img_size": 64}
    model = import_library("timm").create_model("vit_large_patch16_sapiens2", num_kv_heads=2, num_classes=0, **sizes)
    model = randomised(model.eval()).to(device)
    image = torch.randn(2, 3, 64, 64, device=device)
    check(model, lambda m: m(image), "attention_fwd")


def test_ovis2(device: torch.device) -> None:
    """RMSNorms and a SwiGLU."""
    import_library("transformers")
    ovis2 = importlib.import_module("transformers.models.ovis2.modeling_ovis2")
    model = randomised(small_transformers.build(ovis2.Ovis2VisionModel).eval(), 0.05).to(device)
    inputs = {name: t.to(device) for name, t in small_transformers.inputs(model).items()}
    check(model, lambda m: m(**inputs))
    assert fastvit.accelerate(model).fused("MLP") == (2, 2)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_internvl_with_norms_over_all_heads(qk_norm: bool, device: torch.device) -> None:
    """The tower of InternVL's 6B model."""
    model = of_transformers("InternVLVisionModel", use_qk_norm=qk_norm, norm_type="rms_norm").to(device)
    image = torch.randn(2, 3, 32, 32, device=device)
    check(model, lambda m: m(image), *(["attention_fwd", "linear_fwd"] if qk_norm else []))
    kinds = {entry.detail for entry in fastvit.accelerate(model).accelerated if entry.kind == "InternVLVisionLayer"}
    attention = "layer_norm_linear, rms_norm, attention, linear" if qk_norm else "layer_norm_attention"
    assert kinds == {f"{attention}, layer_norm_mlp"}


def test_widths_of_norms_and_keys_that_do_not_fit() -> None:
    timm = import_library("timm")
    attention = with_shared_keys(qk_norm=True)
    attention.q_norm = attention.k_norm = timm.layers.RmsNorm(64)
    report = fastvit.accelerate(nn.ModuleList([attention]))
    assert outcome(report, "0") == ("skipped", "norms of q and k over [64] of 4 heads of 16")
    attention.q_norm = attention.k_norm = nn.Identity()
    attention.num_kv_heads = 3
    report = fastvit.accelerate(nn.ModuleList([attention]))
    assert outcome(report, "0") == ("skipped", "k and v have 32 outputs for 3 heads")


# ---- attention and MLP side by side ----


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"qkv_bias": True, "fuse_out_proj": True},
        {"qk_norm": True, "init_values": 0.5},
        {"qkv_bias": True, "proj_bias": False, "drop_path_rate": 0.5, "init_values": 0.5},
    ],
    ids=["plain", "one layer out", "qk_norm", "stochastic depth"],
)
def test_parallel_blocks(options: dict[str, Any], device: torch.device) -> None:
    """The blocks of ViT-22B. A sample that stochastic depth drops is dropped from both branches."""
    timm = import_library("timm")
    p = options.pop("drop_path_rate", 0.0)
    block = timm.models.vision_transformer.ParallelScalingBlock(64, 4, drop_path=p, **options)
    model = nn.ModuleList([randomised(block)]).to(device).train()
    x = torch.randn(8, 7, 64, device=device)
    check(model, lambda m: m[0](x), fused=(0, 0))
    (entry,) = (e for e in fastvit.accelerate(model).entries if e.name == "0")
    assert (entry.status, entry.detail) == ("accelerated", "layer_norm_attention, layer_norm_mlp")
    own = type(block).forward
    masks: list[dict[str, Any]] = [{"attn_mask": torch.rand(7, 7, device=device) > 0.2}, {"is_causal": True}]
    for seen in masks:
        outputs = []
        for forward in (block, lambda x, **more: own(block, x, **more)):
            torch.manual_seed(3)
            with torch.no_grad():
                outputs.append(forward(x, **seen))
        assert close(*outputs)


def test_parallel_blocks_of_a_model_and_what_is_left() -> None:
    timm = import_library("timm")
    small = {"embed_dim": 64, "num_heads": 4, "depth": 2, "img_size": 32}
    model = timm.create_model("vit_base_patch16_xp_224", **small).eval()
    image = torch.randn(2, 3, 32, 32)
    report = accelerate_as_it_was(model, lambda: model(image))
    assert outcome(report, "blocks.1")[0] == "accelerated"
    block = timm.models.vision_transformer.ParallelScalingBlock(64, 4, proj_drop=0.1).train()
    report = fastvit.accelerate(nn.ModuleList([block]))
    assert outcome(report, "0") == ("skipped", "its two dropouts differ: 0.1 and 0.0")
    block = timm.models.vision_transformer.ParallelScalingBlock(64, 4)
    block.in_proj = nn.Sequential(block.in_proj)
    report = fastvit.accelerate(nn.ModuleList([block]))
    assert outcome(report, "0") == ("skipped", "in_proj is nn.Sequential")


# ---- sequences of several lengths ----

TOWERS = {
    "qwen2_vl": "Qwen2VisionTransformerPretrainedModel",
    "qwen2_5_vl": "Qwen2_5_VisionTransformerPretrainedModel",
    "qwen3_vl": "Qwen3VLVisionModel",
    "qwen3_vl_moe": "Qwen3VLMoeVisionModel",
    "qwen3_omni_moe": "Qwen3OmniMoeVisionEncoder",
    "qwen3_5": "Qwen3_5VisionModel",
    "qwen3_5_moe": "Qwen3_5MoeVisionModel",
    "qwen4_exp": "Qwen4ExpVisionModel",
    "ernie4_5_vl_moe": "Ernie4_5_VLMoeVisionTransformerPretrainedModel",
    "cohere_compass": "CohereCompassVisionModel",
    "glm4v": "Glm4vVisionModel",
    "glm4v_moe": "Glm4vMoeVisionModel",
}


def tower(file: str) -> nn.Module:
    import_library("transformers")
    try:
        module = importlib.import_module(f"transformers.models.{file}.modeling_{file}")
    except ImportError:
        pytest.skip(f"this version of transformers has no {file}")
    return randomised(small_transformers.build(getattr(module, TOWERS[file])).eval(), 0.02)


@pytest.mark.parametrize("file", TOWERS)
def test_images_one_after_the_other(file: str, device: torch.device) -> None:
    """The second of half the first one's size."""
    model = tower(file).to(device)
    inputs = small_transformers.inputs(model)
    first = next(iter(inputs))
    inputs = {**inputs, first: inputs[first][:24], "grid_thw": torch.tensor([[1, 4, 4], [1, 2, 4]])}
    inputs = {name: t.to(device) for name, t in inputs.items()}
    blocks = [m for m in model.modules() if type(m).__name__.endswith("VisionAttention")]
    call = lambda m: m(**inputs)  # noqa: E731
    check(model, call, "rotary", "attention_varlen_fwd", "attention_varlen_bwd", fused=(len(blocks), len(blocks)))
    if file in ("qwen2_5_vl", "glm4v"):
        assert fastvit.accelerate(model).fused("MLP") == (len(blocks), len(blocks))


def test_towers_under_compile_and_with_other_arguments(device: torch.device) -> None:
    model = tower("qwen2_5_vl").to(device)
    attention = next(m for m in model.modules() if type(m).__name__.endswith("VisionAttention"))
    D = attention.dim
    x, ends = torch.randn(24, D, device=device), torch.tensor([0, 16, 24], dtype=torch.int32, device=device)
    angles = torch.randn(24, D // attention.num_heads // 2, device=device).repeat(1, 2)
    positions = angles.cos(), angles.sin()
    want = attention(x, ends, positions)
    fastvit.accelerate(model)
    torch._dynamo.reset()
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    for got in (
        attention(x, ends, positions),
        attention(x, ends, positions, max_seqlen=16),
        attention(x, cu_seqlens=ends.long(), position_embeddings=positions),
        compiled(x, ends, positions),
    ):
        assert close(got, want)
    with pytest.warns(UserWarning, match="no cu_seqlens or no rotary positions"), pytest.raises(TypeError):
        attention(x, ends)
    attention.config._attn_implementation = "mine"
    report = fastvit.accelerate(nn.ModuleList([attention]))
    assert outcome(report, "0") == ("skipped", "its attention implementation is 'mine'")


# ---- as an attention implementation ----


def test_registered_attention_takes_shared_keys(device: torch.device) -> None:
    register_attention()
    model = of_transformers("Sapiens2Model", num_key_value_heads_per_layer=[4, 2]).to(device)
    image = torch.randn(2, 3, 32, 32, device=device)
    want = step(model, lambda m: m(image))
    model.set_attn_implementation("fastvit")
    with Calls() as calls:
        got = step(model, lambda m: m(image))
    assert_steps_agree(got, want)
    assert calls.names.count("fastvit::attention_fwd") == 2
