"""`accelerate` on models in the layout of Meta's DINOv2 repository."""

import pytest
import torch
from dinov2_layout import Attention, NestedTensorBlock, PatchEmbed, SwiGLUFFN, SwiGLUFFNFused
from library_models import accelerate_and_compare, outcome
from models import accelerate_as_it_was
from torch import Tensor, nn

import fastvit


@pytest.fixture
def x(device: torch.device) -> Tensor:
    return torch.randn(4, 17, 64, device=device)


def test_a_model_is_fused_throughout_and_agrees(device: torch.device) -> None:
    model = nn.Sequential(PatchEmbed(56, 14, 3, 64), *(NestedTensorBlock(64, 4) for _ in range(2)), nn.LayerNorm(64))
    model = model.to(device).eval()
    image = torch.randn(2, 3, 56, 56, device=device)
    report = accelerate_and_compare(model, lambda m: m(image), strict=True)
    assert [e.kind for e in report.accelerated] == ["Conv2d", "NestedTensorBlock", "NestedTensorBlock", "LayerNorm"]


@pytest.mark.parametrize("kind", [SwiGLUFFN, SwiGLUFFNFused])
def test_the_giant_has_gated_mlps(kind: type[SwiGLUFFN], device: torch.device, x: Tensor) -> None:
    block = NestedTensorBlock(64, 4)
    block.mlp = kind(64, 168)  # type: ignore[assignment]
    block = block.to(device).eval()
    (entry,) = accelerate_and_compare(block, lambda m: m(x), strict=True).accelerated
    assert entry.detail == "layer_norm_attention, layer_norm_mlp"


def test_a_list_of_crops_falls_back(device: torch.device, x: Tensor) -> None:
    block = NestedTensorBlock(64, 4).to(device).eval()
    crops = [x, x[:, :5]]
    accelerate_as_it_was(block, lambda: block(crops), "a list of crops")


def test_stochastic_depth_in_training_falls_back(device: torch.device, x: Tensor) -> None:
    """The repository leaves samples out of the batch, to save work."""
    block = NestedTensorBlock(64, 4, drop_path=0.4).to(device)
    fastvit.accelerate(block)
    with pytest.warns(UserWarning, match="leaves samples out"):
        block.train()(x)
    own, fused = type(block).forward(block.eval(), x), block(x)
    torch.testing.assert_close(fused, own, rtol=1e-4, atol=1e-5)


def test_an_attention_bias_falls_back(device: torch.device, x: Tensor) -> None:
    attn = NestedTensorBlock(64, 4).attn.to(device).eval()
    bias = torch.randn(17, 17, device=device)
    accelerate_as_it_was(attn, lambda: attn(x))
    fastvit.restore(attn)
    accelerate_as_it_was(attn, lambda: attn(x, attn_bias=bias), "an attention bias")


def test_attention_of_old_and_new_versions(device: torch.device, x: Tensor) -> None:
    """attn_drop was a module first, then a number; xformers' attention has no dropout."""
    block = NestedTensorBlock(64, 4).to(device).eval()
    want = block(x)
    for drop in (0.0, nn.Dropout(0.0)):
        block.attn.attn_drop = drop
        fastvit.accelerate(block, strict=True)
        torch.testing.assert_close(block(x), want, rtol=1e-4, atol=1e-5)
        del block.attn.attn_drop
    for drop in (0.5, nn.Dropout(0.5)):
        block.attn.attn_drop = drop
        report = fastvit.accelerate(block.train())
        assert {e.detail for e in report.skipped} == {"a dropout of attention, which xformers leaves out"}
        del block.attn.attn_drop


def test_causal_attention(device: torch.device, x: Tensor) -> None:
    attn = Attention(64, 4).to(device).eval()
    accelerate_as_it_was(attn, lambda: attn(x, True))
    assert torch.equal(attn(x, is_causal=True), attn(x, True))
    torch.testing.assert_close(attn(x, False), attn(x), rtol=0.0, atol=0.0)
    assert not torch.equal(attn(x), attn(x, True))


def test_dropout_is_drawn_in_the_mlp(device: torch.device, x: Tensor) -> None:
    block = NestedTensorBlock(64, 4, drop=0.5).to(device).train()
    fastvit.accelerate(block)
    torch.manual_seed(0)
    first = block(x)
    torch.manual_seed(0)
    assert torch.equal(block(x), first)
    assert not torch.equal(block(x), first)


def test_a_forward_replaced_on_the_base_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """DINOv2's subclasses call it."""
    monkeypatch.setattr(Attention, "forward", lambda self, x: x)
    report = fastvit.accelerate(NestedTensorBlock(48, 3))
    assert outcome(report, "") == ("skipped", "the forward of dinov2.layers.attention.Attention was replaced")
