"""Attention maps of a model, and their rollout through the layers (Abnar & Zuidema 2020, arXiv:2005.00928)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fastvit.study.attention import recording
from fastvit.study.attention.queries import Queries, Query, QueryTokens
from fastvit.study.attention.recording import AttentionCall

_CHUNK = 1 << 22  # weights at a time in a rollout: 16 MiB in float32
_Rows = tuple[tuple[int, ...], Tensor]  # heads, and their rows


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

    rows: Tensor
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
    asked, asked_heads = _checked("layers", layers), _checked("heads", heads)
    back = max((-layer for layer in asked or () if layer < 0), default=0)
    tokens = QueryTokens(model, queries)
    kept: dict[int, _Rows | str] = {}  # rows, or why there are none

    def on_call(call: AttentionCall) -> None:
        if asked is None or back or call.layer in asked:
            kept[call.layer] = tokens.misfit(call) or _rows(call, asked_heads, tokens.numbers)
        if asked is not None and call.layer - back not in asked:  # now known not to be the `back`-th from the last
            kept.pop(call.layer - back, None)

    depth = recording.run(model, _one(image), on_call)
    numbers = _resolved("layers", asked, depth)
    found = []
    for layer in numbers:
        rows = kept[layer]
        if isinstance(rows, str):
            raise _unseen(layer, rows)
        found.append(rows)
    if len({chosen for chosen, _ in found}) > 1:
        raise ValueError(
            "heads must be given by number, or layers one at a time: layers have different numbers of heads"
        )
    stacked = torch.stack([rows for _, rows in found])
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
    calls: list[AttentionCall] = []

    def on_call(call: AttentionCall) -> None:
        if reason := tokens.misfit(call):
            raise _unseen(call.layer, reason)
        calls.append(call)

    _resolved("layers", None, recording.run(model, _one(image), on_call))
    last, count = calls[-1].q, len(tokens.numbers)
    rows = torch.zeros(count, last.shape[1], device=last.device, dtype=_wide(last))
    rows[range(count), tokens.numbers] = 1.0
    for call in reversed(calls):
        rows = (rows + _mixed(rows, call)) / 2
    return TokenWeights(rows, tokens.queries, tokens.prefix, tokens.grid)


def _mixed(rows: Tensor, call: AttentionCall) -> Tensor:
    """Multiply rows (queries, N) by the mean of a layer's weights over its heads."""
    H, N, _ = call.q.shape
    chunk = max(1, _CHUNK // (H * N))
    mixed = torch.zeros_like(rows)
    with torch.autocast(rows.device.type, enabled=False):
        for start in range(0, N, chunk):
            weights = _softmax(call, slice(start, start + chunk)).mean(0)
            mixed += rows[:, start : start + chunk] @ weights
    return mixed


def _rows(call: AttentionCall, heads: Sequence[int] | None, queries: list[int]) -> _Rows:
    chosen = _resolved("heads", heads, call.q.shape[0])
    with torch.autocast(call.q.device.type, enabled=False):
        return chosen, _softmax(call, queries, list(chosen))


def _softmax(call: AttentionCall, rows: slice | list[int], heads: slice | list[int] = slice(None)) -> Tensor:
    """Return the weights (heads, rows, N) of some rows and heads."""
    wide = _wide(call.q)
    scores = call.scale * call.q[:, rows][heads].to(wide) @ call.k[heads].to(wide).transpose(-2, -1)
    return (scores if call.bias is None else scores + call.bias[:, rows][heads]).softmax(-1)


def _wide(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype is torch.float64 else torch.float32


def _one(image: Tensor) -> Tensor:
    if not isinstance(image, Tensor):
        raise TypeError(f"image must be a tensor, got {type(image).__name__}")
    if image.dim() not in (3, 4) or (image.dim() == 4 and image.shape[0] != 1):
        raise ValueError(f"image must have shape (C, H, W) or (1, C, H, W), got {tuple(image.shape)}")
    return image if image.dim() == 4 else image[None]


def _checked(name: str, value: int | Sequence[int] | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    numbers = tuple(value) if isinstance(value, Sequence) else (value,)
    if not numbers or any(type(number) is not int for number in numbers):
        raise ValueError(f"{name} must be an integer, some integers, or None for all, got {value!r}")
    return numbers


def _resolved(name: str, numbers: Sequence[int] | None, count: int) -> tuple[int, ...]:
    """Return indices below `count`, with negative ones resolved; all of them for None."""
    if not count:
        raise ValueError("the model has no self-attention that is seen: neither fastvit's nor PyTorch's")
    for number in numbers or ():
        if not -count <= number < count:
            raise ValueError(f"{name} must be in {-count}..{count - 1}, got {number}")
    return tuple(range(count)) if numbers is None else tuple(number % count for number in numbers)


def _unseen(layer: int, reason: str) -> ValueError:
    return ValueError(f"layer {layer}'s attention is not seen: {reason}")
