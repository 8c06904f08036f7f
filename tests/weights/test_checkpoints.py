"""Weights of other libraries: a small random model of each library is the oracle for what is loaded from its file."""

import functools
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checkpoint_models import SIZES, SMALL, SQUARE_SIZES, check, image, renamed, with_prefix
from library_imports import import_timm
from models import randomised
from torch import Tensor, nn

import fastvit
from fastvit import checkpoints

safetensors = pytest.importorskip("safetensors.torch")

# ---- timm: a name for each way of prefix tokens, positions, pooling and heads ----

TIMM: dict[str, dict[str, Any]] = {
    "vit_base_patch16_224": {"num_classes": 5},
    "deit_base_distilled_patch16_224": {"num_classes": 5},
    "deit3_base_patch16_224": {},
    "vit_base_patch14_reg4_dinov2": {},
    "vit_base_patch16_clip_quickgelu_224": {},
    "vit_so400m_patch16_siglip_gap_256": {},
    "vit_so150m_patch16_reg4_map_256": {},
}


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", TIMM)
def test_timm(name: str, size: tuple[int, int], tmp_path: Path) -> None:
    timm = import_timm()
    arguments = {**SMALL, **TIMM[name]}
    written = randomised(timm.create_model(name, **arguments))
    safetensors.save_file(written.state_dict(), tmp_path / "model.safetensors")
    oracle = written
    if size != (16, 16):
        arguments["img_size"] = size
        oracle = timm.create_model(name, **arguments).eval()
        interpolated = timm.models.vision_transformer.checkpoint_filter_fn(written.state_dict(), oracle)
        oracle.load_state_dict(interpolated)
    ours = fastvit.create_model(name, weights=tmp_path / "model.safetensors", **arguments).eval()
    check(ours, oracle.forward_features, size)
    torch.testing.assert_close(ours(image(size)), oracle(image(size)), rtol=1e-5, atol=1e-5)


# ---- torchvision ----


@pytest.mark.parametrize(("side", "old"), [(16, False), (24, True), (12, False)])
def test_torchvision(side: int, old: bool) -> None:
    import_timm()
    from torchvision.models import vision_transformer

    make = partial(
        vision_transformer.VisionTransformer, patch_size=4, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=64
    )
    written = randomised(make(16, num_classes=5)).state_dict()
    oracle = make(side, num_classes=5).eval()
    oracle.load_state_dict(vision_transformer.interpolate_embeddings(side, 4, written.copy()))
    if old:
        written = renamed(written, {"mlp.0.": "mlp.linear_1.", "mlp.3.": "mlp.linear_2."})
    ours = fastvit.create_model("vit_base_patch16_224", written, **{**SMALL, "img_size": side, "num_classes": 5})
    x = image((side, side))
    torch.testing.assert_close(ours.eval()(x), oracle(x), rtol=1e-5, atol=1e-5)


# ---- OpenAI, open_clip, Meta: timm's model under their names ----


def openai(state: dict[str, Tensor]) -> dict[str, Tensor]:
    names = {
        "patch_embed.proj": "conv1", "cls_token": "class_embedding", "pos_embed": "positional_embedding",
        "attn.qkv.": "attn.in_proj_", "attn.proj": "attn.out_proj", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj",
        "norm_pre": "ln_pre", "norm1": "ln_1", "norm2": "ln_2", "norm.": "ln_post.", "ls1.": "ls_1.", "ls2.": "ls_2.",
        "blocks.": "transformer.resblocks.",
    }  # fmt: skip
    theirs = renamed(state, names)
    theirs["class_embedding"] = theirs["class_embedding"].flatten()
    theirs["positional_embedding"] = theirs["positional_embedding"][0]
    theirs["proj"] = theirs.pop("head.weight").T.contiguous()
    assert not theirs.pop("head.bias").any()
    return theirs


