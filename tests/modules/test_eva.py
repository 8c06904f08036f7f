"""fastvit.eva: positions and logits against timm; gradients against the reference; what models promise. Names and keys:
test_zoo.py; initial values: test_initialisation.py."""

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from library_imports import import_timm
from models import close, randomised, twins
from oracle import GRADIENT, assert_as_accurate
from torch import Tensor, nn

import fastvit
from fastvit import ops
from fastvit.eva import Eva
from fastvit.eva_layers import AttentionRope, EvaAttention, EvaBlock
from fastvit.reference.eva import Eva as ReferenceEva
from fastvit.rope import RotaryEmbeddingCat, RotaryEmbeddingDinoV3
from fastvit.zoo.eva import CONFIGS

# one of each kind: rotated by halves with CLS and 4 registers; SwiGLU in two layers; biases apart; one layer with both;
# three layers for q, k, v and an inner norm; norm before the blocks, with attention pooling and without; xy; registers
# alone
KINDS = [
    "vit_small_patch16_dinov3", "vit_small_plus_patch16_dinov3", "vit_tiny_patch16_dinov3_qkvb",
    "eva02_tiny_patch14_224", "eva02_base_patch14_448", "eva_giant_patch14_224",
    "vit_pe_core_tiny_patch16_384", "vit_pe_spatial_tiny_patch16_512", "vit_pe_lang_gigantic_patch14_448",
    "vit_small_patch16_rope_224", "vit_small_patch16_rope_ape_224",
    "vit_mediumd_patch16_rope_reg1_gap_256",
]  # fmt: skip
every_kind = pytest.mark.parametrize("name", KINDS)


def small(name: str, **more: Any) -> dict[str, Any]:
    patch_size = CONFIGS[name].get("patch_size", 16)
    size = {"embed_dim": 64, "depth": 2, "num_heads": 2, "img_size": (2 * patch_size, 3 * patch_size)}
    return {**CONFIGS[name], **size, "num_classes": 5, **more}


def images(model: Any, count: int = 2, **where: Any) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(count, 3, *model.patch_embed.img_size, **where)


@every_kind
def test_logits_are_timms(name: str, device: torch.device) -> None:
    """On a grid that is not square, in training mode too, where nothing is dropped."""
    timm = import_timm()
    arguments = small(name)
    theirs = timm.create_model(
        name,
        **{k: v for k, v in arguments.items() if k in ("img_size", "embed_dim", "depth", "num_heads", "num_classes")},
    )
    ours = Eva(**arguments)
    twins(ours, theirs)
    for model in (ours, theirs):
        model.to(device).train(name.endswith("dinov3"))
    image = images(ours, device=device)
    with torch.no_grad():
        assert close(ours(image), theirs(image))
        assert close(ours.forward_features(image), theirs.forward_features(image))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_kind
def test_accurate(name: str, dtype: torch.dtype, device: torch.device) -> None:
    assert_accurate(small(name, depth=1), dtype, device)


@pytest.mark.parametrize("name", ["vit_small_patch16_dinov3", "eva02_base_patch14_448"])
def test_accurate_with_kernels(name: str, triton_backend: None, device: torch.device) -> None:
    assert_accurate(small(name, depth=1), torch.bfloat16, device)


def assert_accurate(arguments: dict[str, Any], dtype: torch.dtype, device: torch.device) -> None:
    """Logits and every gradient against the reference in the same dtype and in float64."""
    ours = randomised(Eva(**arguments, device=device)).to(dtype)
    if not isinstance(arguments.get("norm_layer", ""), str):
        arguments["norm_layer"] = partial(nn.LayerNorm, eps=1e-5)
    eager = ReferenceEva(**arguments, device=device).to(dtype)
    eager.load_state_dict(ours.state_dict())
    image = images(ours, device=device).to(dtype)
    found = []
    for model, x in ((ours, image), (eager, image), (copy.deepcopy(eager).double(), image.double())):
        logits = model(x)
        dlogits = torch.linspace(-1, 1, logits.numel(), device=device).view(logits.shape).to(logits)
        parameters = dict(model.named_parameters())
        gradients = torch.autograd.grad(logits, list(parameters.values()), dlogits)
        found.append({"logits": logits} | dict(zip(parameters, gradients, strict=True)))
    for key, got in found[0].items():
        factor = 2.0 if key == "logits" else GRADIENT
        assert_as_accurate(got, found[1][key], found[2][key], factor=factor, what=key)


