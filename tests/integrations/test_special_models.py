"""Accelerated models beyond what each promises as a row of the table: SAM and Swin, whose tokens stay on a grid, and
blocks in the layout of Meta's DINOv2 and DINOv3 repositories."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from dinov2_layout import Attention, NestedTensorBlock
from dinov3_layout import SelfAttentionBlock, SwiGLUFFN
from library_models import (
    accelerate_and_compare,
    outcome,
    parallel_block,
    sam_of_timm,
    swin_of_timm,
    swin_of_transformers,
    vit,
)
from models import accelerate_as_it_was, close, randomised
from torch import Tensor, nn

import fastvit
from fastvit.integrations.transformers import grids

SAM = {"window_size": 3, "use_rel_pos": True}


def unscaled() -> nn.Module:
    """Return a model with a block whose branches are scaled by what is kept, and one whose are not."""
    model = vit(depth=3, drop_path_rate=0.5)
    model.blocks[2].drop_path1.scale_by_keep = model.blocks[2].drop_path2.scale_by_keep = False
    return model


# SAM drops windows after attention in windows, which reach beyond the grid; all else drops samples
sam_in_windows = partial(sam_of_timm, **SAM, drop_path_rate=0.6, init_values=0.3, global_attn_indexes=(0,))
DROPS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {  # and the shape of the input
    "scaled and unscaled": (unscaled, (8, 3, 32, 32)),
    "SAM": (sam_in_windows, (3, 3, 64, 64)),
    "Swin": (partial(swin_of_timm, drop_path_rate=0.6), (3, 3, 32, 32)),
    "parallel": (partial(parallel_block, drop_path=0.5, init_values=0.5), (8, 7, 64)),
}


@pytest.mark.parametrize("name", DROPS)
def test_stochastic_depth_drops_as_timm_does(name: str, device: torch.device) -> None:
    make, shape = DROPS[name]
    x = torch.randn(shape, device=device)
    accelerate_and_compare(randomised(make()).to(device).train(), lambda m: m(x))


def test_stochastic_depth_of_transformers() -> None:
    """Swin draws it otherwise, and for attention only."""
    model = swin_of_transformers(drop_path_rate=0.6).train()
    fastvit.accelerate(model)
    layer = model.swin.encoder.layers[-1].blocks[-1]
    block = grids.read_swin_layer(layer)
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


# ---- Meta's repositories ----


@pytest.fixture
def x(device: torch.device) -> Tensor:
    return torch.randn(4, 17, 64, device=device)


def rope(tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    angles = torch.randn(tokens, 8, device=device).repeat(1, 2)
    return angles.sin(), angles.cos()


def test_attention_of_old_and_new_versions(x: Tensor) -> None:
    """attn_drop was a module first, then a number; xformers' attention has no dropout."""
    block2 = randomised(NestedTensorBlock(64, 4)).to(x.device).eval()
    want = block2(x)
    for drop in (0.0, nn.Dropout(0.0), 0.5, nn.Dropout(0.5)):
        block2.attn.attn_drop = drop
        report = fastvit.accelerate(block2.train())
        drops = {"a dropout of attention, which xformers leaves out"} if "0.5" in str(drop) else set()
        assert {e.detail for e in report.skipped} == drops
        assert drops or close(block2(x), want)
        del block2.attn.attn_drop


def test_causal_attention(device: torch.device, x: Tensor) -> None:
    attn = randomised(Attention(64, 4)).to(device).eval()
    accelerate_as_it_was(attn, lambda: (attn(x, True), attn(x)))
    assert torch.equal(attn(x, is_causal=True), attn(x, True))
    assert not close(attn(x), attn(x, True))


def test_a_forward_replaced_on_the_base_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """DINOv2's subclasses call it."""
    monkeypatch.setattr(Attention, "forward", lambda self, x: x)
    report = fastvit.accelerate(NestedTensorBlock(48, 3))
    assert outcome(report, "") == ("skipped", "the forward of dinov2.layers.attention.Attention was replaced")


def test_a_list_of_crops_of_dinov3_is_fused_and_agrees(device: torch.device) -> None:
    """Each with positions of its own; so are one batch, and tokens without positions."""
    block3 = randomised(SelfAttentionBlock(64, 4, mlp=SwiGLUFFN)).to(device).eval()
    crops = [torch.randn(2, 5 + 12, 64, device=device), torch.randn(4, 5 + 4, 64, device=device)]
    ropes = [rope(12, device), rope(4, device)]

    def call(arguments: tuple[object, ...], block: nn.Module) -> Tensor:
        out = block(*arguments)
        return torch.cat([t.flatten() for t in out]) if isinstance(out, list) else out

    for arguments in ((crops, ropes), (crops,), (crops[0], ropes[0]), (crops[0],)):
        report = accelerate_and_compare(block3, partial(call, arguments), strict=True)
        assert outcome(report, "") == ("accelerated", "layer_norm_attention, layer_norm_mlp")
        fastvit.restore(block3)
    fastvit.accelerate(block3)
    assert not close(block3(crops, ropes)[0], block3(crops)[0])
