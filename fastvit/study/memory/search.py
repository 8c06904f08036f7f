"""Searches the largest batch and the largest image that fit a memory budget."""

from __future__ import annotations

from collections.abc import Callable

from fastvit._units import MOST_BYTES, MOST_IMAGES, MOST_PIXELS
from fastvit.modules.arguments import Pair
from fastvit.study.memory.growth import check_batch, checked_device
from fastvit.study.memory.plan import plan
from fastvit.study.memory.step import Setting
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
    """`largest_batch` and `largest_image` for one model, provider and setting."""

    def __init__(
        self, model: str, *, patch_size: Pair | None = None, provider: str = "fastvit", device: str | None = None,
        **setting: object,
    ) -> None:  # fmt: skip
        self.source, self.setting, self.provider = find(model), _setting(**setting), provider
        self.patch = self.source.patch_size if patch_size is None else checked_size("patch_size", patch_size)
        self.gpu = checked_device(device) == "cuda"

    def largest_batch(self, budget: int, image_size: Pair | None = None) -> int:
        """Return what the function `largest_batch` does."""
        size, _ = self.source.sizes(image_size, self.patch)
        return _largest(lambda batch: self._peak(size, batch), _checked(budget), MOST_IMAGES)

    def largest_image(self, budget: int, batch: int = 8) -> int:
        """Return what the function `largest_image` does."""
        check_batch(batch)
        side, width = self.patch
        if side != width:
            raise ValueError(f"the patches of {self.source.name} must be square, got {self.patch}")

        def peak(patches: int) -> int:
            return self._peak((patches * side, patches * side), batch)

        return side * _largest(peak, _checked(budget), MOST_PIXELS // side, power=2)

    def _peak(self, size: tuple[int, int], batch: int) -> int:
        """Return the planned peak of a step in bytes."""
        planned = plan(self.source, self.provider, size, batch, self.setting, gpu=self.gpu, patch_size=self.patch)
        return planned.parts.peak


def _checked(budget: object) -> int:
    if not isinstance(budget, int) or not 1 <= budget <= MOST_BYTES:
        raise ValueError(f"budget must be bytes from 1 to {MOST_BYTES}, got {budget!r}")
    return budget


def _setting(**setting: object) -> Setting:
    try:
        return Setting(**setting)  # type: ignore[arg-type]
    except TypeError as error:
        raise TypeError(str(error).replace("Setting.__init__()", "the setting")) from None


def _largest(peak: Callable[[int], int], budget: int, most: int, power: int = 1) -> int:
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
