"""`accelerate` on blocks in the layout of Meta's DINOv2 and DINOv3 repositories, beyond the rows of the table."""

from functools import partial

import pytest
import torch
from dinov2_layout import Attention, NestedTensorBlock
from dinov3_layout import SelfAttentionBlock, SwiGLUFFN
from library_models import accelerate_and_compare, outcome
from models import accelerate_as_it_was, close, randomised
from torch import Tensor, nn

import fastvit


@pytest.fixture
def x(device: torch.device) -> Tensor:
    return torch.randn(4, 17, 64, device=device)


@pytest.fixture
def block2(device: torch.device) -> nn.Module:
    return randomised(NestedTensorBlock(64, 4)).to(device).eval()


@pytest.fixture
def block3(device: torch.device) -> nn.Module:
    return randomised(SelfAttentionBlock(64, 4, mlp=SwiGLUFFN)).to(device).eval()


def rope(tokens: int, device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    angles = torch.randn(tokens, 8, generator=torch.Generator().manual_seed(tokens)).repeat(1, 2)
    return angles.sin().to(device, dtype), angles.cos().to(device, dtype)


@pytest.mark.parametrize("kind", [NestedTensorBlock, SelfAttentionBlock])
def test_stochastic_depth_in_training_falls_back(kind: type[nn.Module], device: torch.device, x: Tensor) -> None:
    """The repositories leave samples out of the batch, to save work."""
    block = kind(64, 4, drop_path=0.4).to(device).train()
    fastvit.accelerate(block)
    with pytest.warns(UserWarning, match="leaves samples out"):
        block(x)
    assert close(type(block).forward(block.eval(), x), block(x))


def test_attention_of_old_and_new_versions(block2: nn.Module, x: Tensor) -> None:
    """attn_drop was a module first, then a number; xformers' attention has no dropout."""
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


def test_a_list_of_crops_of_dinov3_is_fused_and_agrees(block3: nn.Module, device: torch.device) -> None:
    """Each with positions of its own; so are one batch, and tokens without positions."""
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
    with pytest.warns(UserWarning, match="its input has 4 dimensions"), pytest.raises(RuntimeError, match="dimensions"):
        block3([crops[0], crops[0][None]])
