"""Attention maps of a model, and their rollout through the layers (Abnar & Zuidema 2020, arXiv:2005.00928)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fastvit.study.attention import weights
from fastvit.study.attention.recording import AttentionCall
from fastvit.study.attention.weights import Queries, Query, QueryTokens


@dataclass(frozen=True)
class TokenWeights:
    """How much the queries, which are some of the tokens, take from every token.

    Attributes:
        rows: (..., queries, N), each row a distribution over the N tokens. float32, or float64 for a float64 model, on
            the model's device.
        queries: "cls", or (row, column) of a patch.
        num_prefix_tokens: how many tokens come before the patches: CLS, registers.
        grid: (h, w) of the patches.
    """

    rows: Tensor = field(repr=False)
    queries: tuple[Query, ...]
    num_prefix_tokens: int
    grid: tuple[int, int]

    @property
    def patches(self) -> Tensor:
        """The weights of the patches, (..., queries, h, w)."""
        return self.rows[..., self.num_prefix_tokens :].unflatten(-1, self.grid)


@dataclass(frozen=True)
class AttentionMaps(TokenWeights):
    """Attention weights. `rows` are (layers, heads, queries, N).

    Attributes:
        layers, heads: their numbers, from 0.
        depth: how many layers the model has.
    """

    layers: tuple[int, ...]
    heads: tuple[int, ...]
    depth: int


def attention_maps(
    model: nn.Module,
    image: Tensor,
    layers: int | Sequence[int] | None = None,
    heads: int | Sequence[int] | None = None,
    queries: Queries = None,
) -> AttentionMaps:
    """Compute rows of softmax(scale * q k^T + bias) of a model's attention, with q and k after projection, norms and
    rotation, and with the model's own bias, such as relative positions.

    The model runs once, without gradients, in evaluation mode (without dropout); every module's mode is restored. Its
    attention stays fused, and only the rows asked for are computed in addition, from q and k in place.

    Args:
        model: any whose attention is fastvit's or F.scaled_dot_product_attention: ours, accelerated, or untouched.
        image: (C, H, W) or (1, C, H, W), as the model takes it.
        layers: numbers in the order of the forward pass, from 0, or negative from the last. None for all.
        heads: likewise.
        queries: "cls", (row, column) in the grid of patches, or a sequence of these. None for CLS, or for the central
            patch of a model without CLS.

    Raises:
        ValueError: the model has no such layer, head or query; or a layer's attention is not seen, because it computes
            N x N weights, is causal, or is over windows.
    """
    chosen = weights.checked("heads", heads)
    tokens = QueryTokens(model, queries)

    def rows(call: AttentionCall) -> tuple[tuple[int, ...], Tensor]:
        numbers = weights.resolved("heads", chosen, call.q.shape[0])
        return numbers, weights.softmax(call, tokens.numbers, list(numbers))

    asked = weights.checked("layers", layers)
    numbers, found, depth = weights.by_layer(model, weights.one_image(image), tokens, asked, rows)
    if len({one for one, _ in found}) > 1:
        raise ValueError(
            "heads must be given by number, or layers one at a time: layers have different numbers of heads"
        )
    stacked = torch.stack([one for _, one in found])
    return AttentionMaps(stacked, tokens.queries, tokens.prefix, tokens.grid, numbers, found[0][0], depth)


def attention_rollout(model: nn.Module, image: Tensor, queries: Queries = None) -> TokenWeights:
    """Compute rows of A_L ... A_2 A_1, with A_l = I / 2 + (mean of layer l's weights over its heads) / 2: how much of
    each token reaches the queries if every layer keeps half of a token and mixes in the other half by its weights.

    Rows go through the layers from the last to the first. Weights are computed a few rows at a time from the q and k of
    every layer, so memory is O(N).

    Args:
        model, image, queries: as in `attention_maps`, which describes how the model runs.

    Returns:
        `rows` are (queries, N).

    Raises:
        ValueError: as `attention_maps`, for any layer.
    """
    tokens = QueryTokens(model, queries)
    _, calls, _ = weights.by_layer(model, weights.one_image(image), tokens, None, lambda call: call)
    last, count = calls[-1].q, len(tokens.numbers)
    rows = torch.zeros(count, last.shape[1], device=last.device, dtype=weights.wide(last))
    rows[range(count), tokens.numbers] = 1.0
    for call in reversed(calls):
        rows = (rows + _mixed(rows, call)) / 2
    return TokenWeights(rows, tokens.queries, tokens.prefix, tokens.grid)


def _mixed(rows: Tensor, call: AttentionCall) -> Tensor:
    """Multiply rows (queries, N) by the mean of a layer's weights over its heads."""
    mixed = torch.zeros_like(rows)
    with torch.autocast(rows.device.type, enabled=False):
        for chunk in weights.chunks(call):
            mixed += rows[:, chunk] @ weights.softmax(call, chunk).mean(0)
    return mixed
