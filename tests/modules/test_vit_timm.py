"""VisionTransformer against timm's model of the same parameters: values, other sizes, and groups of parameters."""

from typing import Any

import pytest
import torch
from library_imports import import_timm
from models import randomised, step, twins
from oracle import inputs
from torch import nn

import fastvit
from fastvit import VisionTransformer

TINY_TIMM, REG4 = "vit_tiny_patch16_224", "vit_small_patch14_reg4_dinov2"
DISTILLED = "deit_tiny_distilled_patch16_224"
# Each with two blocks, of 64 px unless it says otherwise. Names and poolings: test_zoo.py; initial values:
# test_initialisation.py.
WITH_TIMM: dict[str, tuple[str, dict[str, Any]]] = {
    "dinov2_reg4": (REG4, {"img_size": 56, "init_values": 0.1, "num_classes": 5}),
    "non_square": (TINY_TIMM, {"img_size": (32, 80)}),
    "dynamic": (TINY_TIMM, {"dynamic_img_size": True}),
    "dynamic_reg4": (REG4, {"img_size": 56, "dynamic_img_size": True}),
    "embed_norm": (TINY_TIMM, {"embed_norm_layer": nn.LayerNorm, "reg_tokens": 2}),
    "map_and_norm": (TINY_TIMM, {"global_pool": "map", "fc_norm": True}),
    "another_mlp": (TINY_TIMM, {"mlp_layer": "SwiGLU"}),
    "timms_mlp": (TINY_TIMM, {"mlp_layer": "Mlp"}),
    "distilled": (DISTILLED, {"drop_rate": 0.3}),
    "dynamic_distilled": (DISTILLED, {"dynamic_img_size": True}),
}
OTHER_SIZES = {"dynamic": (48, 96), "dynamic_distilled": (48, 96), "dynamic_reg4": (70, 42)}


def with_timm(name: str = TINY_TIMM, **arguments: Any) -> tuple[VisionTransformer, nn.Module]:
    """Ours and timm's with the same parameters."""
    timm = import_timm()
    if "mlp_layer" in arguments:
        arguments["mlp_layer"] = getattr(timm.layers, arguments["mlp_layer"])
    ours = fastvit.create_model(name, **arguments)
    theirs = timm.create_model(name, **arguments)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@pytest.mark.parametrize("case", WITH_TIMM)
def test_logits_and_gradients_agree_with_timm(case: str) -> None:
    name, arguments = WITH_TIMM[case]
    ours, theirs = twins(*with_timm(name, **{"depth": 2, "img_size": 64, **arguments}))
    size = OTHER_SIZES.get(case, ours.patch_embed.img_size)
    x = inputs("normal", 2, 3, *size, dtype=torch.float32, device="cpu")
    expected = step(theirs, x)
    for key, got in step(ours, x).items():
        scale = expected[key].abs().max().item()
        torch.testing.assert_close(got, expected[key], rtol=1e-4, atol=3e-5 * scale, msg=lambda m, k=key: f"{k}: {m}")
    ours.eval(), theirs.eval()
    with torch.inference_mode():
        features = theirs.forward_features(x)
        torch.testing.assert_close(ours.forward_features(x), features, rtol=1e-4, atol=1e-4)
        pooled = (model.forward_head(features, pre_logits=True) for model in (ours, theirs))
        torch.testing.assert_close(*pooled, rtol=1e-4, atol=1e-4)


def test_drop_path_agrees_with_timm_under_one_seed() -> None:
    ours, theirs = with_timm(depth=3, img_size=32, drop_path_rate=0.5)
    x = torch.randn(8, 3, 32, 32)
    outputs = []
    for model in (ours, theirs):
        torch.manual_seed(7)
        outputs.append(model(x))
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ({"img_size": (96, 48)}, (6, 3)), ({"patch_size": 8}, (8, 8)), ({"patch_size": (32, 16)}, (2, 4)),
        ({"img_size": 120, "patch_size": 20}, (6, 6)), ({"patch_size": 16}, (4, 4)), ({}, (4, 4)),
    ],
    ids=str,
)  # fmt: skip
def test_a_new_input_size_agrees_with_timm(size: dict[str, Any], grid: tuple[int, int]) -> None:
    for extra in ({}, {"reg_tokens": 2, "no_embed_class": True}, {"dtype": torch.bfloat16}):
        ours, theirs = (model.requires_grad_(False) for model in twins(*with_timm(depth=1, img_size=64, **extra)))
        patches = []
        ours.patch_embed.proj.register_forward_hook(lambda _, __, y, patches=patches: patches.append(y.shape[2:]))
        for model in (ours, theirs):
            model.set_input_size(**size)
        torch.testing.assert_close(ours.pos_embed, theirs.pos_embed, rtol=0, atol=0)
        weights = ours.patch_embed.proj.weight, theirs.patch_embed.proj.weight
        torch.testing.assert_close(*weights, **({} if extra.get("dtype") else {"rtol": 1e-5, "atol": 1e-5}))
        assert ours.patch_embed.grid_size == theirs.patch_embed.grid_size == grid
        img_size = ours.patch_embed.img_size
        assert img_size == theirs.patch_embed.img_size == ours.pretrained_cfg["input_size"][1:]
        assert ours.feature_info[0]["reduction"] == max(ours.patch_embed.patch_size)
        assert not [name for name, p in ours.named_parameters() if p.requires_grad]
        assert ours(torch.randn(1, 3, *img_size, dtype=ours.pos_embed.dtype)).shape == (1, 1000)
        assert patches == [grid]  # by the convolution, which has its hook still


def test_a_larger_patch_of_a_larger_image_is_the_same_token() -> None:
    """Whatever the image: the resampled weights undo the resize."""
    model = randomised(VisionTransformer(16, 4, embed_dim=32, depth=2, num_heads=2)).double()
    x = inputs("normal", 2, 3, 16, 16, dtype=torch.float64, device="cpu")
    want = model(x)
    tiles = x.unfold(2, 4, 4).unfold(3, 4, 4).reshape(-1, 1, 4, 4)  # one patch each
    tiles = torch.nn.functional.interpolate(tiles, size=(8, 6), mode="bicubic", antialias=True)
    resized = tiles.view(*x.shape[:2], 4, 4, 8, 6).transpose(3, 4).reshape(*x.shape[:2], 32, 24)
    model.set_input_size((32, 24), (8, 6))
    torch.testing.assert_close(model(resized), want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "arguments",
    [{"reg_tokens": 2, "init_values": 0.1}, {"pre_norm": True}, {"global_pool": "avg"}, {"global_pool": "map"}],
    ids=str,
)
def test_timm_groups_parameters_by_depth_as_its_own(arguments: dict[str, Any]) -> None:
    import_timm()
    from timm.models import group_parameters
    from timm.optim import create_optimizer_v2

    ours, theirs = with_timm(depth=3, img_size=32, **arguments)
    for coarse in (False, True):
        groups = [group_parameters(m, m.group_matcher(coarse=coarse), reverse=True) for m in (ours, theirs)]
        assert groups[0] == groups[1]
    options = {"opt": "adamw", "lr": 1e-3, "weight_decay": 0.05, "layer_decay": 0.7}
    groups = []
    for model in (ours, theirs):
        names = {p: name for name, p in model.named_parameters()}
        optimizer = create_optimizer_v2(model, **options)
        groups.append([{**g, "params": [names[p] for p in g["params"]]} for g in optimizer.param_groups])
    assert groups[0] == groups[1]
    assert len(groups[0]) >= 8  # with and without decay, of embedding, blocks and head
    assert len({g["lr_scale"] for g in groups[0]}) == 5
