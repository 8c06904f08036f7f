"""Our models against timm's of the same name and weights: keys, defaults, logits, every gradient, other sizes, heads,
initial values. Rows are configurations that differ; `make nightly` compares the keys and defaults of every name."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from graph_models import FunctionModule
from library_imports import import_timm
from models import Calls, randomised, step, twins
from torch import Tensor, nn

import fastvit
from fastvit import VisionTransformer, reference, zoo
from fastvit.eva import Eva
from fastvit.modules.parts import DropPath
from fastvit.modules.pooling import AttentionPoolLatent
from fastvit.modules.rope import RotaryEmbeddingCat, RotaryEmbeddingDinoV3
from fastvit.zoo.eva import CONFIGS as EVAS
from fastvit.zoo.vit import DISTILLED

VIT, REG4, DEIT = "vit_tiny_patch16_224", "vit_small_patch14_reg4_dinov2", "deit_tiny_distilled_patch16_224"
DINOV3, EVA02, PE = "vit_small_patch16_dinov3", "eva02_tiny_patch14_224", "vit_pe_core_tiny_patch16_384"
FAMILIES = [
    VIT, REG4, DEIT, "test_vit2", "test_vit4", "deit3_small_patch16_224", "flexivit_small",
    "vit_intern300m_patch14_448", "vit_base_patch16_224_miil", "vit_medium_patch16_gap_240",
    "vit_so150m_patch16_reg4_map_256", "vit_base_patch14_reg1_tipsv2", "vit_base_patch16_radio_v3",
    "vit_giant_patch14_dinov2", "vit_xsmall_patch16_clip_224", "vit_base_patch32_clip_quickgelu_224",
    "vit_base_patch32_siglip_256", "aimv2_large_patch14_224", "eva_large_patch14_196",
    DINOV3, EVA02, PE, "vit_small_plus_patch16_dinov3_qkvb", "eva_giant_patch14_clip_224",
    "vit_pe_spatial_tiny_patch16_512", "vit_pe_lang_large_patch14_448", "vit_small_patch16_rope_ape_224",
    "vit_mediumd_patch16_rope_reg1_gap_256",
]  # fmt: skip
SHARED = [name for name in fastvit.list_models() if "cifar" not in name]
MORE: list[tuple[str, dict[str, Any]]] = [
    (VIT, {"embed_norm_layer": nn.LayerNorm, "reg_tokens": 2}),
    (VIT, {"qk_norm": True, "proj_bias": False}),
    (VIT, {"global_pool": "map", "fc_norm": True}),
    (VIT, {"global_pool": "avgmax", "reg_tokens": 1}),
    (VIT, {"mlp_layer": "SwiGLU"}),
    (VIT, {"in_chans": 1, "global_pool": "", "num_classes": 0}),
    (EVA02, {"use_fc_norm": False, "use_post_transformer_norm": False}),
    (EVA02, {"use_fc_norm": True, "use_post_transformer_norm": True, "global_pool": "max"}),
]
POOLS = ["token", "avg", "max", "avgmax", "map", ""]


def pair(name: str, **arguments: Any) -> tuple[Any, Any]:
    """Ours and timm's with the same random parameters, in float64, of two small blocks and 2 x 3 patches."""
    timm, patch = import_timm(), zoo.config(name).get("patch_size", 16)
    sizes = {"img_size": (2 * patch, 3 * patch), "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 3}
    if "mlp_layer" in arguments:
        arguments["mlp_layer"] = getattr(timm.layers, arguments["mlp_layer"])
    ours, theirs = (library.create_model(name, **{**sizes, **arguments}) for library in (fastvit, timm))
    assert list(shapes(ours)) == list(shapes(theirs))
    return twins(ours.double(), theirs.double())


def image(model: Any, *size: int) -> Tensor:
    shape = 2, model.patch_embed.proj.in_channels, *(size or model.patch_embed.img_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def assert_close(got: Tensor, want: Tensor, what: str = "") -> None:
    """Up to the rounding of rotary tables, which are float32 in ours and, of some sizes, float64 in timm's."""
    scale = want.abs().max().item() if want.numel() else 0.0
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6 * max(scale, 1e-6), msg=lambda m: f"{what}: {m}")


def assert_same_step(ours: nn.Module, theirs: nn.Module, x: Tensor) -> None:
    want = step(theirs, x)
    for name, got in step(ours, x).items():
        assert_close(got, want[name], name)


@pytest.mark.parametrize(("name", "arguments"), [*((name, {}) for name in FAMILIES), *MORE], ids=str)
def test_logits_and_gradients(name: str, arguments: dict[str, Any]) -> None:
    """In training mode, where nothing is dropped; every block is fused."""
    ours, theirs = pair(name, **arguments)
    x = image(ours)
    assert_same_step(ours, theirs, x)
    with torch.no_grad(), Calls() as calls:
        ours.eval().forward_features(x)
    assert calls.names.count("fastvit::attention_fwd") == 2
    assert calls.names.count("fastvit::rotary") == (2 if getattr(ours, "rope", None) else 0)
    with torch.no_grad():
        features = theirs.eval().forward_features(x)
        assert_close(ours.forward_features(x), features)
        pooled = [model.forward_head(features, pre_logits=True) for model in (ours, theirs)]
        assert_close(*pooled)


# ---- names, keys and defaults ----


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {key: tuple(value.shape) for key, value in sorted(model.state_dict().items())}


@pytest.mark.parametrize(
    "name", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.nightly) for name in SHARED if name not in FAMILIES)]
)
def test_keys_and_defaults(name: str) -> None:
    timm = import_timm()
    from timm.models import get_model_input_config

    theirs = timm.create_model(name, device="meta", **({} if name in EVAS else {"weight_init": "skip"}))
    ours = fastvit.create_model(name, device="meta")
    assert isinstance(ours, Eva) == (name in EVAS)
    assert shapes(ours) == shapes(theirs)
    for attribute in (
        "num_classes", "global_pool", "embed_dim", "num_features", "num_prefix_tokens", "num_reg_tokens",
        "has_class_token", "no_embed_class", "dynamic_img_size", "head_hidden_size", "in_chans",
        "feature_info",
    ):  # fmt: skip
        assert name in EVAS or hasattr(theirs, attribute)
        assert getattr(ours, attribute) == getattr(theirs, attribute, getattr(ours, attribute)), attribute
    assert get_model_input_config(ours) == get_model_input_config(theirs)
    assert ours.default_cfg is ours.pretrained_cfg
    for key in ours.pretrained_cfg.keys() - {"fixed_input_size"}:  # timm's is True for models of any size too
        assert ours.pretrained_cfg[key] == theirs.pretrained_cfg[key], key
    for attribute in ("img_size", "patch_size", "grid_size", "num_patches"):
        assert getattr(ours.patch_embed, attribute) == getattr(theirs.patch_embed, attribute), attribute
    for norm in ("norm_pre", "norm", "fc_norm", "blocks.0.norm1", "attn_pool.norm", "patch_embed.norm"):
        eps = [getattr(dict(model.named_modules()).get(norm), "eps", None) for model in (ours, theirs)]
        assert eps[0] == eps[1], norm
    first, other = ours.blocks[0], theirs.blocks[0]
    assert len(ours.blocks) == len(theirs.blocks)
    assert (first.attn.num_heads, first.attn.scale) == (other.attn.num_heads, other.attn.scale)
    scales = [block if name in EVAS else block.ls1 for block in (first, other)]
    assert getattr(scales[0], "init_values", None) == getattr(scales[1], "init_values", None)
    assert ours.no_weight_decay() == theirs.no_weight_decay() | {"dist_token"}  # which timm's Eva leaves out
    assert ours.get_classifier() == ((ours.head, ours.head_dist) if name in DISTILLED else ours.head)
    if getattr(ours, "rope", None) is not None and hasattr(theirs.rope, "grid_offset"):
        assert ours.rope.grid_offset == theirs.rope.grid_offset


