"""Small models for the tests of checkpoints, and the comparison with the library's own."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

SMALL: dict[str, Any] = {
    "img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "mlp_ratio": 2.0, "num_classes": 0,
}  # fmt: skip
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


@torch.inference_mode()
def check(ours: nn.Module, expected: Run, size: tuple[int, int]) -> None:
    x = image(size)
    want = expected(x)
    torch.testing.assert_close(ours.eval().forward_features(x), want, rtol=1e-5, atol=1e-5)
