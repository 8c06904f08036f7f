"""Names of models, those that timm has not, and the reference of each; against timm: test_families.py."""

import sys
from functools import partial

import pytest
from library_imports import import_timm

import fastvit
from fastvit import reference, zoo
from fastvit.study import models
from fastvit.study.sources.from_zoo import plain_model

# without EVA's blocks and distillation, whose plain form is timm's: every kind of argument
REFERENCES = ["test_vit4", "vit_base_patch32_siglip_256", "aimv2_large_patch14_224", "vit_giant_patch14_dinov2"]
CIFAR = {"vit_cifar_small": 5_362_762, "vit_cifar_base": 21_342_346, "vit_cifar_large": 75_722_250}


@pytest.mark.parametrize("name", [*REFERENCES, *CIFAR])
def test_the_reference_has_the_same_keys_and_shapes(name: str) -> None:
    ours, plain = fastvit.create_model(name, depth=1, device="meta"), plain_model(name, depth=1, device="meta")
    assert type(plain) is reference.VisionTransformer
    shapes = [{key: value.shape for key, value in model.state_dict().items()} for model in (ours, plain)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("name", ["deit_tiny_distilled_patch16_224", "eva02_tiny_patch14_224"])
def test_the_plain_form_of_others_is_timms(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import_timm()
    for provider in ("eager", "sdpa"):
        plain = plain_model(name, provider, depth=1)
        assert type(plain).__module__.startswith("timm.")
        assert plain.blocks[0].attn.fused_attn == (provider == "sdpa")
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ValueError, match=rf"the plain PyTorch form of {name} is timm's, and timm cannot be imported"):
        plain_model(name)


@pytest.mark.parametrize("name", CIFAR)
def test_cifar_models(name: str) -> None:
    model = fastvit.create_model(name, device="meta")
    assert sum(p.numel() for p in model.parameters()) == CIFAR[name]
    assert model.patch_init == "kaiming"
    assert model.patch_embed.img_size == (32, 32)
    assert model.patch_embed.patch_size == (4, 4)
    assert model.num_classes == 10
    attn, mlp = model.blocks[0].attn, model.blocks[0].mlp
    assert {model.pos_drop.p, attn.attn_drop.p, attn.proj_drop.p, mlp.drop1.p, mlp.drop2.p} == {0.1}


def test_arguments_leave_the_table_as_it_is() -> None:
    fastvit.create_model("vit_base_patch16_224", depth=2, device="meta")
    assert len(fastvit.create_model("vit_base_patch16_224", device="meta").blocks) == 12


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"name .*'vit_base_patch16_244'.*vit_base_patch16_224"):
        fastvit.create_model("vit_base_patch16_244")
    with pytest.raises(ValueError, match=r"list_models.*fastvit\.accelerate\(timm\.create_model\(name\)\)"):
        fastvit.create_model("resnet50")


def test_list_models_filters() -> None:
    assert fastvit.list_models("deit3_*_384") == [f"deit3_{size}_patch16_384" for size in ("base", "large", "small")]
    assert fastvit.list_models("nothing*") == []
    assert fastvit.list_models() == sorted(zoo.CONFIGS)


def test_a_function_with_parallel_blocks_of_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a fused form; of the layers of both 3 * D rows are q's, k's and v's, and D columns attention's."""
    timm, D, hidden = import_timm(), 64, 256
    for fuse_out_proj in (False, True):
        block_fn = partial(timm.models.vision_transformer.ParallelScalingBlock, fuse_out_proj=fuse_out_proj)
        small = {"img_size": 32, "embed_dim": D, "num_heads": 2, "depth": 1, "block_fn": block_fn}
        monkeypatch.setattr(timm, "parallel", partial(timm.create_model, "vit_tiny_patch16_224", **small), False)
        (cost,) = models("timm:parallel")
        counted = cost.parameters
        assert (cost.tokens, counted.attention, counted.norms, counted.other) == (5, 4 * D * D + 4 * D, 4 * D, 0)
        assert counted.mlp == 2 * D * hidden + hidden + D * (not fuse_out_proj)