# ---- other sizes, heads, groups ----

SIZES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (VIT, {"dtype": torch.bfloat16}, {"img_size": (96, 48)}),
    (DEIT, {}, {"img_size": 128, "patch_size": (32, 16)}),
    (EVA02, {}, {"img_size": (56, 84)}),
    (VIT, {}, {}),
]


@pytest.mark.parametrize(("name", "arguments", "size"), SIZES, ids=str)
def test_a_new_input_size(name: str, arguments: dict[str, Any], size: dict[str, Any]) -> None:
    """Frozen parameters stay frozen, and hooks stay."""
    ours, theirs = (model.requires_grad_(False).eval() for model in pair(name, **arguments))
    grids = []
    hook = ours.patch_embed.proj.register_forward_hook(lambda _, __, y: grids.append(y.shape[2:]))
    for model in (ours, theirs):
        model.set_input_size(**size)
    assert torch.equal(ours.pos_embed, theirs.pos_embed)
    weights = ours.patch_embed.proj.weight, theirs.patch_embed.proj.weight
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-5)  # timm resamples in float32
    img_size = ours.patch_embed.img_size
    assert img_size == theirs.patch_embed.img_size == ours.pretrained_cfg["input_size"][1:]
    assert ours.feature_info[0]["reduction"] == max(ours.patch_embed.patch_size)
    assert not [name for name, p in ours.named_parameters() if p.requires_grad]
    theirs.load_state_dict(ours.state_dict())
    assert_close(ours(image(ours)), theirs(image(ours)))
    assert grids == [ours.patch_embed.grid_size] == [theirs.patch_embed.grid_size]
    hook.remove()
    assert_close(ours(image(ours)), theirs(image(ours)))


