"""Dense features: `forward_intermediates` and `get_intermediate_layers` against timm and DINOv2's definition."""

from typing import Any

import pytest
import torch
from library_imports import import_timm
from models import close, twins
from torch import Tensor
from torch.utils._pytree import tree_flatten

import fastvit
from fastvit import VisionTransformer
from fastvit.eva import Eva

SMALL: dict[str, Any] = {"embed_dim": 64, "depth": 3, "num_heads": 2, "num_classes": 5}
MODELS: dict[str, tuple[str, dict[str, Any], tuple[int, int]]] = {  # name, arguments, size of the image
    "registers": ("vit_small_patch14_reg4_dinov2", {"img_size": 56}, (56, 56)),
    "no_cls": ("vit_tiny_patch16_224", {"img_size": 48, "class_token": False, "global_pool": "avg"}, (48, 48)),
    "dynamic": ("vit_tiny_patch16_224", {"img_size": 64, "dynamic_img_size": True, "pre_norm": True}, (48, 96)),
    "map": ("vit_base_patch16_siglip_224", {"img_size": (64, 32)}, (64, 32)),
    "distilled": ("deit_tiny_distilled_patch16_224", {"img_size": 64}, (64, 64)),
    "eva": ("eva02_tiny_patch14_224", {"img_size": (28, 56)}, (28, 56)),
    "dinov3": ("vit_small_patch16_dinov3", {}, (32, 48)),
}
INTERMEDIATES: list[dict[str, Any]] = [
    {},
    {"indices": [2, 0], "return_prefix_tokens": True},
    {"indices": (-1, 1), "output_fmt": "NLC", "stop_early": True, "intermediates_only": True},
    {"indices": [1], "output_fmt": "NLC", "stop_early": True, "norm": True, "return_prefix_tokens": True},
    {"indices": 2, "output_dict": True, "return_prefix_tokens": True},
    {"indices": 2, "output_dict": True, "intermediates_only": True, "norm": True},
]
LAYERS: list[dict[str, Any]] = [{}, {"n": [0, 2], "reshape": True}, {"n": 2, "return_prefix_tokens": True}]


def with_timm(case: str) -> tuple[Any, Any, Tensor]:
    """Ours and timm's with the same parameters, and an image."""
    timm = import_timm()
    name, arguments, size = MODELS[case]
    ours, theirs = (library.create_model(name, **{**SMALL, **arguments}).eval() for library in (fastvit, timm))
    return *twins(ours, theirs), torch.randn(2, 3, *size)


def assert_same(got: Any, want: Any) -> None:
    """Check for one structure with close tensors; those with a grid are contiguous."""
    (ours, structure), (theirs, expected) = tree_flatten(got), tree_flatten(want)
    assert structure == expected
    assert all(t.is_contiguous() or t.dim() < 4 for t in ours)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", MODELS)
@torch.no_grad()
def test_features_are_timms(case: str) -> None:
    """timm's Eva has neither a dict nor get_intermediate_layers, whose default of norm is False in timm."""
    ours, theirs, image = with_timm(case)
    for asked in INTERMEDIATES:
        if not (isinstance(ours, Eva) and "output_dict" in asked) and not (
            asked.get("return_prefix_tokens") and not theirs.num_prefix_tokens
        ):
            assert_same(ours.forward_intermediates(image, **asked), theirs.forward_intermediates(image, **asked))
    for asked in LAYERS:
        got = ours.get_intermediate_layers(image, **asked, norm=False)
        if isinstance(ours, Eva):
            order = asked.get("n", 1), asked.get("return_prefix_tokens", False)
            how = {"intermediates_only": True, "output_fmt": "NCHW" if asked.get("reshape") else "NLC"}
            assert_same(got, tuple(theirs.forward_intermediates(image, *order, **how)))
        else:
            assert_same(got, tuple(theirs.get_intermediate_layers(image, **asked)))


@torch.no_grad()
def test_layers_as_dinov2_calls_them() -> None:
    """Meta's evaluations, and depth and segmentation heads: after `norm`, with CLS alone whatever the registers."""
    ours, theirs, image = with_timm("registers")
    for n, reshape, more in ((1, False, {}), ([0, 2], True, {}), (2, True, {"norm": False})):
        options = {"norm": True, **more, "reshape": reshape, "return_prefix_tokens": True}
        pairs = theirs.get_intermediate_layers(image, n, **options)
        assert_same(ours.get_intermediate_layers(image, n, reshape, **more), tuple(patches for patches, _ in pairs))
        with_cls = ours.get_intermediate_layers(image, n, reshape, **more, return_class_token=True)
        assert_same(with_cls, tuple((patches, prefix[:, 0]) for patches, prefix in pairs))


def test_gradients_are_timms_with_and_without_checkpointing() -> None:
    ours, theirs, image = with_timm("dinov3")
    results = []
    for model, checkpointing in ((theirs, False), (ours, False), (ours, True)):
        model.train().set_grad_checkpointing(checkpointing)
        final, kept = model.forward_intermediates(image, [0, 2], norm=True)
        loss = final.square().mean() + sum((i + 1) * y.square().mean() for i, y in enumerate(kept))
        parameters = {n: p for n, p in model.named_parameters() if not n.startswith(("head", "rope"))}
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        results.append(dict(zip(parameters, gradients, strict=True)))
    for key, want in results[0].items():
        assert close(results[1][key], want), key
        assert torch.equal(results[2][key], results[1][key]), key


def test_stop_early_runs_no_block_in_vain() -> None:
    model = VisionTransformer(16, 4, embed_dim=32, depth=3, num_heads=2)
    ran: list[int] = []
    for i, block in enumerate(model.blocks):
        block.register_forward_hook(lambda *_, i=i: ran.append(i))
    image = torch.randn(1, 3, 16, 16)
    final, (y,) = model.forward_intermediates(image, [1], output_fmt="NLC", stop_early=True, norm=True)
    assert torch.equal(final[:, 1:], y)
    model.get_intermediate_layers(image, [0])
    model.forward_intermediates(image, [0])
    assert ran == [0, 1, 0, 0, 1, 2]


@pytest.mark.parametrize("case", ["map", "dinov3"])
@torch.no_grad()
def test_pruning_is_timms(case: str) -> None:
    for options in ({}, {"indices": [1, -2], "prune_norm": True}, {"prune_head": False}):
        ours, theirs, image = with_timm(case)
        assert ours.prune_intermediate_layers(**options) == theirs.prune_intermediate_layers(**options)
        assert ours.state_dict().keys() == theirs.state_dict().keys()
        assert_same(ours.forward_features(image), theirs.forward_features(image))
        assert close(ours(image), theirs(image))
