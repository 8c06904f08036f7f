"""Names of models, those that timm has not, and the reference of each; against timm: test_families.py."""

import sys
from functools import partial

import pytest
from library_imports import import_timm
from torch import nn

import fastvit
from fastvit import reference, zoo
from fastvit.study import models
from fastvit.study.sources.baselines import plain_model

# without EVA's blocks and distillation, whose plain form is timm's: every kind of argument
REFERENCES = ["test_vit4", "vit_base_patch32_siglip_256", "aimv2_large_patch14_224"]
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


def test_cifar_models() -> None:
    for name, parameters in CIFAR.items():
        model = fastvit.create_model(name, device="meta")
        assert sum(p.numel() for p in model.parameters()) == parameters
        sizes = model.patch_init, model.patch_embed.img_size, model.patch_embed.patch_size, model.num_classes
        assert sizes == ("kaiming", (32, 32), (4, 4), 10)
        dropouts = [model.pos_drop, *model.blocks.modules()]
        assert {module.p for module in dropouts if isinstance(module, nn.Dropout)} == {0.1}
    assert len(fastvit.create_model(name, depth=2, device="meta").blocks) == 2
    assert len(fastvit.create_model(name, device="meta").blocks) == 24  # the table is as it was


def test_names() -> None:
    assert fastvit.list_models("deit3_*_384") == [f"deit3_{size}_patch16_384" for size in ("base", "large", "small")]
    assert fastvit.list_models() == sorted(zoo.CONFIGS)
    with pytest.raises(ValueError, match=r"name .*'vit_base_patch16_244'.*vit_base_patch16_224"):
        fastvit.create_model("vit_base_patch16_244")
    with pytest.raises(ValueError, match=r"list_models.*fastvit\.accelerate\(timm\.create_model\(name\)\)"):
        fastvit.create_model("resnet50")


def test_the_cost_of_timms_parallel_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the layers that both halves share, 3 * D rows are of q, k and v, and D columns are of attention."""
    timm, D, hidden = import_timm(), 64, 256
    block_fn = partial(timm.models.vision_transformer.ParallelScalingBlock, fuse_out_proj=True)
    small = {"img_size": 32, "embed_dim": D, "num_heads": 2, "depth": 1, "block_fn": block_fn}
    monkeypatch.setattr(timm, "parallel", partial(timm.create_model, "vit_tiny_patch16_224", **small), False)
    (cost,) = models("timm:parallel")
    counted = cost.parameters
    assert (cost.tokens, counted.attention, counted.norms, counted.other) == (5, 4 * D * D + 4 * D, 4 * D, 0)
    assert counted.mlp == 2 * D * hidden + hidden
