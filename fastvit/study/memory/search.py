"""Searches the largest batch and the largest image that fit a memory budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastvit._base.units import MOST_IMAGES, MOST_PIXELS
from fastvit.modules.arguments import Pair
from fastvit.study.memory.growth import check_batch, checked_budget, checked_device
from fastvit.study.memory.plan import plan
from fastvit.study.memory.step import Setting, StepSpec
from fastvit.study.sources.find import find
from fastvit.study.sources.model_source import checked_size


def largest_batch(
    model: str, budget: int | str, *, image_size: Pair | None = None, patch_size: Pair | None = None,
    provider: str = "fastvit", device: str | None = None, **setting: Any,
) -> int:  # fmt: skip
    """Return the largest batch whose planned peak is at most `budget`, or 0 if one image does not fit. No batch above
    2**20 is tried.

    Args:
        model, patch_size, device: as in `memory`.
        budget: bytes, or text such as "24GiB".
        image_size: None for the model's default.
        provider: "eager", "sdpa" or "fastvit".
        setting: mode, dtype, optimizer, checkpointing, graphs, as in `memory`.

    Raises:
        ValueError, FileNotFoundError, ImportError: as `memory`.
    """
    source = find(model)
    size, patch = source.sizes(image_size, patch_size)
    spec = StepSpec(source, size, 1, Setting(**setting), checked_device(device) == "cuda", provider, patch)

    def peak(batch: int) -> int:
        return plan(spec._replace(batch=batch)).planned.peak

    return largest_that_fits(peak, checked_budget(budget), MOST_IMAGES)


def largest_image(
    model: str, budget: int | str, *, batch: int = 8, patch_size: Pair | None = None, provider: str = "fastvit",
    device: str | None = None, **setting: Any,
) -> int:  # fmt: skip
    """Return the largest side in pixels of square images, at which the planned peak of a batch is at most `budget`,
    or 0 if images of one patch do not fit. No side above 65536 is tried.

    Args:
        model, patch_size, device: as in `memory`; patches must be square.
        batch: images.
        provider: "eager", "sdpa" or "fastvit".
        setting: mode, dtype, optimizer, checkpointing, graphs, as in `memory`.
    """
    check_batch(batch)
    source = find(model)
    patch = source.patch_size if patch_size is None else checked_size("patch_size", patch_size)
    side = patch[0]
    if side != patch[1]:
        raise ValueError(f"the patches of {source.name} must be square, got {patch}")
    spec = StepSpec(source, patch, batch, Setting(**setting), checked_device(device) == "cuda", provider, patch)

    def peak(patches: int) -> int:
        return plan(spec._replace(image_size=(patches * side, patches * side))).planned.peak

    return side * largest_that_fits(peak, checked_budget(budget), MOST_PIXELS // side, power=2)


def largest_that_fits(peak: Callable[[int], int], budget: int, most: int, power: int = 1) -> int:
    """Return the largest n from 1 to `most` with peak(n) <= budget, or 0. peak must not decrease; if it is nearly
    linear in n**power, few n are tried."""
    known = {1: peak(1)}
    if known[1] > budget:
        return 0
    low, high, n = 1, 0, min(8, most)  # high: the smallest known not to fit, or 0
    while low < most:
        known[n], room = peak(n), high - low
        low, high = (n, high) if known[n] <= budget else (low, n)
        if high - low == 1:
            return low
        # where the line through two known points meets the budget; halfway, where that has brought little
        other = high or max(k for k in known if k < low)
        slope = max((known[other] - known[low]) / (other**power - low**power), 1.0)
        n = int((low**power + (budget - known[low]) / slope) ** (1 / power))
        if high:
            n = (low + high) // 2 if 0 < room < 2 * (high - low) else min(n, high - 1)
        n = min(max(n, low + 1), 64 * low, most)  # memory bends away from the line
    return low
