"""The zoo: names, defaults, parameter counts, keys and poolings, against timm where it is installed."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from library_imports import import_timm
from models import twins

import fastvit
from fastvit import zoo
from fastvit.eva import Eva
from fastvit.study import models
from fastvit.study.sources.from_zoo import reference_model
from fastvit.zoo.eva import CONFIGS as EVAS
from fastvit.zoo.video import VIDEOMAE, VJEPA2
from fastvit.zoo.vit import DISTILLED

PARAMETERS = {
    "vit_tiny_patch16_224": 5_717_416,
    "vit_base_patch16_224": 86_567_656,
    "vit_small_patch14_reg4_dinov2": 22_057_344,
    "vit_so400m_patch14_siglip_378": 428_225_600,
    "aimv2_3b_patch14_448": 2_723_017_728,
    "vit_giant_patch14_reg1_tipsv2": 1_135_949_312,
    "vit_cifar_small": 5_362_762,
    "vit_cifar_base": 21_342_346,
    "vit_cifar_large": 75_722_250,
    "vit_small_patch16_dinov3": 21_586_944,
    "vit_7b_patch16_dinov3": 6_716_030_976,
    "vit_pe_core_base_patch16_224": 93_673_984,
    # as transformers counts its encoders, with a bias of zeros for k in VideoMAE
    "videomae_base_patch16_224": 86_227_200 + 12 * 768,
    "videomae_large_patch16_224": 303_860_736 + 24 * 1024,
    "vjepa2_giant_patch16_384": 1_012_173_952,
}
OURS = [*fastvit.list_models("vit_cifar_*"), *VIDEOMAE, *VJEPA2]
SHARED = [name for name in fastvit.list_models() if name not in OURS]
SIZES = {"img_size", "patch_size", "num_classes", "embed_dim", "depth", "num_heads", "mlp_ratio"}
POOLS = ["token", "avg", "max", "avgmax", "map", ""]
RESET: list[tuple[str, dict[str, Any]]] = [
    ("vit_tiny_patch16_224", {}), ("vit_tiny_patch16_224", {"reg_tokens": 2}),
    ("vit_tiny_patch16_224", {"reg_tokens": 2, "class_token": False}), ("vit_tiny_patch16_224", {"class_token": False}),
    ("vit_pe_core_tiny_patch16_384", {}), ("vit_pe_core_tiny_patch16_384", {"num_reg_tokens": 2}),
    ("vit_pe_core_gigantic_patch14_448", {"class_token": False}), ("vit_small_patch16_dinov3", {}),
]  # fmt: skip


def shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {key: tuple(value.shape) for key, value in model.state_dict().items()}


def eps_of(model: torch.nn.Module, name: str) -> float | None:
    return getattr(model.get_submodule(name), "eps", None)


@pytest.mark.parametrize(("name", "count"), PARAMETERS.items())
def test_exact_parameter_count(name: str, count: int) -> None:
    assert sum(p.numel() for p in fastvit.create_model(name, device="meta").parameters()) == count


@pytest.mark.parametrize("name", fastvit.list_models())
def test_the_reference_has_the_same_keys_and_shapes(name: str) -> None:
    ours = fastvit.create_model(name, depth=1, device="meta")
    assert shapes(ours) == shapes(reference_model(name, depth=1, device="meta"))


@pytest.mark.parametrize("name", SHARED)
def test_names_keys_and_defaults_are_timms(name: str) -> None:
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
    firsts = ours.blocks[0], theirs.blocks[0]
    norms = ["norm_pre", "norm", "fc_norm", "blocks.0.norm1"]
    norms += [*["attn_pool.norm"] * (ours.global_pool == "map"), *["patch_embed.norm"] * name.startswith("aimv2")]
    for norm in norms:
        assert eps_of(ours, norm) == eps_of(theirs, norm), norm
    assert len(ours.blocks) == len(theirs.blocks)
    assert firsts[0].attn.num_heads == firsts[1].attn.num_heads
    assert firsts[0].attn.scale == firsts[1].attn.scale
    scales = [block if name in EVAS else block.ls1 for block in firsts]
    assert getattr(scales[0], "init_values", None) == getattr(scales[1], "init_values", None)
    assert ours.no_weight_decay() == theirs.no_weight_decay() | {"dist_token"}  # which timm's Eva leaves out
    assert ours.get_classifier() == ((ours.head, ours.head_dist) if name in DISTILLED else ours.head)
    if getattr(ours, "rope", None) is not None and hasattr(theirs.rope, "grid_offset"):
        assert ours.rope.grid_offset == theirs.rope.grid_offset


def has_class_token(name: str, **arguments: Any) -> bool:
    return {**zoo.config(name), **arguments}.get("class_token", True)


def with_timm(name: str, depth: int = 1, **arguments: Any) -> tuple[Any, Any]:
    """A small model with four patches, in float64: ours and timm's, with the same keys."""
    size = {"img_size": 2 * zoo.config(name).get("patch_size", 16), "embed_dim": 32, "depth": depth, "num_heads": 2}
    small = {**size, "num_classes": 3, "dtype": torch.float64}
    ours, theirs = (library.create_model(name, **small, **arguments).eval() for library in (fastvit, import_timm()))
    assert shapes(ours) == shapes(theirs), name
    return ours, theirs


