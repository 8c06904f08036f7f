"""Rotary positions of V-JEPA 2 in transformers, which its attention makes itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastvit.ops import Rotary
from fastvit.rope import vjepa2_tables


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
    return Rotary(*vjepa2_tables(places, grid, attn.attention_head_size, dtype=dtype), interleaved=True)
