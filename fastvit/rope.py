"""Rotary positions of a patch grid (Su et al. 2021, arXiv:2104.09864), along its two axes: timm's kinds and numbers.

All make float32 tables of sin and cos side by side, (H * W, 2 * dim) for heads of `dim` elements. In the axial ones a
quarter of them are the frequencies of an axis, each for two elements of a head; those hold no tensors: a table is
computed when wanted. The mixed one learns a frequency along each axis for every two elements of every head and block.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from fastvit.modules.arguments import (
    Device,
    Dtype,
    check_choice,
    check_factory,
    check_flags,
    check_integers,
    check_number,
    checked_pair,
)

__all__ = ["RotaryEmbeddingCat", "RotaryEmbeddingDinoV3", "RotaryEmbeddingMixed"]


class _Axial(nn.Module):
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

    def _axis(self, axis: int, length: int, **where: Any) -> Tensor:
        """Coordinates along axis 0 (rows) or 1 (columns)."""
        raise NotImplementedError

    def _angles(self, coordinates: Tensor) -> Tensor:
        """(n, 2, 1) -> (n, 2, dim / 4)"""
        raise NotImplementedError

    def _transformed(self, coordinates: Tensor) -> Tensor:
        return coordinates

    def get_embed(self, shape: tuple[int, int], device: Device = None) -> Tensor:
        """Patch grid (H, W) -> (H * W, 2 * dim), float32: sin, then cos, of every patch, row by row."""
        where: dict[str, Any] = {"device": device, "dtype": torch.float32}
        rows, columns = (self._axis(axis, length, **where) for axis, length in enumerate(shape))
        both = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1).flatten(0, 1)  # (H * W, 2)
        coordinates = self._transformed(both if self.grid_indexing == "ij" else both.flip(-1))
        angles = self._angles(coordinates[:, :, None]).flatten(1)
        tables = angles.sin(), angles.cos()
        if self.rotate_half:
            return torch.cat([half for table in tables for half in (table, table)], dim=-1)
        return torch.cat([table.repeat_interleave(2, -1) for table in tables], dim=-1)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, temperature={self.temperature:g}"


class RotaryEmbeddingCat(_Axial):
    """EVA-02's (Fang et al. 2023, arXiv:2303.11331) and Perception Encoder's positions: patches are counted.

    Args:
        dim: of a head, a multiple of 4.
        temperature: of the frequencies temperature^(-i / (dim / 4)).
        ref_feat_shape: the grid of the pretraining, to which coordinates are scaled, or None for counts as they are.
        grid_offset: added to the counts.
        grid_indexing: "ij" for rows before columns among the frequencies, or "xy".
        rotate_half: for heads rotated by halves, else by neighbours.
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
        count = self.dim // 4
        exponents = torch.arange(count, device=coordinates.device, dtype=torch.float32) / count
        return coordinates * (1.0 / self.temperature**exponents)


