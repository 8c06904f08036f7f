"""Small models for the tests of checkpoints, and the comparison with the library's own."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastvit
from fastvit import checkpoints
from fastvit.checkpoints import CheckpointError

SMALL: dict[str, Any] = {
    "img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "mlp_ratio": 2.0, "num_classes": 0,
}  # fmt: skip
ONE_BLOCK: dict[str, Any] = {**SMALL, "depth": 1, "num_classes": 5}
HF_SMALL: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "image_size": 16, "patch_size": 4,
}  # fmt: skip
HF_TEXT: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 9,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
SIZES = {"own_size": (16, 16), "larger": (24, 24), "smaller": (12, 12), "wide": (8, 24)}
SQUARE_SIZES = {**SIZES, "wide_of_as_many_patches": (8, 32)}  # for libraries whose positions are always of a square
Run = Callable[[Tensor], Tensor]


def image(size: tuple[int, int] = (16, 16), batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(5))


def with_prefix(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {prefix + key: value for key, value in state.items()}


def renamed(state: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    """Replace parts of keys, in the order of `names`."""
    result = {}
    for key, value in state.items():
        for old, new in names.items():
            key = key.replace(old, new)
        result[key] = value
    return result


def state_dict(**changes: Any) -> dict[str, Tensor]:
    return dict(fastvit.VisionTransformer(**{**ONE_BLOCK, **changes}).state_dict())


def refused(weights: Any, *messages: str, **arguments: Any) -> str:
    """Asserts that loading raises with all of these patterns and changes nothing; the message."""
    model = fastvit.VisionTransformer(**{**ONE_BLOCK, **arguments})
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        checkpoints.load(model, weights)
    for message in messages:
        assert re.search(message, str(caught.value)), str(caught.value)
    if not isinstance(weights, dict):
        assert str(weights) in str(caught.value)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    return str(caught.value)


@torch.inference_mode()
def check(ours: nn.Module, expected: Run, size: tuple[int, int]) -> None:
    x = image(size)
    want = expected(x)
    torch.testing.assert_close(ours.eval().forward_features(x), want, rtol=1e-5, atol=1e-5)
