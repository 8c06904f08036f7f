"""Fixed positions: the tables of the papers, in every patch grid, and unchanged by training."""

from typing import Any

import pytest
import torch
from models import randomised
from torch.func import functional_call

from fastvit import VisionTransformer

TINY: dict[str, Any] = {
    "img_size": (16, 24), "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 3,
}  # fmt: skip
KINDS = ("sincos", "sincos2d")


@pytest.mark.parametrize("kind", KINDS)
def test_another_grid_has_a_table_of_its_own(kind: str) -> None:
    model = VisionTransformer(**TINY, pos_embed=kind, dynamic_img_size=True)
    other = VisionTransformer(**{**TINY, "img_size": (32, 40)}, pos_embed=kind)
    other.load_state_dict({**model.state_dict(), "pos_embed": other.pos_embed})
    image, before = torch.randn(2, 3, 32, 40), model.pos_embed.clone()
    want = other(image)
    torch.testing.assert_close(model(image), want)
    model.set_input_size((32, 40))
    assert torch.equal(model.pos_embed, other.pos_embed)
    assert "pos_embed" in dict(model.named_buffers())
    assert torch.equal(model.state_dict()["pos_embed"], other.pos_embed)
    assert torch.equal(model(image), want)
    other.set_input_size((16, 24))
    assert torch.equal(other.pos_embed, before)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_learns_the_table(kind: str) -> None:
    """Not even after all of a model was set to train; initialising a model again restores it."""
    model = randomised(VisionTransformer(**TINY, pos_embed=kind)).requires_grad_(True)
    before = model.pos_embed.clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    model(torch.randn(2, 3, 16, 24)).square().mean().backward()
    optimizer.step()
    assert torch.equal(model.pos_embed, before)
    assert model.cls_token.grad.any()
    model = VisionTransformer(**TINY, pos_embed=kind, device="meta", dtype=torch.bfloat16).to_empty(device="cpu")
    model.pos_embed.fill_(torch.nan)
    model.init_weights("skip", needs_reset=False)
    assert torch.equal(model.pos_embed, before.bfloat16())


def test_parameters_of_another_dtype() -> None:
    """FSDP2's mixed precision casts parameters for a call, and no buffers."""
    model = randomised(VisionTransformer(**TINY, pos_embed="sincos2d"))
    low = {name: p.detach().bfloat16() for name, p in model.named_parameters()}
    image = torch.randn(2, 3, 16, 24).bfloat16()
    assert torch.equal(functional_call(model, low, (image,)), model.bfloat16()(image))
