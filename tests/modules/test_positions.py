"""Fixed positions: the tables of the papers, in every patch grid, and unchanged by training."""

import math
from typing import Any

import pytest
import torch
from library_imports import import_library, import_timm
from models import randomised
from torch import Tensor
from torch.func import functional_call

import fastvit
from fastvit import VisionTransformer, reference

TINY: dict[str, Any] = {
    "img_size": (16, 24), "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 3,
}  # fmt: skip
KINDS = ("sincos", "sincos2d")


def along_the_sequence(n: int, D: int) -> list[list[float]]:
    """Vaswani et al. 2017, section 3.5, number by number."""
    return [
        [(math.sin, math.cos)[c % 2](position / 10000 ** (2 * (c // 2) / D)) for c in range(D)] for position in range(n)
    ]


def of_the_grid(h: int, w: int, D: int) -> list[list[float]]:
    """MAE's table, number by number: of each quarter of the channels sin or cos, of the column or of the row."""
    quarter = D // 4
    return [
        [
            (math.sin, math.cos)[c // quarter % 2]((column, row)[c // (2 * quarter)] / 10000 ** (c % quarter / quarter))
            for c in range(D)
        ]
        for row in range(h)
        for column in range(w)
    ]


def table(kind: str, grid: tuple[int, int], prefix: int, D: int = 32) -> Tensor:
    if kind == "sincos":
        return torch.tensor([along_the_sequence(prefix + grid[0] * grid[1], D)])
    return torch.tensor([[[0.0] * D] * prefix + of_the_grid(*grid, D)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("library", [fastvit, reference])
@pytest.mark.parametrize(
    ("arguments", "prefix"), [({}, 1), ({"reg_tokens": 2}, 3), ({"reg_tokens": 2, "no_embed_class": True}, 0)], ids=str
)
def test_tables_of_the_papers(kind: str, library: Any, arguments: dict[str, Any], prefix: int) -> None:
    model = library.VisionTransformer(**TINY, **arguments, pos_embed=kind)
    torch.testing.assert_close(model.pos_embed, table(kind, (2, 3), prefix), rtol=0, atol=1e-7)
    assert "pos_embed" in model.state_dict()
    assert "pos_embed" not in dict(model.named_parameters())


def test_tables_of_the_libraries() -> None:
    """transformers has MAE's; timm has the sines of both axes before the cosines, and rows before columns."""
    import_timm()
    from timm.layers import build_sincos2d_pos_embed

    import_library("transformers")
    from transformers.models.vit_mae.modeling_vit_mae import build_2d_sinusoidal_position_embedding

    ours = VisionTransformer(**{**TINY, "img_size": (112, 96)}, pos_embed="sincos2d").pos_embed[0]
    of_rows, of_columns = build_2d_sinusoidal_position_embedding(14, 12, 32, cls_token=True).chunk(2, dim=1)
    torch.testing.assert_close(ours, torch.cat((of_columns, of_rows), dim=1), rtol=0, atol=1e-7)
    parts = build_sincos2d_pos_embed([14, 12], 32).chunk(4, dim=1)
    torch.testing.assert_close(ours[1:], torch.cat([parts[i] for i in (1, 3, 0, 2)], dim=1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_another_grid_has_a_table_of_its_own(kind: str) -> None:
    model = VisionTransformer(**TINY, pos_embed=kind, dynamic_img_size=True)
    other = VisionTransformer(**{**TINY, "img_size": (32, 40)}, pos_embed=kind)
    other.load_state_dict({**model.state_dict(), "pos_embed": other.pos_embed})
    image = torch.randn(2, 3, 32, 40)
    want = other(image)
    torch.testing.assert_close(model(image), want)
    model.set_input_size((32, 40))
    assert torch.equal(model.pos_embed, other.pos_embed)
    assert "pos_embed" in dict(model.named_buffers())
    assert torch.equal(model.state_dict()["pos_embed"], other.pos_embed)
    assert torch.equal(model(image), want)
    other.set_input_size((16, 24))
    torch.testing.assert_close(other.pos_embed, table(kind, (2, 3), 1), rtol=0, atol=1e-7)


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


@pytest.mark.parametrize("prefix", [{}, {"class_token": False, "global_pool": "avg"}], ids=str)
def test_parameters_of_another_dtype(prefix: dict[str, Any]) -> None:
    """FSDP2's mixed precision casts parameters for a call, and no buffers."""
    model = randomised(VisionTransformer(**TINY, **prefix, pos_embed="sincos2d"))
    low = {name: p.detach().bfloat16() for name, p in model.named_parameters()}
    image = torch.randn(2, 3, 16, 24).bfloat16()
    assert torch.equal(functional_call(model, low, (image,)), model.bfloat16()(image))


def test_no_work_for_the_size_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = VisionTransformer(**TINY, pos_embed="sincos", dynamic_img_size=True)
    monkeypatch.setattr(VisionTransformer, "fixed_table", None)
    model(torch.randn(1, 3, 16, 24))
    with pytest.raises(TypeError, match="NoneType"):
        model(torch.randn(1, 3, 16, 16))


def test_learnt_positions_have_no_table() -> None:
    with pytest.raises(ValueError, match="fixed_table needs a model with pos_embed='sincos' or 'sincos2d'"):
        VisionTransformer(**TINY).fixed_table((2, 2))


def test_the_reference_names_a_dimension_that_does_not_divide() -> None:
    """In ours, heads are multiples of 8."""
    with pytest.raises(ValueError, match="embed_dim must be a multiple of 4 for pos_embed='sincos2d', got 6"):
        reference.VisionTransformer(16, 8, embed_dim=6, num_heads=1, pos_embed="sincos2d")
