"""Trained weights and photographs: every block of a DINOv2 ViT-S/14 against ONNX Runtime and float64.

Trained activations have what random ones lack: channels and tokens far outside of the rest.
"""

import copy
from typing import Any

import pretrained
import pytest
import torch
from oracle import assert_as_accurate
from torch import Tensor, nn

import fastvit
from benchmarks.harness.photographs import photographs
from fastvit import reference, zoo

NAME = "vit_small_patch14_dinov2"


@pytest.fixture(scope="module")
def images() -> Tensor:
    return photographs(2, 224)


@pytest.fixture(scope="module")
def ours() -> fastvit.VisionTransformer:
    return fastvit.create_model(NAME, pretrained.state_dict(), img_size=224).eval()


@torch.inference_mode()
def trace(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the tokens before the first block, after every block, and after the last norm."""
    tokens: list[Tensor] = []

    def first(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        tokens.append(args[0])

    def after(_: nn.Module, __: Any, output: Tensor) -> None:
        tokens.append(output)

    blocks: Any = model.blocks
    handles = [blocks[0].register_forward_pre_hook(first), *(block.register_forward_hook(after) for block in blocks)]
    output = model.forward_features(x)
    for handle in handles:
        handle.remove()
    assert len(tokens) == pretrained.DEPTH + 1
    return [*tokens, output]


def test_the_graph_under_onnx_runtime(ours: fastvit.VisionTransformer, images: Tensor) -> None:
    """The graph interpolates its positions itself, as transformers did when it was exported."""
    got = trace(ours, images)
    for i, (stage, expected) in enumerate(zip(got, pretrained.run_graph(images), strict=True)):
        assert expected.abs().max() > 0.5, f"stage {i} of the oracle is empty"
        torch.testing.assert_close(stage, expected, rtol=1e-4, atol=1e-4, msg=lambda m, i=i: f"stage {i}: {m}")
    largest, typical = got[-2].abs().max(), got[-2].abs().median()
    assert largest > 20 * typical  # the outliers are there


def test_every_block_is_as_accurate_as_the_reference(
    ours: fastvit.VisionTransformer, images: Tensor, device: torch.device
) -> None:
    """Errors of earlier blocks are included."""
    model = copy.deepcopy(ours).to(device, torch.bfloat16)
    plain = reference.VisionTransformer(**{**zoo.config(NAME), "img_size": 224}).eval().to(device, torch.bfloat16)
    plain.load_state_dict(model.state_dict())
    exact = copy.deepcopy(plain).double()
    x = images.to(device, torch.bfloat16)
    stages = zip(trace(model, x), trace(plain, x), trace(exact, x.double()), strict=True)
    for i, (got, eager, want) in enumerate(stages):
        assert_as_accurate(got, eager, want, what=f"stage {i}")
