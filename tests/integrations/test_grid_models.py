"""Accelerated models whose tokens stay on a grid, beyond what each promises as a row of the table: SAM and Swin."""

import copy
from collections.abc import Callable

import pytest
import torch
from known_models import grid_of_transformers, sam_of_timm, swin_of_timm, swin_of_transformers
from library_models import accelerate_and_compare
from models import randomised
from torch import nn

import fastvit
from fastvit.integrations.transformers import swin

SAM = {"window_size": 3, "use_rel_pos": True}


def test_stochastic_depth_drops_as_timm_does(device: torch.device) -> None:
    """SAM drops windows after attention in windows, which reach beyond the grid; all else drops samples."""
    sam = sam_of_timm(**SAM, drop_path_rate=0.6, init_values=0.3, global_attn_indexes=(0,))  # windows in the last block
    for model, size in ((sam, 64), (swin_of_timm(drop_path_rate=0.6), 32)):
        image = torch.randn(3, 3, size, size, device=device)
        accelerate_and_compare(randomised(model).to(device).train(), lambda m, image=image: m(image))


def test_stochastic_depth_of_transformers() -> None:
    """Swin draws it otherwise, and for attention only."""
    layer = swin_of_transformers(drop_path_rate=0.6).train().swin.encoder.layers[-1].blocks[-1]
    block = swin.read_layer(layer).block
    assert (block.attention.drop_path, block.mlp.drop_path) == (0.6, 0.0)


def test_a_first_call_sets_the_windows_of_swin(device: torch.device) -> None:
    """transformers makes a window of the whole grid, without a shift, where the grid is no larger."""
    model, image = randomised(swin_of_transformers(16, depths=[2], num_heads=[2])).to(device), torch.randn(2, 3, 16, 16)
    own, image = copy.deepcopy(model), image.to(device)
    fastvit.accelerate(model)
    torch.testing.assert_close(model(image).logits, own(image).logits, rtol=1e-4, atol=1e-5)
    assert model.swin.encoder.layers[0].blocks[1].shift_size == own.swin.encoder.layers[0].blocks[1].shift_size == 0


@pytest.mark.parametrize("make", [swin_of_timm, swin_of_transformers])
def test_large_scores(make: Callable[[], nn.Module], device: torch.device) -> None:
    """Scores of hundreds, among which the -100 that both add for the shift hides no token. float64, because errors grow
    with the scores."""
    model = randomised(make()).to(device).double()
    image = torch.randn(2, 3, 32, 32, device=device, dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("qkv.weight", "q_proj.weight", "k_proj.weight")):
                parameter.mul_(20)
    accelerate_and_compare(model, lambda m: m(image))


def test_other_calls_and_layers_of_vitdet(device: torch.device) -> None:
    """The modules run their own forward, and their parts are fused where they can be."""
    image = torch.randn(2, 3, 64, 64, device=device)
    model = grid_of_transformers("vitdet.VitDetModel", residual_block_indices=[1]).to(device)
    report = accelerate_and_compare(model, lambda m: m(image))
    assert report.fused("attention") == report.fused("MLP") == (2, 2)
    with pytest.warns(UserWarning, match="the argument output_attentions"):
        model(image, output_attentions=True)


def test_attention_weights_of_swin_are_the_librarys(device: torch.device) -> None:
    """Eager attention returns them, so that no layer runs fused while they are collected."""
    model, image = swin_of_transformers(attn_implementation="eager").to(device), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        want = model(image.to(device), output_attentions=True).attentions
        report = fastvit.accelerate(model)
        got = model(image.to(device), output_attentions=True).attentions
    assert report.fused("attention") == (0, 3)
    torch.testing.assert_close(got, want)
