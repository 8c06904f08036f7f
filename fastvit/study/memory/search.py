"""Searches the largest batch and the largest image that fit a memory budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastvit._units import MOST_BYTES, MOST_IMAGES, MOST_PIXELS
from fastvit.modules.arguments import Pair
from fastvit.study.memory.growth import check_batch, checked_device
from fastvit.study.memory.plan import plan
from fastvit.study.memory.step import Setting
from fastvit.study.memory.traced_step import TracedStep, sizes_to_trace
from fastvit.study.sources.find import find
from fastvit.study.sources.model_source import checked_size


def largest_batch(
    model: str, budget: int, *, image_size: Pair | None = None, patch_size: Pair | None = None,
    provider: str = "fastvit", device: str | None = None, **setting: object,
) -> int:  # fmt: skip
    """Return the largest batch whose planned peak is at most `budget` bytes, or 0 if one image does not fit. No batch
    above 2**20 is tried.

    Args:
        model, patch_size, device: as in `memory`.
        image_size: None for the model's default.
        provider: "eager", "sdpa" or "fastvit".
        setting: mode, dtype, optimizer, checkpointing, as in `memory`.

    Raises:
        ValueError, FileNotFoundError, ImportError: as `memory`.
    """
    search = Search(model, patch_size=patch_size, provider=provider, device=device, **setting)
    return search.largest_batch(budget, image_size)


def largest_image(
    model: str, budget: int, *, batch: int = 8, patch_size: Pair | None = None, provider: str = "fastvit",
    device: str | None = None, **setting: object,
) -> int:  # fmt: skip
    """Return the largest side in pixels of square images, at which the planned peak of a batch is at most `budget`
    bytes, or 0 if images of one patch do not fit. No side above 65536 is tried.

    Args:
        model, patch_size, device: as in `memory`; patches must be square.
        batch: images.
        provider: "eager", "sdpa" or "fastvit".
        setting: mode, dtype, optimizer, checkpointing, as in `memory`.
    """
    search = Search(model, patch_size=patch_size, provider=provider, device=device, **setting)
    return search.largest_image(budget, batch)


class Search:
    """`largest_batch` and `largest_image` for one model, provider and setting.

    One traced step serves all searches. The result is planned again by itself; if the two plans differ, the search
    repeats with a plan for every number that it tries.
    """

    def __init__(
        self, model: str, *, patch_size: Pair | None = None, provider: str = "fastvit", device: str | None = None,
        **setting: object,
    ) -> None:  # fmt: skip
        self.source, self.setting, self.provider = find(model), _setting(**setting), provider
        self.patch = self.source.patch_size if patch_size is None else checked_size("patch_size", patch_size)
        self.gpu = checked_device(device) == "cuda"
        self._traced: dict[bool, TracedStep | None] = {}

    def largest_batch(self, budget: int, image_size: Pair | None = None) -> int:
        """Return what the function `largest_batch` does."""
        size, _ = self.source.sizes(image_size, self.patch)
        return self._largest(
            lambda n: (size, n), self._traced_step(one_image=False) if size[0] == size[1] else None, budget, MOST_IMAGES
        )

    def largest_image(self, budget: int, batch: int = 8) -> int:
        """Return what the function `largest_image` does."""
        check_batch(batch)
        side, width = self.patch
        if side != width:
            raise ValueError(f"the patches of {self.source.name} must be square, got {self.patch}")
        return side * self._largest(
            lambda n: ((n * side, n * side), batch),
            self._traced_step(one_image=batch == 1),
            budget,
            MOST_PIXELS // side,
        )

    def _largest(
        self, step: Callable[[int], tuple[tuple[int, int], int]], traced: TracedStep | None, budget: int, most: int
    ) -> int:
        """Return the largest n within the budget, at most `most`. step(n) is its image size and batch."""
        if not isinstance(budget, int) or not 1 <= budget <= MOST_BYTES:
            raise ValueError(f"budget must be bytes from 1 to {MOST_BYTES}, got {budget!r}")

        def peak(n: int) -> int:
            size, batch = step(n)
            options: dict[str, Any] = {"gpu": self.gpu, "patch_size": self.patch}
            return plan(self.source, self.provider, size, batch, self.setting, **options).parts.peak

        def likely(n: int) -> int:
            (size, _), batch = step(n)
            assert traced is not None
            return traced.parts(size, self.patch[0], batch).peak

        if traced is not None:
            found = _largest(likely, budget, most)
            if found > 1 and peak(found) == likely(found):
                return found
        return _largest(peak, budget, most)

    def _traced_step(self, one_image: bool) -> TracedStep | None:
        """Return the trace of one image, or of several; None if the model cannot be traced."""
        if one_image not in self._traced:
            self._traced[one_image] = self._trace(one_image)
        return self._traced[one_image]

    def _trace(self, one_image: bool) -> TracedStep | None:
        if self.patch[0] != self.patch[1]:
            return None
        try:
            model = self.source.on_meta(self.provider, patch_size=self.patch)
            prefix = self.source.prefix_tokens(model, self.source.image_size, self.patch)
            if prefix is None:
                return None
            at = sizes_to_trace(model, prefix, self.patch[0])
            at = at._replace(batch=1) if one_image else at
            return TracedStep(self.source, self.provider, self.setting, at, gpu=self.gpu)
        except ValueError:
            return None


def _setting(**setting: object) -> Setting:
    try:
        return Setting(**setting)  # type: ignore[arg-type]
    except TypeError as error:
        raise TypeError(str(error).replace("Setting.__init__()", "the setting")) from None


def _largest(peak: Callable[[int], int], budget: int, most: int) -> int:
    """Return the largest n from 1 to `most` with peak(n) <= budget, or 0. peak must not decrease; if it is nearly
    linear, few n are tried."""
    known = {1: peak(1)}
    if known[1] > budget:
        return 0
    low, high, n, halve = 1, 0, min(2, most), False  # high: the smallest known not to fit, or 0
    while low < most:
        known[n] = peak(n)
        low, high = (n, high) if known[n] <= budget else (low, n)
        if high - low == 1:
            return low
        # where the line through two known points meets the budget; every other time halfway, in case it bends
        other = high or max(k for k in known if k < low)
        slope = max((known[other] - known[low]) / (other - low), 1.0)
        n = low + int((budget - known[low]) / slope)
        if high:
            n = (low + high) // 2 if halve else min(n, high - 1)
            halve = not halve
        n = min(max(n, low + 1), 8 * low, most)  # memory bends away from the line, for example by the side squared
    return low