@pytest.mark.parametrize("global_pool", POOLS)
@torch.inference_mode()
def test_keys_and_logits_of_every_pooling_are_timms(global_pool: str) -> None:
    """The keys for every name, the logits for one of the names that differ in their sizes only."""
    done = set()
    for name in SHARED:
        if (global_pool == "token" and not has_class_token(name)) or (global_pool != "token" and name in DISTILLED):
            continue
        configuration = str(sorted(item for item in zoo.config(name).items() if item[0] not in SIZES))
        ours, theirs = with_timm(name, depth=int(configuration not in done), global_pool=global_pool)
        if configuration not in done:
            done.add(configuration)
            twins(ours, theirs)
            image = torch.randn(1, 3, *ours.patch_embed.img_size, dtype=torch.float64)
            want = theirs(image)  # rotary tables are float32
            torch.testing.assert_close(ours(image), want, rtol=1e-7, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("made_with", POOLS)
@torch.inference_mode()
def test_a_reset_classifier_is_timms(made_with: str) -> None:
    """After every reset from one pooling to another, of plain ViTs and Eva with CLS, registers, both, and neither."""
    tokens = torch.randn(2, 9, 32, dtype=torch.float64)
    for name, arguments in RESET:
        if made_with == "token" and not has_class_token(name, **arguments):
            continue
        ours, theirs = twins(*with_timm(name, global_pool=made_with, **arguments))
        for global_pool in (None, made_with, *POOLS, made_with):
            refused = {"map": ours.attn_pool is None, "token": ours.cls_token is None}.get(global_pool, False)
            for model, error in ((ours, ValueError), (theirs, AssertionError)):
                with pytest.raises(error) if refused else nullcontext():
                    model.reset_classifier(4, global_pool)
            assert ours.global_pool == theirs.global_pool, (name, arguments)
            twins(ours, theirs)
            for pool_type in (None, "", "avg", "max", "avgmax"):
                pooled = [model.pool(tokens, pool_type) for model in (ours, theirs)]
                torch.testing.assert_close(*pooled, rtol=1e-10, atol=1e-10)
            logits = [model.forward_head(tokens) for model in (ours, theirs)]
            torch.testing.assert_close(*logits, rtol=1e-10, atol=1e-10)


def test_every_tower_of_timm_with_attention_pooling_is_there() -> None:
    """But those whose image the patches do not divide: 384 px, of which timm drops the last 6, are the model of 378."""
    timm = import_timm()
    names = {name for kind in ("siglip", "map", "pe_core") for name in timm.list_models(f"vit_*_{kind}_*")}
    assert names - set(fastvit.list_models()) == {
        "vit_so400m_patch14_siglip_384",
        "vit_so400m_patch14_siglip_gap_384",
    }


@pytest.mark.parametrize("fuse_out_proj", [False, True])
def test_a_function_with_parallel_blocks_of_timm(fuse_out_proj: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a fused form; of the layers of both 3 * D rows are q's, k's and v's, and D columns attention's."""
    timm, D, hidden = import_timm(), 64, 256
    block_fn = partial(timm.models.vision_transformer.ParallelScalingBlock, fuse_out_proj=fuse_out_proj)
    small = {"img_size": 32, "embed_dim": D, "num_heads": 2, "depth": 1, "block_fn": block_fn}
    monkeypatch.setattr(timm, "parallel", partial(timm.create_model, "vit_tiny_patch16_224", **small), False)
    (cost,) = models("timm:parallel")
    counted = cost.parameters
    assert (cost.tokens, counted.attention, counted.norms, counted.other) == (5, 4 * D * D + 4 * D, 4 * D, 0)
    assert counted.mlp == 2 * D * hidden + hidden + D * (not fuse_out_proj)


def test_cifar_models_drop_out_a_tenth() -> None:
    for name in fastvit.list_models("vit_cifar_*"):
        model = fastvit.create_model(name, device="meta")
        assert model.patch_init == "kaiming"
        assert model.patch_embed.img_size == (32, 32)
        assert model.patch_embed.patch_size == (4, 4)
        assert model.num_classes == 10
        assert model.pos_drop.p == 0.1
        attn, mlp = model.blocks[0].attn, model.blocks[0].mlp
        assert {attn.attn_drop.p, attn.proj_drop.p, mlp.drop1.p, mlp.drop2.p} == {0.1}


def test_arguments_leave_the_table_as_it_is() -> None:
    fastvit.create_model("vit_base_patch16_224", depth=2, device="meta")
    assert len(fastvit.create_model("vit_base_patch16_224", device="meta").blocks) == 12


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"name .*'vit_base_patch16_244'.*vit_base_patch16_224"):
        fastvit.create_model("vit_base_patch16_244")
    with pytest.raises(ValueError, match=r"list_models.*fastvit\.accelerate\(timm\.create_model\(name\)\)"):
        fastvit.create_model("resnet50")
    with pytest.raises(TypeError, match="qk_norms"):
        fastvit.create_model("vit_base_patch16_224", qk_norms=True)


def test_list_models_filters() -> None:
    assert fastvit.list_models("deit3_*_384") == [f"deit3_{size}_patch16_384" for size in ("base", "large", "small")]
    assert fastvit.list_models("nothing*") == []
    assert fastvit.list_models() == sorted(zoo.CONFIGS)
