"""Distilled training of `VisionTransformerDistilled`: against timm's model and the reference. Keys and defaults:
test_zoo.py; outside of it: test_vit_timm.py, test_features.py; weights: tests/weights."""

from typing import Any

import pytest
import torch
from library_imports import import_timm
from models import assert_same_step, randomised, twins
from torch import Tensor, nn

import fastvit
from fastvit import VisionTransformerDistilled, reference

TINY: dict[str, Any] = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 7}
NAME = "deit_tiny_distilled_patch16_224"


class Joined(nn.Module):
    """Logits of shape (B, 7), or a pair of them side by side."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        logits = self.model(x)
        return torch.cat(logits, dim=1) if isinstance(logits, tuple) else logits


def image() -> Tensor:
    return torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(5))


def distilling(model: Any) -> Joined:
    model.train().set_distilled_training(True)
    return Joined(model)


def test_a_pair_of_logits_and_its_gradients_are_timms() -> None:
    """Dropout before the heads draws a mask for each token, CLS first."""
    arguments = {**TINY, "drop_rate": 0.3}
    ours, theirs = twins(*(library.create_model(NAME, **arguments) for library in (fastvit, import_timm())))
    assert_same_step(distilling(ours), distilling(theirs), image())
    assert len(ours(image())) == 2
    ours.eval(), theirs.eval()
    torch.testing.assert_close(ours(image()), theirs(image()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "arguments",
    [{}, {"no_embed_class": True, "init_values": 0.1}, {"pos_embed": "none", "pre_norm": True},
     {"pos_embed": "sincos", "block_fn": "postnorm"}],
    ids=str,
)  # fmt: skip
def test_as_the_reference(arguments: dict[str, Any]) -> None:
    ours = VisionTransformerDistilled(**TINY, **arguments)
    ours, eager = twins(ours, reference.VisionTransformerDistilled(**TINY, **arguments))
    assert_same_step(distilling(ours), distilling(eager), image())
    for model in (ours, eager):
        model.set_distilled_training(False)
    assert_same_step(ours, eager, image())
    features = torch.randn(2, 18, 32)
    pooled = [model.forward_head(features, pre_logits=True) for model in (ours, eager)]
    torch.testing.assert_close(*pooled)


def test_compile_follows_the_switch() -> None:
    joined = distilling(randomised(VisionTransformerDistilled(**{**TINY, "depth": 1})))
    torch._dynamo.reset()
    compiled = torch.compile(joined, fullgraph=True, backend="aot_eager")
    for enable in (True, False):
        joined.model.set_distilled_training(enable)
        assert_same_step(compiled, joined, image())
        assert compiled(image()).shape == (3, 14 if enable else 7)


def test_other_sizes_and_heads_are_timms() -> None:
    ours, theirs = twins(*(library.create_model(NAME, **TINY).eval() for library in (fastvit, import_timm())))
    for model in (ours, theirs):
        model.set_input_size((24, 8))
    torch.testing.assert_close(ours.pos_embed, theirs.pos_embed, rtol=0, atol=0)
    x = torch.randn(2, 3, 24, 8)
    for num_classes, global_pool in ((5, None), (4, "token"), (0, "")):
        for model in (ours, theirs):
            model.reset_classifier(num_classes, global_pool)
        twins(ours, theirs)
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
    assert ours.prune_intermediate_layers([0]) == theirs.prune_intermediate_layers([0])
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)


def test_wrong_arguments() -> None:
    for arguments in ({"class_token": True}, {"reg_tokens": 0}, {"fc_norm": None}):
        with pytest.raises(TypeError, match=f"takes no {next(iter(arguments))}: its two heads fix it"):
            VisionTransformerDistilled(**TINY, **arguments)
    with pytest.raises(ValueError, match=r"^global_pool must be one of \('token',\), got 'avg'"):
        VisionTransformerDistilled(**TINY, global_pool="avg")
    model = VisionTransformerDistilled(**TINY)
    with pytest.raises(TypeError, match="enable must be True or False, got 'yes'"):
        model.set_distilled_training("yes")
    head = model.head
    with pytest.raises(ValueError, match=r"^global_pool must be one of \('token', ''\), got 'avg'"):
        model.reset_classifier(3, "avg")
    assert model.head is head