@pytest.mark.parametrize("name", [REG4, DEIT, DINOV3])
def test_images_of_any_size(name: str) -> None:
    ours, theirs = pair(name, dynamic_img_size=True)
    h, w = ours.patch_embed.patch_size
    assert_same_step(ours, theirs, image(ours, 4 * h, w))


RESET: list[tuple[str, dict[str, Any]]] = [
    (VIT, {"reg_tokens": 2}), (VIT, {"reg_tokens": 2, "class_token": False}),
    ("vit_pe_core_gigantic_patch14_448", {"class_token": False}), (DINOV3, {}),
]  # fmt: skip


@pytest.mark.parametrize("made_with", POOLS)
@torch.inference_mode()
def test_a_reset_classifier(made_with: str) -> None:
    """After every reset from one pooling to another, of plain ViTs and Eva with CLS, registers, both, and neither."""
    tokens = torch.randn(2, 9, 32, dtype=torch.float64)
    for name, arguments in RESET:
        if made_with == "token" and not {**zoo.config(name), **arguments}.get("class_token", True):
            continue
        ours, theirs = pair(name, depth=0, global_pool=made_with, **arguments)
        for global_pool in (None, made_with, *POOLS, made_with):
            refused = {"map": ours.attn_pool is None, "token": ours.cls_token is None}.get(global_pool, False)
            for model, error in ((ours, ValueError), (theirs, AssertionError)):
                with pytest.raises(error) if refused else nullcontext():
                    model.reset_classifier(4, global_pool)
            assert ours.global_pool == theirs.global_pool, (name, arguments)
            twins(ours, theirs)
            for pool_type in (None, "", "avg", "max", "avgmax"):
                assert_close(*[model.pool(tokens, pool_type) for model in (ours, theirs)])
            assert_close(*[model.forward_head(tokens) for model in (ours, theirs)])


def test_timm_groups_parameters_by_depth_as_its_own() -> None:
    for arguments in ({"reg_tokens": 2, "init_values": 0.1}, {"global_pool": "map"}):
        models = pair(VIT, depth=3, **arguments)
        from timm.models import group_parameters

        for coarse in (False, True):
            groups = [group_parameters(m, m.group_matcher(coarse=coarse), reverse=True) for m in models]
            assert groups[0] == groups[1]


def test_stochastic_depth_under_one_seed() -> None:
    ours, theirs = pair(VIT, depth=3, drop_path_rate=0.5)
    assert [getattr(block.drop_path1, "drop_prob", 0.0) for block in ours.blocks] == [0.0, 0.25, 0.5]
    assert isinstance(ours.blocks[2].drop_path2, DropPath)
    x = image(ours).repeat(4, 1, 1, 1)
    outputs = []
    for model in (ours, theirs):
        torch.manual_seed(7)
        outputs.append(model(x))
    assert_close(*outputs)


# ---- distillation ----


def test_distilled_training() -> None:
    """Dropout before the heads draws a mask for each token, CLS first."""
    ours, theirs = pair(DEIT, drop_rate=0.3)
    x = image(ours)
    for model in (ours, theirs):
        model.train().set_distilled_training(True)
    assert_same_step(*(FunctionModule(lambda m, x: torch.cat(m.pair(x), dim=1), pair=m) for m in (ours, theirs)), x)
    assert_close(ours.eval()(x), theirs.eval()(x))
    ours.train().set_distilled_training(False)
    assert ours(x).shape == (2, 3)


def test_heads_of_a_distilled_model() -> None:
    ours, theirs = (model.eval() for model in pair(DEIT))
    for num_classes, global_pool in ((5, None), (4, "token"), (0, "")):
        for model in (ours, theirs):
            model.reset_classifier(num_classes, global_pool)
        twins(ours, theirs)
        assert_close(ours(image(ours)), theirs(image(ours)))
    assert ours.prune_intermediate_layers([0]) == theirs.prune_intermediate_layers([0])
    assert_close(ours(image(ours)), theirs(image(ours)))


# ---- rotary positions ----


