"""Weights as timm writes them: a small random model of timm is the oracle. Grids and values."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_models import SIZES, SMALL, check, image, with_prefix
from library_imports import import_timm
from models import randomised

import fastvit
from fastvit import checkpoints

safetensors = pytest.importorskip("safetensors.torch")

# A name for each way of prefix tokens, positions, pooling and heads
TIMM: dict[str, dict[str, Any]] = {
    "vit_base_patch16_224": {"num_classes": 5},
    "deit_base_distilled_patch16_224": {"num_classes": 5},
    "deit3_base_patch16_224": {},
    "vit_base_patch14_reg4_dinov2": {},
    "vit_base_patch16_clip_quickgelu_224": {},
    "vit_so400m_patch16_siglip_gap_256": {},
    "vit_so150m_patch16_reg4_map_256": {},
    "vit_small_plus_patch16_dinov3_qkvb": {},
    "eva02_base_patch14_448": {},
    "vit_pe_core_small_patch16_384": {},
}


@pytest.mark.parametrize("name", TIMM)
def test_timm(name: str, tmp_path: Path) -> None:
    timm = import_timm()
    arguments = {**SMALL, **TIMM[name]}
    written = randomised(timm.create_model(name, **arguments))
    safetensors.save_file(written.state_dict(), tmp_path / "model.safetensors")
    interpolate = sys.modules[type(written).__module__].checkpoint_filter_fn  # type: ignore[attr-defined]
    for size in SIZES.values():
        arguments["img_size"] = size
        oracle = timm.create_model(name, **arguments).eval()
        oracle.load_state_dict(interpolate(written.state_dict(), oracle))
        ours = fastvit.create_model(name, weights=tmp_path / "model.safetensors", **arguments).eval()
        check(ours, oracle.forward_features, size)
        torch.testing.assert_close(ours(image(size)), oracle(image(size)), rtol=1e-5, atol=1e-5)


def test_attention_pooling_of_timm_and_open_clip() -> None:
    """Read into a model that has it, and kept as it is where the file has none."""
    timm, name = import_timm(), "vit_base_patch16_siglip_224"
    written = randomised(timm.create_model(name, **SMALL)).eval()
    state = written.state_dict()
    tower = {**with_prefix(state, "visual.trunk."), "text.ln_final.bias": torch.ones(4), "logit_bias": torch.ones(())}
    tower["visual.head.proj.weight"] = torch.randn(6, 32)
    ours = fastvit.create_model(name, tower, **{**SMALL, "num_classes": 6}).eval()
    logits = written(image()) @ tower["visual.head.proj.weight"].T
    torch.testing.assert_close(ours(image()), logits, rtol=1e-5, atol=1e-5)
    fresh = fastvit.create_model(name, tower, drop_head=True, **{**SMALL, "num_classes": 7}).eval()
    pooled = fresh.forward_head(fresh.forward_features(image()), pre_logits=True)
    torch.testing.assert_close(pooled, written(image()), rtol=1e-5, atol=1e-5)

    gap = {key: value for key, value in state.items() if "attn_pool" not in key}
    with pytest.raises(checkpoints.CheckpointError, match=r"(?s)missing .*attn_pool\.latent.*drop_head=True keeps"):
        fastvit.create_model(name, gap, **SMALL)
    kept = fastvit.VisionTransformer(**SMALL, class_token=False, global_pool="map")
    before = kept.attn_pool.latent.clone()
    checkpoints.load(kept, gap, drop_head=True)
    assert torch.equal(kept.attn_pool.latent, before)


# ---- grids and values ----


def test_a_grid_that_is_not_square() -> None:
    arguments = {**SMALL, "img_size": (8, 20)}
    written = randomised(fastvit.VisionTransformer(**arguments))
    ours = fastvit.create_model("vit_base_patch16_224", written.state_dict(), **arguments)
    assert torch.equal(ours.pos_embed, written.pos_embed)
    square = fastvit.VisionTransformer(**SMALL).state_dict()
    with pytest.raises(checkpoints.CheckpointError, match=r"4 x 4 or 2 x 8 patches: model\.load_state_dict"):
        fastvit.create_model("vit_base_patch16_224", square, **{**SMALL, "img_size": (8, 32)})


@pytest.mark.parametrize("kind", ["sincos", "sincos2d"])
def test_a_rounded_table_of_fixed_positions_is_the_model_s(kind: str) -> None:
    """Computed less exactly, for another grid or the model's own: the model has its own digits then."""

    def make(img_size: int | tuple[int, int]) -> fastvit.VisionTransformer:
        return fastvit.VisionTransformer(**{**SMALL, "img_size": img_size}, pos_embed=kind)

    for theirs, dtype in ((56, torch.bfloat16), ((8, 32), torch.float32)):
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
