"""Rotary positions of V-JEPA 2 in transformers, which its attention makes itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastvit.ops import Rotary


def rotary(module: Any, hidden_states: Tensor, position_mask: Tensor | None = None, **_: Any) -> Rotary:
    """Compute a call's rotary positions. position_mask: the tubelets' places in the video, (B, N); None for all.

    Angles are float32 at least. transformers computes them in the dtype of q, which in 16 bits rounds places beyond 256
    and the products with the frequencies."""
    attn = module._modules.get("attention", module)
    if position_mask is None:
        places = torch.arange(hidden_states.shape[1], device=hidden_states.device)
    else:
        places = position_mask[:, None]
    dtype = torch.promote_types(hidden_states.dtype, torch.float32)
    grid = attn.grid_size, attn.grid_size
    return Rotary(*tables(places, grid, attn.attention_head_size, dtype=dtype), interleaved=True)


def tables(places: Tensor, grid: Sequence[int], dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute sin and cos of V-JEPA 2's positions (Assran et al. 2025, arXiv:2506.09985), (..., dim) each, for tubelets
    at any places of a video: frame, row and column are counted.

    The elements of a head are in three parts of 2 * (dim // 3 // 2), one for each axis, and a rest, which is not
    rotated. Neighbours are partners, as in EVA, but a part has its list of frequencies twice, one after the other: two
    partners have different angles. The weights of V-JEPA 2 were trained with that.

    Args:
        places: (...), integers: the tubelets, counted frame by frame and row by row.
        grid: (H, W), of a frame.
        dim: the width of a head.
        dtype: of the tables; angles are computed in it.
    """
    H, W = grid
    count = dim // 3 // 2
    frequencies = 1.0 / 10000.0 ** (torch.arange(count, dtype=dtype, device=places.device) / count)
    axes = torch.stack((places // (H * W), places % (H * W) // W, places % W), dim=-1)
    angles = axes[..., None] * frequencies  # (..., 3, count)
    angles = torch.cat((angles, angles), dim=-1).flatten(-2)
    angles = F.pad(angles, (0, dim - angles.shape[-1]))
    return angles.sin(), angles.cos()
