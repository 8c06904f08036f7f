"""Compute a tiny ViT that was worked by hand, step by step, with the ops of fastvit.

    python benchmarks/examples/worked_example.py

`worked_example.json` gives a grey image of 6 x 6 pixels, the weights, and the numbers that every step must give. The
steps: cut the image into nine patches of 2 x 2 pixels, A to I; project them to D = 4 numbers each; put CLS before them
and add positions; attend with one head, where q, k and v are the tokens themselves and the scale is 1; run an MLP with
ReLU and 8 hidden numbers on the attended tokens; normalise tokens + MLP by LayerNorm with eps 0, weights of one and
biases of zero; classify a given final CLS as cat, dog or bird.

The hand-written original agrees with the expected numbers for patches A and E, the logits [1.82, -0.24, 3.19] and the
probabilities [0.20, 0.03, 0.77]. Some of its other numbers have slips in the arithmetic, so all expected numbers were
computed in float64.

Prints computed and expected numbers next to each other, rounded to 4 digits, and the largest difference of each step,
in float64. The exit status is 1 if a difference is larger than 1e-6.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastvit import ops
from fastvit.cli import terminal

EXAMPLE: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())
PATCHES = list("ABCDEFGHI")
TOKENS = ["CLS", *PATCHES]
E = TOKENS.index("E")
TOLERANCE = 1e-6
# name in the JSON -> what the step computes, and the names of its rows
STEPS: dict[str, tuple[str, list[str]]] = {
    "patches": ("patches of 2 x 2 pixels", PATCHES),
    "patch_embeddings": ("patches times the projection", PATCHES),
    "tokens": ("CLS and patches, with positions", TOKENS),
    "scores_of_patch_E": ("scores of patch E: its token times each token", TOKENS),
    "attention_of_patch_E": ("attention of patch E: softmax of its scores", TOKENS),
    "attended": ("attended tokens", TOKENS),
    "mlp": ("MLP of the attended tokens", TOKENS),
    "normalised_residual": ("LayerNorm of tokens + MLP", TOKENS),
    "logits": ("logits of the final CLS", EXAMPLE["inputs"]["classes"]),
    "probabilities": ("probabilities of the classes", EXAMPLE["inputs"]["classes"]),
}


def tensors(section: str) -> dict[str, Tensor]:
    """Return the numbers of "inputs" or "expected" by name, in float64."""
    return {name: torch.tensor(v, dtype=torch.float64) for name, v in EXAMPLE[section].items() if name != "classes"}


def tokens_of(image: Tensor, projection: Tensor, position: Tensor | None = None, cls: Tensor | None = None) -> Tensor:
    """Embed an image (6, 6) with a projection (4, D): (9, D), or (10, D) with position (10, D) and cls (D,)."""
    weight = projection.t().reshape(-1, 1, 2, 2)  # as a convolution of one channel has it
    if position is None or cls is None:
        return ops.patch_embed(image[None, None], weight, None)[0]
    prefix = (cls + position[0])[None]
    return ops.patch_embed(image[None, None], weight, None, pos_embed=position[1:], prefix=prefix)[0]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend with one head and scale 1, (N, d) each. Heads of `ops.attention` have at least 16 numbers: zeros after the
    given ones change nothing."""
    width = v.shape[1]
    q, k, v = (F.pad(t, (0, 16 - t.shape[1]))[None, :, None] for t in (q, k, v))
    return ops.attention(q, k, v, scale=1.0)[0, :, 0, :width]


def compute(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Compute the steps, by name."""
    i = inputs
    unit = torch.eye(4).to(i["image"])
    tokens = tokens_of(i["image"], i["projection"], i["position"], i["cls"])
    attended = attend(tokens, tokens, tokens)
    mlp = ops.mlp(attended, i["w1"].t(), i["b1"], i["w2"].t(), i["b2"], activation="relu")
    ones, zeros = torch.ones_like(tokens[0]), torch.zeros_like(tokens[0])
    logits = ops.linear(i["final_cls"][None], i["w_head"].t(), i["b_head"])[0]
    return {
        "patches": tokens_of(i["image"], unit),
        "patch_embeddings": tokens_of(i["image"], i["projection"]),
        "tokens": tokens,
        "scores_of_patch_E": ops.linear(tokens, tokens)[E],
        # with the unit matrix for v, attention returns its probabilities
        "attention_of_patch_E": attend(tokens, tokens, torch.eye(len(tokens)).to(tokens))[E],
        "attended": attended,
        "mlp": mlp,
        "normalised_residual": ops.add_layer_norm(tokens, mlp, ones, zeros, eps=0.0)[1],
        "logits": logits,
        "probabilities": logits.softmax(-1),
    }


def main() -> int:
    terminal.Parser("worked_example.py", __doc__ or "").parse_args()
    computed, expected = compute(tensors("inputs")), tensors("expected")
    wrong = []
    for number, (name, (title, rows)) in enumerate(STEPS.items(), 1):
        print(f"{number}. {title}: computed, expected")
        both = [t.reshape(len(rows), -1).tolist() for t in (computed[name], expected[name])]
        for row, *halves in zip(rows, *both, strict=True):
            print(f"{row:4}" + "   ".join("".join(f"{value:9.4f}" for value in half) for half in halves))
        difference = (computed[name] - expected[name]).abs().max().item()
        print(f"largest difference {difference:.1e}\n")
        if not difference <= TOLERANCE:
            wrong.append(title)
    print(f"off by more than {TOLERANCE:g}: {', '.join(wrong) or 'nothing'}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(terminal.guarded(main, name="worked_example.py"))
