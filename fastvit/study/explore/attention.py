"""Collects attention of one picture for the page, rounded: rows of every query, as many as the page has room for, and
distances and the evolution of CLS by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fastvit.study.attention import weights
from fastvit.study.attention.layers import attention_distance, cls_evolution
from fastvit.study.attention.maps import attention_maps, attention_rollout
from fastvit.study.attention.recording import AttentionCall
from fastvit.study.explore import document
from fastvit.study.explore.document import Progress


def collect(
    model: nn.Module, pixels: Tensor, layers: Sequence[int] | None, progress: Progress, room: int
) -> dict[str, Any]:
    """Collect the rollout, the mean of the heads of every layer, and then all heads, layer by layer, until the room is
    full. If the means alone are too much, only every second (third, ...) row and column of queries is kept.

    Args:
        model: in float32, with fastvit's or PyTorch's attention.
        pixels: (C, H, W).
        layers: numbers from 0 of the layers whose heads come first; the last, the first, and so inwards follow.
        room: characters.

    Raises:
        ValueError: the model has no such layer.
    """
    try:
        one = attention_maps(model, pixels, layers=0)
    except ValueError as error:
        return {"maps": None, "note": f"No attention is shown: {error}."}
    (h, w), prefix, depth, heads = one.grid, one.num_prefix_tokens, one.depth, len(one.heads)
    for layer in layers or ():
        if not 0 <= layer < depth:
            raise ValueError(f"layers must be in 0..{depth - 1}, got {layer}")
    has_cls, N = "cls" in one.queries, prefix + h * w
    stride = _stride(h, w, has_cls, N, depth, room)
    queries: list[Any] = ["cls"] if has_cls else []
    queries += [(row, column) for row in range(0, h, stride) for column in range(0, w, stride)]
    tokens = weights.QueryTokens(model, queries)

    def packed(call: AttentionCall) -> list[dict[str, str]]:
        """Return the mean of a layer's heads, and then each of them."""
        step(f"layer {call.layer}")
        rows = weights.softmax(call, tokens.numbers)
        return [document.quantized(head) for head in (rows.mean(0), *rows)]

    with progress(depth + 1, "attention") as step:
        step("rollout")
        maps = {"rollout": document.quantized(attention_rollout(model, pixels, queries).rows)}
        _, found, _ = weights.by_layer(model, weights.one_image(pixels), tokens, None, packed)
    maps |= {f"{layer}.mean": mean for layer, (mean, *_) in enumerate(found)}
    registers, kept = prefix - has_cls, []
    for layer in _by_interest(depth, layers or ()):
        by_head = {f"{layer}.{head}": rows for head, rows in enumerate(found[layer][1:])}
        if _characters(maps) + _characters(by_head) > room:
            break
        maps |= by_head
        kept.append(layer)
    prefix_words = ["CLS"] * has_cls + [f"{registers} register{'s' * (registers > 1)}"] * (registers > 0)
    return {
        "grid": [h, w], "prefix": prefix, "tokens": N, "layers": list(range(depth)), "heads": heads,
        "queries": tokens.numbers, "stride": stride, "prefix_names": ["CLS"] if has_cls else [],
        "prefix_text": " and ".join(prefix_words), "maps": maps, "note": _note(depth, heads, sorted(kept), stride),
    }  # fmt: skip


def _characters(maps: dict[str, dict[str, str]]) -> int:
    return sum(len(text) for packed in maps.values() for text in packed.values()) + 64 * len(maps)


def _stride(h: int, w: int, has_cls: bool, N: int, depth: int, room: int) -> int:
    """Return the least stride with which rollout and means fit into the room, even if nothing could be deflated."""
    stride = 1
    while True:
        queries = has_cls + -(-h // stride) * -(-w // stride)
        size = document.most_characters(queries * N) + document.most_characters(4 * queries) + 64
        if (depth + 1) * size <= room or queries <= 2:
            return stride
        stride += 1


def _by_interest(depth: int, asked: Sequence[int]) -> list[int]:
    """Order all layers: those asked for, then the last, the first, the last but one, ..."""
    inwards = [layer for i in range((depth + 1) // 2) for layer in (depth - 1 - i, i)]
    return list(dict.fromkeys([*asked, *inwards]))


def _note(depth: int, heads: int, kept: list[int], stride: int) -> str:
    which = "every layer" if len(kept) == depth else f"layers {', '.join(map(str, kept))}" if kept else "no layer"
    lines = [
        f"In this page: rollout and the mean of the heads of all {depth} layers, and each of {heads} heads of {which}."
    ]
    if stride > 1:
        lines.append(f"Queries are in rows and columns 0, {stride}, {2 * stride}, ... of the grid; keys are all.")
    lines.append("A row is rounded to 255ths of its largest weight.")
    return " ".join(lines)


def collect_by_layer(model: nn.Module, pixels: Tensor, progress: Progress) -> dict[str, Any]:
    """Return {"distance": pixels by layer and head, "uniform": pixels, "cosine": by block, "state": of what}. What
    cannot be computed is None, and "note" says why.

    Args:
        model: in float32.
        pixels: (C, H, W).
    """
    data: dict[str, Any] = {"distance": None, "uniform": None, "cosine": None, "state": None}
    notes = []
    with progress(2, "layers") as step:
        step("attention distance")
        try:
            far = attention_distance(model, pixels)
            data["distance"] = [[round(value, 2) for value in heads] for heads in far.distance.tolist()]
            data["uniform"] = round(far.uniform, 2)
            notes.append("Prefix tokens, such as CLS, are left out of distances.")
        except ValueError as error:
            notes.append(f"No attention distances are shown: {error}.")
        step("CLS")
        try:
            evolution = cls_evolution(model, pixels)
            data["cosine"] = [round(value, 4) for value in evolution.mean.tolist()]
            data["state"] = evolution.state
            notes.append("States are those before the last norm.")
        except ValueError as error:
            notes.append(f"No states after blocks are shown: {error}.")
    return {**data, "note": " ".join(notes)}