@pytest.mark.parametrize(("size", "init_values"), [((16, 16), 0.5), ((24, 24), None), ((8, 24), None)])
def test_openai_and_open_clip(size: tuple[int, int], init_values: float | None) -> None:
    timm = import_timm()
    name, arguments = "vit_base_patch16_clip_quickgelu_224", {**SMALL, "num_classes": 6, "init_values": init_values}
    written = randomised(timm.create_model(name, **arguments))
    nn.init.zeros_(written.head.bias)
    state = openai(written.state_dict())
    text = {"token_embedding.weight": torch.randn(9, 8), "transformer.resblocks.0.ln_1.weight": torch.randn(8)}
    text |= {"positional_embedding": torch.randn(7, 8), "ln_final.bias": torch.randn(8), "logit_scale": torch.ones(())}
    text |= {"text_projection": torch.randn(8, 6), "input_resolution": torch.tensor(16)}
    arguments["img_size"] = size
    oracle = timm.create_model(name, **arguments).eval()
    readable = with_prefix(state, "visual.") if init_values is None else written.state_dict()  # timm lacks ls_1, ls_2
    oracle.load_state_dict(timm.models.vision_transformer.checkpoint_filter_fn(readable, oracle))
    for weights in (state, {**with_prefix(state, "visual."), **text}):
        ours = fastvit.create_model(name, weights, **arguments).eval()
        torch.testing.assert_close(ours(image(size)), oracle(image(size)), rtol=1e-5, atol=1e-5)


def test_attention_pooling_of_timm_and_open_clip() -> None:
    """Read into a model that has it, kept as it is where the file has none, and left out of a model without."""
    timm, name = import_timm(), "vit_base_patch16_siglip_224"
    written = randomised(timm.create_model(name, **SMALL)).eval()
    state = written.state_dict()
    tower = {**with_prefix(state, "visual.trunk."), "text.ln_final.bias": torch.ones(4), "logit_bias": torch.ones(())}
    for weights in (state, tower):
        ours = fastvit.create_model(name, weights, **SMALL).eval()
        torch.testing.assert_close(ours(image()), written(image()), rtol=1e-5, atol=1e-5)
    tower["visual.head.proj.weight"] = torch.randn(6, 32)
    head = fastvit.create_model(name, tower, **{**SMALL, "num_classes": 6}).head
    assert torch.equal(head.weight, tower["visual.head.proj.weight"])
    assert not head.bias.any()
    fresh = fastvit.create_model(name, state, drop_head=True, **{**SMALL, "num_classes": 7}).eval()
    pooled = fresh.forward_head(fresh.forward_features(image()), pre_logits=True)
    torch.testing.assert_close(pooled, written(image()), rtol=1e-5, atol=1e-5)
    assert fresh(image()).shape == (2, 7)

    gap = {key: value for key, value in state.items() if "attn_pool" not in key}
    with pytest.raises(checkpoints.CheckpointError, match=r"(?s)missing .*attn_pool\.latent.*drop_head=True keeps"):
        fastvit.create_model(name, gap, **SMALL)
    kept = fastvit.VisionTransformer(**SMALL, class_token=False, global_pool="map")
    before = kept.attn_pool.latent.clone()
    checkpoints.load(kept, gap, drop_head=True)
    assert torch.equal(kept.attn_pool.latent, before)
    with pytest.raises(checkpoints.CheckpointError, match=r"(?s)unexpected .*attn_pool\.latent.*drop_head=True leaves"):
        fastvit.create_model("vit_base_patch16_siglip_gap_224", state, **SMALL)


