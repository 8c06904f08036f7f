"""How grids of tokens are cut into windows, for both paths: what follows from the sizes of a grid and a window."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fastvit.ops.attention.aten import is_added


class Windows(NamedTuple):
    """How grids of tokens are cut into windows: rows and columns of the grid and of a window; how far the grid is
    rolled up and to the left before, less than the grid's size; and what is added to the scores between tokens that
    only the roll has made neighbours."""

    grid: tuple[int, int]
    window: tuple[int, int]
    shift: tuple[int, int]
    shift_bias: float

    @property
    def tokens(self) -> int:
        return self.window[0] * self.window[1]

    @property
    def per_sample(self) -> int:
        """Return how many windows a grid has; the last ones may reach beyond it."""
        down, across = (-(-size // side) for size, side in zip(self.grid, self.window, strict=True))
        return down * across

    @property
    def hides(self) -> bool:
        """Return whether windows have places that do not exist, or tokens that the roll has made neighbours."""
        return any(self.shift) or any(size % side for size, side in zip(self.grid, self.window, strict=True))


def windows_of(
    x: Tensor, window: Sequence[int], shift: Sequence[int] = (0, 0), shift_bias: float = -math.inf
) -> Windows:
    """Return the windows of x (B, gh, gw, ...)."""
    gh, gw = x.shape[1:3]
    return Windows((gh, gw), (window[0], window[1]), (shift[0] % max(gh, 1), shift[1] % max(gw, 1)), shift_bias)


def relative_windows_of(qkv: Tensor, rows: Tensor, columns: Tensor) -> Windows:
    """Return the windows of attention with relative positions, (B, gh, gw, H, wh) and (B, gh, gw, H, ww)."""
    return windows_of(qkv, (rows.shape[4], columns.shape[4]))


def lse_shape(qkv: Tensor, mask: Tensor | None, windows: Windows) -> tuple[int, ...]:
    """Return the shape of the LSE of qkv (B, gh, gw, 3, H, d): that of attention with windows for samples."""
    samples, heads = qkv.shape[0] * windows.per_sample, qkv.shape[4]
    return (samples, heads, 2, windows.tokens) if is_added(mask) else (samples, heads, windows.tokens)


def if_several(windows: Windows) -> Windows | None:
    """Return the windows, or None if one has the whole grid as it is: then the kernels that know no windows run."""
    return None if windows.window == windows.grid and not windows.hides else windows


def flops(qkv: Any, window: Any) -> int:
    """Count forward. Windows at the border of the grid, and pairs that a shift hides, count in full."""
    B, gh, gw, _, H, d = qkv
    n = window[0] * window[1]
    return 4 * B * -(-gh // window[0]) * -(-gw // window[1]) * H * n * n * d