class RotaryEmbeddingDinoV3(_Axial):
    """DINOv3's positions (Simeoni et al. 2025, arXiv:2508.10104): a grid spans [-1, 1] whatever its size.

    Args:
        dim, temperature, grid_offset, grid_indexing, rotate_half: as in `RotaryEmbeddingCat`; periods are
            temperature^(i / (dim / 4)) in units of half a grid.
        shift_coords, jitter_coords, rescale_coords: in training every call moves the grid by as much as the first
            along each axis, scales each axis by a factor of up to the second, and both by one of up to the third,
            down as well as up, log-uniform; None for not at all.
    """

    def __init__(
        self, dim: int, temperature: float = 100.0, grid_offset: float = 0.0, grid_indexing: str = "ij",
        rotate_half: bool = True, shift_coords: float | None = None, jitter_coords: float | None = None,
        rescale_coords: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(dim, temperature, grid_offset, grid_indexing, rotate_half)
        if shift_coords is not None:
            check_number("shift_coords", shift_coords, lambda s: 0.0 <= s < math.inf, "finite and not negative")
        for name, factor in (("jitter_coords", jitter_coords), ("rescale_coords", rescale_coords)):
            if factor is not None:
                check_number(name, factor, lambda f: 1.0 <= f < math.inf, "finite and at least 1")
        self.shift_coords = shift_coords
        self.jitter_coords = jitter_coords
        self.rescale_coords = rescale_coords

    def _axis(self, axis: int, length: int, **where: Any) -> Tensor:
        return 2.0 * ((torch.arange(length, **where) + 0.5 + self.grid_offset) / length) - 1.0

    def _angles(self, coordinates: Tensor) -> Tensor:
        count = self.dim // 4
        exponents = 2.0 * torch.arange(count, device=coordinates.device, dtype=torch.float32) / (self.dim // 2)
        return 2 * math.pi * coordinates / self.temperature**exponents

    def _transformed(self, coordinates: Tensor) -> Tensor:
        if not self.training:
            return coordinates

        def drawn(count: int, most: float) -> Tensor:
            return torch.empty(count, device=coordinates.device).uniform_(-most, most)

        if self.shift_coords is not None:
            coordinates = coordinates + drawn(2, self.shift_coords)
        if self.jitter_coords is not None:
            coordinates = coordinates * drawn(2, math.log(self.jitter_coords)).exp()
        if self.rescale_coords is not None:
            coordinates = coordinates * drawn(1, math.log(self.rescale_coords)).exp()
        return coordinates


class RotaryEmbeddingMixed(nn.Module):
    """ROPE-ViT's learnt frequencies (Heo et al. 2024, arXiv:2403.13298): an angle is x * f_x + y * f_y, x and y count
    patches. They begin as axial ones, turned by a random angle in every head and block. `freqs` is (2, depth,
    num_heads, dim / num_heads / 2).

    Args:
        dim, depth, num_heads: of the model; heads of a multiple of 4 elements, which are rotated by neighbours.
        temperature: of the first frequencies temperature^(-i / (dim / num_heads / 4)).
        grid_indexing: "ij" for rows as x, or "xy" for columns.
        device, dtype: of the parameter.
    """

    def __init__(
        self, dim: int, depth: int, num_heads: int, temperature: float = 10.0, grid_indexing: str = "xy",
        device: Device = None, dtype: Dtype = None,
    ) -> None:  # fmt: skip
        super().__init__()
        check_integers(1, dim=dim, num_heads=num_heads)
        check_integers(0, depth=depth)
        if dim % (4 * num_heads):
            raise ValueError(f"dim must be a multiple of 4 * num_heads = {4 * num_heads}, got {dim}")
        check_number("temperature", temperature, lambda t: 0.0 < t < math.inf, "finite and positive")
        check_choice("grid_indexing", grid_indexing, ("ij", "xy"))
        check_factory(device, dtype)
        self.temperature = float(temperature)
        self.grid_indexing = grid_indexing
        self.freqs = nn.Parameter(torch.empty(2, depth, num_heads, dim // num_heads // 2, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        _, depth, heads, half = self.freqs.shape
        where: dict[str, Any] = {"device": self.freqs.device, "dtype": torch.float32}  # polar takes no bfloat16
        magnitudes = self.temperature ** -(torch.arange(half // 2, **where) / (half // 2))
        turned = torch.rand(depth, heads, 1, **where) * 2 * math.pi
        first, second = torch.polar(magnitudes, turned), torch.polar(magnitudes, turned + math.pi / 2)
        self.freqs.copy_(torch.view_as_real(torch.cat((first, second), dim=-1)).movedim(-1, 0))

    def get_embed(self, shape: tuple[int, int], device: Device = None) -> Tensor:
        """Patch grid (H, W) -> (depth, num_heads, H * W, 2 * dim / num_heads), float32, or float64 of such frequencies:
        sin, then cos, of every patch, row by row. device: that of `freqs`."""
        freqs = self.freqs.to(torch.promote_types(self.freqs.dtype, torch.float32))
        counts = (torch.arange(length, device=freqs.device, dtype=freqs.dtype) for length in shape)
        rows, columns = (axis.reshape(-1, 1) for axis in torch.meshgrid(*counts, indexing="ij"))
        x, y = (rows, columns) if self.grid_indexing == "ij" else (columns, rows)
        angles = x * freqs[0].unsqueeze(-2) + y * freqs[1].unsqueeze(-2)  # no matmul: autocast would round it
        return torch.cat([table.repeat_interleave(2, -1) for table in (angles.sin(), angles.cos())], dim=-1)

    def extra_repr(self) -> str:
        return f"{tuple(self.freqs.shape)}, temperature={self.temperature:g}"