def test_rotary_tables(device: torch.device) -> None:
    """Those of DINOv3 stay float32 in a model of another dtype."""
    options = {"ref_feat_shape": (16, 8), "rotate_half": True, "grid_offset": 1.0, "temperature": 100.0}
    library = import_timm().layers
    theirs = library.RotaryEmbeddingCat(32, in_pixels=False, **options).get_embed([5, 7])
    assert torch.equal(RotaryEmbeddingCat(32, **options).get_embed((5, 7)), theirs)
    theirs = library.RotaryEmbeddingDinoV3(32).get_embed((5, 7))
    torch.testing.assert_close(RotaryEmbeddingDinoV3(32).get_embed((5, 7)), theirs, rtol=1e-6, atol=1e-6)
    model = randomised(fastvit.create_model(DINOV3, depth=1, device=device, dtype=torch.bfloat16))
    assert model.rope.get_embed((2, 3), device).dtype is torch.float32
    assert not [key for key in model.state_dict() if "rope" in key]


# ---- initial values ----


SMALL: dict[str, Any] = {"embed_dim": 256, "depth": 1, "num_heads": 4, "num_classes": 400}
INITIALISED: dict[str, dict[str, Any]] = {
    "vit_small_patch16_224": {"init_values": 1e-5, "reg_tokens": 4},
    "vit_large_patch16_224": {"mlp_layer": "GluMlp"},  # the gate's bias is 1, and its weights are tiny
    "vit_base_patch16_siglip_224": {"mlp_layer": "SwiGLU"},
    "deit_base_distilled_patch16_224": {"norm_layer": "rmsnorm"},
    "eva02_base_patch14_448": {"img_size": 224},
    "eva_giant_patch14_clip_224": {"init_values": 0.5},  # with parameters next to its layers: gammas, q_bias, v_bias
}


def assert_same_statistics(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Check mean and deviation of the halves of each tensor: a gate and a value may be in one layer."""
    assert got.keys() == want.keys()
    for key, expected in want.items():
        for ours, theirs in zip(got[key].chunk(2), expected.chunk(2), strict=True):
            error, std = 6 / theirs.numel() ** 0.5, theirs.std(correction=0).item()
            assert ours.std(correction=0).item() == pytest.approx(std, rel=error + 0.02, abs=1e-12), key
            assert ours.mean().item() == pytest.approx(theirs.mean().item(), abs=error * std + 1e-12), key


@pytest.mark.parametrize("name", INITIALISED)
def test_as_timms(name: str) -> None:
    timm = import_timm()

    def make(library: Any, **where: Any) -> Any:
        arguments = {**SMALL, **INITIALISED[name]}
        if "mlp_layer" in arguments:
            arguments["mlp_layer"] = getattr(library.layers, arguments["mlp_layer"])
        return library.create_model(name, **arguments, **where)

    want = make(timm).state_dict()
    assert_same_statistics(make(fastvit).state_dict(), want)
    model = make(fastvit, device="meta").to_empty(device="cpu")
    for value in model.state_dict().values():
        value.fill_(torch.nan)
    model.init_weights()
    assert_same_statistics(model.state_dict(), want)


def test_a_latent_is_cut_off_at_twice_its_deviation() -> None:
    latent = AttentionPoolLatent(1024).latent
    assert latent.std().item() == pytest.approx(0.88 / 32, rel=0.1)
    assert latent.abs().max() <= 2 / 32


def test_init_weights_of_tokens_alone() -> None:
    """The linear layers are PyTorch's with needs_reset, and stay as they are without."""
    model = VisionTransformer(16, 4, embed_dim=32, depth=2, num_heads=2)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.init_weights("skip", needs_reset=False)
    changed = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert changed == {"cls_token", "pos_embed"}
    model.init_weights("reset")
    assert model.blocks[0].mlp.fc1.bias.any()
    assert model.pos_embed.std().item() == pytest.approx(0.02, rel=0.2)


@pytest.mark.parametrize("kind", [VisionTransformer, reference.VisionTransformer])
def test_a_kaiming_patch_embedding(kind: Any) -> None:
    """The constructor and `init_weights` give the values of He et al.: normal, with deviation sqrt(2 / fan_in)."""
    model = kind(32, 4, embed_dim=256, depth=1, num_heads=4, patch_init="kaiming")
    for change in (lambda: None, model.init_weights):
        change()
        weight, bias = model.patch_embed.proj.weight, model.patch_embed.proj.bias
        assert weight.std().item() == pytest.approx((2 / 48) ** 0.5, rel=0.03)
        assert weight.abs().max() > 3 * weight.std()  # normal, not uniform
        assert not bias.any()
        torch.nn.init.ones_(bias), torch.nn.init.ones_(weight)