@functools.cache
def dinov2(registers: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """timm's DINOv2 of 16 px and its weights as Meta writes them."""
    name = f"vit_base_patch14_{'reg4_' if registers else ''}dinov2"
    model = randomised(import_timm().create_model(name, **SMALL))
    state = dict(model.state_dict())
    if registers:
        position = torch.randn(1, 1, 32, generator=torch.Generator().manual_seed(3))
        state["register_tokens"] = state.pop("reg_token")
        state["cls_token"] = state["cls_token"] - position
        state["pos_embed"] = torch.cat([position, state["pos_embed"]], dim=1)
    return model, {"mask_token": torch.randn(1, 32), **state}


@pytest.mark.parametrize("size", SQUARE_SIZES.values(), ids=SQUARE_SIZES)
@pytest.mark.parametrize("registers", [0, 4])
def test_meta_dinov2(registers: int, size: tuple[int, int]) -> None:
    timm = import_timm()
    written, state = dinov2(registers)
    name = f"vit_base_patch14_{'reg4_' if registers else ''}dinov2"
    grid = (size[0] // 4, size[1] // 4)
    table = written.pos_embed.detach()[:, -16:].reshape(1, 4, 4, 32).permute(0, 3, 1, 2)
    if registers:
        table = F.interpolate(table, grid, mode="bicubic", antialias=True)
    elif grid != (4, 4):  # Meta's models/vision_transformer.py: scale factors of a grid 0.1 larger
        table = F.interpolate(table, scale_factor=tuple((new + 0.1) / math.sqrt(16) for new in grid), mode="bicubic")
    oracle = timm.create_model(name, **{**SMALL, "img_size": size}).eval()
    prefix = written.pos_embed.detach()[:, :-16]
    oracle.load_state_dict({**written.state_dict(), "pos_embed": torch.cat([prefix, table.flatten(2).mT], dim=1)})
    chunked = renamed(state, {"blocks.0.": "blocks.0.0.", "blocks.1.": "blocks.1.1."})
    teacher = {"teacher": {**with_prefix(chunked, "backbone."), "dino_head.mlp.0.weight": torch.ones(3, 3)}}
    for weights in (state, teacher):
        check(fastvit.create_model(name, weights, **{**SMALL, "img_size": size}), oracle.forward_features, size)


def test_deit3s_own_names() -> None:
    written = randomised(import_timm().create_model("deit3_base_patch16_224", **SMALL))
    state = renamed(written.state_dict(), {"ls1.gamma": "gamma_1", "ls2.gamma": "gamma_2"})
    check(fastvit.create_model("deit3_base_patch16_224", {"model": state}, **SMALL), written.forward_features, (16, 16))


# ---- grids and values ----


def test_a_grid_that_is_not_square() -> None:
    arguments = {**SMALL, "img_size": (8, 20)}
    written = randomised(fastvit.VisionTransformer(**arguments))
    ours = fastvit.create_model("vit_base_patch16_224", written.state_dict(), **arguments)
    assert torch.equal(ours.pos_embed, written.pos_embed)
    square = fastvit.VisionTransformer(**SMALL).state_dict()
    with pytest.raises(checkpoints.CheckpointError, match=r"4 x 4 or 2 x 8 patches: model\.load_state_dict"):
        fastvit.create_model("vit_base_patch16_224", square, **{**SMALL, "img_size": (8, 32)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["sincos", "sincos2d"])
def test_a_rounded_table_of_fixed_positions_is_the_model_s(kind: str, dtype: torch.dtype) -> None:
    """Computed less exactly, for another grid or the model's own: the model has its own digits then."""

    def make(img_size: int | tuple[int, int]) -> fastvit.VisionTransformer:
        return fastvit.VisionTransformer(**{**SMALL, "img_size": img_size}, pos_embed=kind)

    for theirs in (56, (8, 32)):
        state, model = make(theirs).state_dict(), make((8, 32))
        state["pos_embed"] = (state["pos_embed"] + 5e-5).to(dtype)
        own = model.pos_embed.clone()
        model.pos_embed.zero_()
        checkpoints.load(model, state)
        assert torch.equal(model.pos_embed, own)


@pytest.mark.parametrize("value", [math.nan, 1e6])
def test_weights_that_are_not_finite_load_with_a_warning(value: float, recwarn: pytest.WarningsRecorder) -> None:
    """Infinite ones may come from the conversion to the model's dtype, whose largest value is no reason to warn."""
    state = {
        key: torch.full_like(tensor, 65504) for key, tensor in fastvit.VisionTransformer(**SMALL).state_dict().items()
    }
    ours = fastvit.VisionTransformer(**SMALL, dtype=torch.float16)
    checkpoints.load(ours, state)
    assert not recwarn.list
    state["blocks.1.norm1.weight"][3] = state["norm.bias"][0] = value
    with pytest.warns(UserWarning, match=r"^weights: 2 of 30 .* in torch.float16, the first is blocks.1.norm1.weight$"):
        checkpoints.load(ours, state)
    assert torch.equal(ours.norm.bias[:1].isfinite(), torch.tensor([False]))
