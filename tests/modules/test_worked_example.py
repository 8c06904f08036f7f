"""A tiny ViT worked by hand (worked_example.json): a 6 x 6 grey image, 2 x 2 patches, D = 4, one attention head with
identity Q, K, V and scale 1, a ReLU MLP on the attended tokens, and LayerNorm of tokens + MLP with eps 0."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastvit import ops

EXAMPLE = json.loads((Path(__file__).parent / "worked_example.json").read_text())
PATCH_E = 5  # token index: CLS, then A, B, C, D, E, ...


def example(section: str, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    return {
        name: torch.tensor(values, dtype=dtype, device=device)
        for name, values in EXAMPLE[section].items()
        if name != "classes"
    }


def check(got: dict[str, Tensor]) -> None:
    """Every expected value, to 1e-6."""
    assert got.keys() == EXAMPLE["expected"].keys()
    for name, values in EXAMPLE["expected"].items():
        want = torch.tensor(values, dtype=torch.float64)
        torch.testing.assert_close(
            got[name].cpu().double(), want, atol=1e-6, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


def conv_weight(projection: Tensor) -> Tensor:
    """Pixels -> D, as a convolution over one channel has it."""
    return projection.t().reshape(-1, 1, 2, 2)


def fused_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(N, d) each through `ops.attention`, whose heads are at least 16 wide: padding by zeros changes nothing."""
    q, k, v = (F.pad(t, (0, 16 - t.shape[1]))[None, :, None] for t in (q, k, v))
    return ops.attention(q, k, v, scale=1.0)[0, :, 0]


# the kernels have no float64
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("aten", torch.float64), ("aten", torch.float32), ("triton", torch.float32)],
    indirect=["backend"],
    ids=str,
)
def test_fused_ops(dtype, backend, device):
    inputs = example("inputs", dtype, device)
    image, position = inputs["image"][None, None], inputs["position"]
    weight = conv_weight(inputs["projection"])
    pixels = torch.eye(4, dtype=dtype, device=device).view(4, 1, 2, 2)
    prefix = (inputs["cls"] + position[0])[None]
    tokens = ops.patch_embed(image, weight, None, pos_embed=position[1:], prefix=prefix)[0]
    N, D = tokens.shape
    attended = fused_attention(tokens, tokens, tokens)[:, :D]
    mlp = ops.mlp(attended, inputs["w1"].t(), inputs["b1"], inputs["w2"].t(), inputs["b2"], activation="relu")
    ones, zeros = torch.ones_like(tokens[0]), torch.zeros_like(tokens[0])
    residual, branch = tokens, mlp
    if dtype is torch.float32:
        # The first row has a spread of 0.02 around 0.27, which enlarges the rounding of its float32 values to 1.2e-6.
        # So this stage starts from the given values, less the mean of each row, which LayerNorm ignores.
        given = example("expected", torch.float64, device)
        residual, branch = ((t - t.mean(1, keepdim=True)).float() for t in (given["tokens"], given["mlp"]))
    _, normalised = ops.add_layer_norm(residual, branch, ones, zeros, eps=0.0)
    logits = ops.linear(inputs["final_cls"][None], inputs["w_head"].t(), inputs["b_head"])[0]
    check(
        {
            "patches": ops.patch_embed(image, pixels, None)[0],
            "patch_embeddings": ops.patch_embed(image, weight, None)[0],
            "tokens": tokens,
            "scores_of_patch_E": ops.linear(tokens, tokens)[PATCH_E],
            # with the unit matrix for V, attention returns its probabilities
            "attention_of_patch_E": fused_attention(tokens, tokens, torch.eye(N, dtype=dtype, device=device))[
                PATCH_E, :N
            ],
            "attended": attended,
            "mlp": mlp,
            "normalised_residual": normalised,
            "logits": logits,
            "probabilities": logits.softmax(-1),
        }
    )
