"""Collects attention distances and the evolution of CLS by layer for the page, rounded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from fastvit.study.attention.distance import attention_distance
from fastvit.study.attention.evolution import cls_evolution


def collect(
    model: nn.Module,
    pixels: Tensor,
    progress: Callable[[int, str], AbstractContextManager[Callable[[str], None]]],
) -> dict[str, Any]:
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
