"""Trained weights and photographs: every block of a DINOv2 ViT-S/14 against transformers, ONNX Runtime, timm, float64.

Trained activations have what random ones lack: channels and tokens far outside of the rest.
"""

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pretrained
import pytest
import torch
from library_imports import import_timm
from oracle import assert_as_accurate
from torch import Tensor, nn

import fastvit
from benchmarks.harness.photographs import photographs
from fastvit import reference, zoo

NAME = "vit_small_patch14_dinov2"
State = dict[str, Tensor]


@pytest.fixture(scope="session")
def state() -> State:
    pretrained.graph_path()  # skips
    return pretrained.state_dict()


@pytest.fixture(scope="session")
def images() -> Tensor:
    return photographs(3, 224)


@pytest.fixture
def ours(state: State) -> fastvit.VisionTransformer:
    return fastvit.create_model(NAME, state, img_size=224).eval()


def eager(ours: fastvit.VisionTransformer) -> reference.VisionTransformer:
    model = reference.VisionTransformer(**{**zoo.config(NAME), "img_size": ours.patch_embed.img_size}).eval()
    model.load_state_dict(ours.state_dict())
    return model


@torch.inference_mode()
def trace(model: nn.Module, blocks: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    """Return the tokens before the first block, after every block, and after the last norm."""
    seen: list[Tensor] = []

    def first(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.append(args[0])

    def after(_: nn.Module, __: Any, output: Any) -> None:
        seen.append(output[0] if isinstance(output, tuple) else output)

    handles = [blocks[0].register_forward_pre_hook(first), *(block.register_forward_hook(after) for block in blocks)]
    output = model.forward_features(x) if hasattr(model, "forward_features") else model(x).last_hidden_state
    for handle in handles:
        handle.remove()
    assert len(seen) == pretrained.DEPTH + 1
    return [*seen, output]


def assert_close_everywhere(got: list[Tensor], expected: list[Tensor], what: str) -> None:
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert b.abs().max() > 0.5, f"{what}: stage {i} of the oracle is empty"
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=lambda m, i=i: f"{what}, stage {i}: {m}")


def test_the_graph_under_onnx_runtime(ours: fastvit.VisionTransformer, images: Tensor) -> None:
    """The graph interpolates its positions itself, as transformers did when it was exported."""
    got = trace(ours, ours.blocks, images)
    assert_close_everywhere(got, pretrained.run_graph(images), "ONNX Runtime")
    largest, typical = got[-2].abs().max(), got[-2].abs().median()
    assert largest > 20 * typical  # the outliers are there


def test_transformers(state: State, images: Tensor, tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    pytest.importorskip("transformers")
    import_timm()  # transformers imports torchvision, which needs the same help
    from transformers import Dinov2Config, Dinov2Model

    path = tmp_path / "model.safetensors"
    save_file(state, path, metadata={"format": "pt"})
    Dinov2Config(hidden_size=384, num_attention_heads=6, image_size=518).save_pretrained(tmp_path)
    theirs = Dinov2Model.from_pretrained(tmp_path).eval()
    model = fastvit.create_model(NAME, path, img_size=224).eval()
    os.remove(path)  # 88 MB, which pytest would keep
    assert_close_everywhere(
        trace(model, model.blocks, images), trace(theirs, theirs.encoder.layer, images), "transformers"
    )


def test_timm(state: State, images: Tensor) -> None:
    """timm interpolates with antialiasing, so from its own weights of 518 px."""
    timm = import_timm()
    theirs = timm.create_model(NAME).eval()
    meta = pretrained.meta_spelling(state)
    theirs.load_state_dict(timm.models.vision_transformer.checkpoint_filter_fn(dict(meta), theirs))
    model = fastvit.create_model(NAME, theirs.state_dict(), img_size=224).eval()
    theirs.set_input_size(224)
    assert_close_everywhere(trace(model, model.blocks, images), trace(theirs, theirs.blocks, images), "timm")


def test_metas_names_give_the_same_weights(state: State) -> None:
    """At their own size; at another one Meta's code interpolates differently from transformers'."""
    meta = pretrained.meta_spelling(state)
    at_518, same = (fastvit.create_model(NAME, weights).state_dict() for weights in (meta, state))
    for key, value in same.items():
        assert torch.equal(at_518[key], value), key
    at_224, other = (fastvit.create_model(NAME, weights, img_size=224).pos_embed for weights in (meta, state))
    assert 0 < (at_224 - other).abs().max() < 0.2 * other.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_block_is_as_accurate_as_the_reference(
    dtype: torch.dtype, ours: fastvit.VisionTransformer, images: Tensor, device: torch.device
) -> None:
    """Errors of earlier blocks are included."""
    model, images = ours.to(device), images[:2].to(device)
    low = eager(model).to(device)
    exact = copy.deepcopy(low).double()
    if dtype is not torch.float32:
        for each in (model, low):
            each.to(dtype)
        exact.load_state_dict(low.state_dict())  # the rounded weights, exactly
    x = images.to(dtype)
    triples = zip(
        trace(model, model.blocks, x), trace(low, low.blocks, x), trace(exact, exact.blocks, x.double()), strict=True
    )
    for i, triple in enumerate(triples):
        assert_as_accurate(*triple, what=f"{dtype} stage {i}")


# Interpreted, a block of 257 tokens takes 5 s in bfloat16 and 10 s in float32: the last one, whose activations are the
# largest, and float32 on images of half the size. A GPU does them all.
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("dtype", "size", "chosen"),
    [(torch.bfloat16, 224, (11,)), (torch.float32, 112, (0, 11))],
    ids=["bf16_224px", "fp32_112px"],
)
def test_blocks_through_the_triton_kernels(
    dtype: torch.dtype, size: int, chosen: tuple[int, ...], state: State, device: torch.device, triton_backend: None
) -> None:
    """Each block from the tokens that truly reach it, rounded to the dtype."""
    model = fastvit.create_model(NAME, state, img_size=size, device=device, dtype=dtype).eval()
    x = photographs(1, size).to(device, dtype)
    low = eager(model).to(device, dtype)
    exact = copy.deepcopy(low).double()
    stages = trace(exact, exact.blocks, x.double())
    with torch.inference_mode():
        assert_as_accurate(model._tokens(x), low.embed(x), stages[0], what=f"{dtype} patch embedding")
        for i in chosen if device.type == "cpu" else range(pretrained.DEPTH):
            tokens = stages[i].to(dtype)
            expected = exact.blocks[i](tokens.double())
            assert_as_accurate(model.blocks[i](tokens), low.blocks[i](tokens), expected, what=f"{dtype} block {i}")
