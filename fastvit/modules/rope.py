"""Rotary positions of a patch grid (Su et al. 2021, arXiv:2104.09864): timm's kinds and numbers, along two axes.

All make float32 tables of sin and cos side by side, (n, 2 * dim) for n patches and heads of `dim` elements. Each axis
has dim / 4 frequencies, and each frequency rotates two elements of a head. The modules hold no tensors: `get_embed`
computes a table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastvit.modules.arguments import (
    Device,
    check_choice,
    check_flags,
    check_integers,
    check_number,
    checked_pair,
)
from fastvit.modules.positions import remembered

__all__ = ["RotaryEmbeddingCat", "RotaryEmbeddingDinoV3"]


class _Axial(nn.Module):
    _axis: Callable[..., Tensor]  # a method (axis, length, **where): the coordinates along axis 0 (rows) or 1 (columns)
    _angles: Callable[[Tensor], Tensor]  # a method: (n, 2, 1) -> (n, 2, dim / 4)

    def __init__(self, dim: int, temperature: float, grid_offset: float, grid_indexing: str, rotate_half: bool) -> None:
        super().__init__()
        check_integers(4, dim=dim)
        if dim % 4:
            raise ValueError(f"dim must be a multiple of 4, got {dim}")
        check_number("temperature", temperature, lambda t: 0.0 < t < math.inf, "finite and positive")
        check_number("grid_offset", grid_offset, math.isfinite, "finite")
        check_choice("grid_indexing", grid_indexing, ("ij", "xy"))
        check_flags(rotate_half=rotate_half)
        self.dim = dim
        self.temperature = float(temperature)
        self.grid_offset = grid_offset
        self.grid_indexing = grid_indexing
        self.rotate_half = bool(rotate_half)

    def get_embed(self, shape: tuple[int, int], device: Device = None) -> Tensor:
        """Compute the table of a patch grid (H, W), sin then cos, row by row: (H * W, 2 * dim) float32."""
        where: dict[str, Any] = {"device": device, "dtype": torch.float32}
        rows, columns = (self._axis(axis, length, **where) for axis, length in enumerate(shape))
        both = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1).flatten(0, 1)  # (H * W, 2)
        coordinates = both if self.grid_indexing == "ij" else both.flip(-1)
        angles = self._angles(coordinates[:, :, None]).flatten(1)
        tables = angles.sin(), angles.cos()
        if self.rotate_half:
            return torch.cat([half for table in tables for half in (table, table)], dim=-1)
        return torch.cat([table.repeat_interleave(2, -1) for table in tables], dim=-1)

    def of_image(self, shape: tuple[int, int], num_prefix_tokens: int, device: torch.device) -> Tensor:
        """Return the table of `get_embed` after prefix tokens, which it leaves as they are: (P + H * W, 2 * dim). It is
        kept for later calls, and must not be changed."""

        def make() -> Tensor:
            table = self.get_embed(shape, device)
            prefix = F.pad(table.new_zeros(num_prefix_tokens, self.dim), (0, self.dim), value=1.0)
            return torch.cat((prefix, table))

        if type(self) not in (RotaryEmbeddingCat, RotaryEmbeddingDinoV3):  # a subclass may depend on more than these
            return make()
        of_class = type(self), self.dim, self.temperature, self.grid_offset, self.grid_indexing, self.rotate_half
        key = *of_class, getattr(self, "ref_feat_shape", None), shape, num_prefix_tokens, device
        return remembered(key, device, make)

    def _periods(self, device: torch.device) -> Tensor:
        """Return temperature^(i / (dim / 4)) for each frequency, float32."""
        count = self.dim // 4
        return self.temperature ** (torch.arange(count, device=device, dtype=torch.float32) / count)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, temperature={self.temperature:g}"


class RotaryEmbeddingCat(_Axial):
    """EVA-02's (Fang et al. 2023, arXiv:2303.11331) and Perception Encoder's positions: patches are counted.

    Args:
        dim: the width of a head, a multiple of 4.
        temperature: the frequencies are temperature^(-i / (dim / 4)).
        ref_feat_shape: the grid of the pretraining, to which coordinates are scaled, or None for counts as they are.
        grid_offset: added to the counts.
        grid_indexing: "ij" for rows before columns among the frequencies, or "xy".
        rotate_half: whether heads are rotated by halves, or by neighbours.
    """

    def __init__(
        self, dim: int, temperature: float = 10000.0, ref_feat_shape: int | tuple[int, int] | None = None,
        grid_offset: float = 0.0, grid_indexing: str = "ij", rotate_half: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(dim, temperature, grid_offset, grid_indexing, rotate_half)
        self.ref_feat_shape = None if ref_feat_shape is None else checked_pair("ref_feat_shape", ref_feat_shape)

    def _axis(self, axis: int, length: int, **where: Any) -> Tensor:
        counts = torch.arange(length, **where) + self.grid_offset
        return counts if self.ref_feat_shape is None else counts / length * self.ref_feat_shape[axis]

    def _angles(self, coordinates: Tensor) -> Tensor:
        return coordinates * (1.0 / self._periods(coordinates.device))


class RotaryEmbeddingDinoV3(_Axial):
    """DINOv3's positions (Simeoni et al. 2025, arXiv:2508.10104): a grid spans [-1, 1] whatever its size.

    Args:
        dim, temperature, grid_offset, grid_indexing, rotate_half: as in `RotaryEmbeddingCat`; periods are
            temperature^(i / (dim / 4)) in units of half a grid.
    """

    def __init__(
        self, dim: int, temperature: float = 100.0, grid_offset: float = 0.0, grid_indexing: str = "ij",
        rotate_half: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(dim, temperature, grid_offset, grid_indexing, rotate_half)

    def _axis(self, axis: int, length: int, **where: Any) -> Tensor:
        return 2.0 * ((torch.arange(length, **where) + 0.5 + self.grid_offset) / length) - 1.0

    def _angles(self, coordinates: Tensor) -> Tensor:
        return 2 * math.pi * coordinates / self._periods(coordinates.device)
