"""Files with fixed positions, as MAE's: models with that table, of any size, and models that learn positions."""

from pathlib import Path

import pytest
import torch
from checkpoint_models import SMALL, image
from library_imports import import_library
from models import randomised
from torch import Tensor

import fastvit
from fastvit import VisionTransformer, checkpoints

pytest.importorskip("safetensors")


def table(kind: str, img_size: int | tuple[int, int]) -> Tensor:
    positions = VisionTransformer(**{**SMALL, "img_size": img_size}, pos_embed=kind).pos_embed
    assert positions is not None
    return positions


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["sincos", "sincos2d"])
def test_a_rounded_table_is_the_model_s(kind: str, dtype: torch.dtype) -> None:
    """Computed less exactly, for another grid or the model's own: the model has its own digits then."""
    for theirs in (56, (24, 40), (8, 32)):
        state = VisionTransformer(**{**SMALL, "img_size": theirs}, pos_embed=kind).state_dict()
        state["pos_embed"] = (state["pos_embed"] + 5e-5).to(dtype)
        model = VisionTransformer(**{**SMALL, "img_size": (8, 32)}, pos_embed=kind)
        model.pos_embed.zero_()
        checkpoints.load(model, state)
        assert torch.equal(model.pos_embed, table(kind, (8, 32)))


def test_mae(tmp_path: Path) -> None:
    """transformers', with the decoder."""
    hf = import_library("transformers")
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    decoder = {f"decoder_{name}": n for name, n in small.items()}
    mae = hf.ViTMAEForPreTraining(hf.ViTMAEConfig(image_size=56, patch_size=4, **small, **decoder, mask_ratio=0.0))
    randomised(mae).eval().vit.embeddings.position_embeddings.data = table("sincos2d", 56)
    mae.save_pretrained(tmp_path)
    pixels = image((56, 56))
    want = mae.vit(pixels).last_hidden_state[:, 0]  # without a mask the patches are in a random order
    for pos_embed in ("sincos2d", "learn"):
        for weights in (mae.state_dict(), tmp_path):
            options = {**SMALL, "img_size": 56, "pos_embed": pos_embed}
            model = fastvit.create_model("vit_base_patch16_224", weights, **options).eval()
            torch.testing.assert_close(model(pixels), want, rtol=1e-4, atol=1e-4)
    wide = {**SMALL, "img_size": (24, 40)}
    fixed = fastvit.create_model("vit_base_patch16_224", tmp_path, **wide, pos_embed="sincos2d")
    assert torch.equal(fixed.pos_embed, table("sincos2d", (24, 40)))
    learnt = fastvit.create_model("vit_base_patch16_224", tmp_path, **wide)
    assert (learnt.pos_embed - fixed.pos_embed).abs().max() > 0.1