@every_kind
def test_blocks_run_as_two_ops(name: str, device: torch.device) -> None:
    arguments = small(name, depth=1)
    model = Eva(**arguments, device=device)
    image = images(model, device=device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, torch.no_grad():
        model(image)
    names = [event.name for event in profile.events() if event.name.startswith("fastvit::")]
    assert names.count("fastvit::attention_qkvpacked_fwd") == 1
    assert names.count("fastvit::rotary") == int(arguments.get("use_rot_pos_emb", False))


def test_a_hook_inside_is_called(device: torch.device) -> None:
    """On a norm or what is in its place, on the projections, on the probabilities, on the gate: the same result by the
    modules one by one."""
    model = randomised(Eva(**small("eva02_base_patch14_448"), device=device)).eval()
    image = images(model, device=device)
    want = model(image)
    seen: list[str] = []
    names = ["norm1", "attn.q_proj", "attn.attn_drop", "attn.proj", "mlp.fc1_g", "mlp.norm", "norm2"]
    for name in names:
        module = model.blocks[0].get_submodule(name)
        handle = module.register_forward_hook(lambda *_, name=name: seen.append(name))
        assert close(model(image), want), name
        handle.remove()
    assert seen == names
    packed = randomised(Eva(**small("vit_tiny_patch16_dinov3_qkvb"), device=device)).eval()
    image = images(packed, device=device)
    want = packed(image)
    packed.blocks[0].attn.qkv.register_forward_hook(lambda *_: None)
    assert close(packed(image), want)


@pytest.mark.parametrize("name", ["vit_small_patch16_dinov3", "eva02_tiny_patch14_224"])
def test_compile_copy_and_pickle(name: str, device: torch.device) -> None:
    model = randomised(Eva(**small(name), device=device)).train()
    image = images(model, device=device)
    want = model(image)
    torch._dynamo.reset()
    assert close(torch.compile(model, backend="aot_eager", fullgraph=True)(image), want)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(image), want)


@pytest.mark.parametrize("fc_norm", [False, True])
@pytest.mark.parametrize("post_norm", [False, True])
def test_norms_behind_the_blocks_are_timms(fc_norm: bool, post_norm: bool) -> None:
    """Either, both or none."""
    options: dict[str, Any] = {"img_size": 32, "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 3}
    options |= {"use_fc_norm": fc_norm, "use_post_transformer_norm": post_norm}
    ours, theirs = Eva(**options).eval(), import_timm().models.eva.Eva(**options).eval()
    twins(ours, theirs)
    with torch.no_grad():
        assert close(ours(images(ours)), theirs(images(ours)))


def test_other_image_sizes(device: torch.device) -> None:
    """DINOv3's take any that patches divide, and so does a model that is told of another."""
    timm = import_timm()
    arguments = {"embed_dim": 64, "depth": 1, "num_heads": 2, "num_classes": 3}
    ours, theirs = (lib.create_model("vit_small_patch16_dinov3", **arguments).eval() for lib in (fastvit, timm))
    twins(ours, theirs)
    image = torch.randn(1, 3, 48, 80)
    assert close(ours(image), theirs(image))
    ours, theirs = (lib.create_model("eva02_tiny_patch14_224", **arguments).eval() for lib in (fastvit, timm))
    twins(ours, theirs)
    for model in (ours, theirs):
        model.set_input_size((56, 84))
    image = torch.randn(1, 3, 56, 84)
    assert close(ours(image), theirs(image))


# ---- positions ----

COORDINATES: dict[str, dict[str, Any]] = {
    "cat": {},
    "reference": {"ref_feat_shape": (16, 8)},
    "xy": {"grid_indexing": "xy", "grid_offset": 1.0},
    "halves": {"rotate_half": True, "temperature": 100.0},
}


@pytest.mark.parametrize("kind", COORDINATES)
def test_tables_are_timms(kind: str) -> None:
    theirs = import_timm().layers.RotaryEmbeddingCat(32, in_pixels=False, **COORDINATES[kind])
    assert torch.equal(RotaryEmbeddingCat(32, **COORDINATES[kind]).get_embed((5, 7)), theirs.get_embed([5, 7]))


def test_tables_of_dinov3_are_timms() -> None:
    ours, theirs = RotaryEmbeddingDinoV3(32), import_timm().layers.RotaryEmbeddingDinoV3(32)
    torch.testing.assert_close(ours.get_embed((5, 7)), theirs.get_embed((5, 7)), rtol=1e-6, atol=1e-6)


def test_tables_stay_float32(device: torch.device) -> None:
    model = Eva(**small("vit_small_patch16_dinov3"), device=device, dtype=torch.bfloat16)
    assert model.rope is not None
    assert model.rope.get_embed((2, 3), device).dtype is torch.float32
    assert not [key for key in model.state_dict() if "rope" in key]


# ---- layers ----


def test_layers_alone_are_timms(device: torch.device) -> None:
    timm = import_timm()
    rope = RotaryEmbeddingCat(24).get_embed((2, 4), device)
    x = torch.randn(2, 9, 48, device=device)
    for ours, theirs in (
        (EvaAttention(48, 2), timm.models.eva.EvaAttention(48, 2, scale_norm=False)),
        (AttentionRope(48, 2, rotate_half=True), timm.layers.AttentionRope(48, 2, rotate_half=True)),
        (AttentionRope(48, 2, qkv_fused=False), timm.layers.AttentionRope(48, 2, qkv_fused=False)),
        (
            EvaBlock(48, 2, swiglu_mlp=True, init_values=1.0),
            timm.models.eva.EvaBlock(48, 2, swiglu_mlp=True, init_values=1.0),
        ),
    ):
        twins(ours.to(device), theirs.to(device))
        assert close(ours(x, rope), theirs(x, rope=rope))
        assert close(ours(x), theirs(x))


def test_positions_that_do_not_fit_raise(device: torch.device) -> None:
    block = EvaBlock(32, 2, device=device)
    with pytest.raises(ValueError, match=r"rotary\.sin must broadcast"):
        block(torch.randn(1, 9, 32, device=device), torch.randn(5, 32, device=device))
    assert ops.Rotary._fields == ("sin", "cos", "num_prefix_tokens", "interleaved")
