"""Rotary positions of V-JEPA 2 in transformers, which its attention makes itself."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastvit.integrations.forward import Call
from fastvit.integrations.transformers import hooks
from fastvit.ops import Rotary


def read_call(
    module: Any, hidden_states: Tensor, position_mask: Tensor | None = None, output_attentions: Any = None,
    **kwargs: Any,
) -> Call:  # fmt: skip
    """Read a call, and compute its rotary positions (Assran et al. 2025, arXiv:2506.09985). position_mask: the
    tubelets' places in the video, (B, N), counted frame by frame and row by row; None for all.

    The elements of a head are in three parts of 2 * (d // 3 // 2), for frame, row and column, and a rest, which is not
    rotated. Neighbours are partners, as in EVA, but a part has its list of frequencies twice, one after the other: two
    partners have different angles. The weights of V-JEPA 2 were trained with that.

    Angles are float32 at least. transformers computes them in the dtype of q, which in 16 bits rounds places beyond 256
    and the products with the frequencies."""
    hooks.check_others({"output_attentions": output_attentions, **kwargs})
    attn = module._modules.get("attention", module)
    size, d, device = attn.grid_size, attn.attention_head_size, hidden_states.device
    places = torch.arange(hidden_states.shape[1], device=device) if position_mask is None else position_mask[:, None]
    dtype = torch.promote_types(hidden_states.dtype, torch.float32)
    count = d // 3 // 2
    frequencies = 1.0 / 10000.0 ** (torch.arange(count, dtype=dtype, device=device) / count)
    axes = torch.stack((places // size**2, places % size**2 // size, places % size), dim=-1)
    angles = axes[..., None] * frequencies  # (..., 3, count)
    angles = torch.cat((angles, angles), dim=-1).flatten(-2)
    angles = F.pad(angles, (0, d - angles.shape[-1]))
    return hidden_states, {"rotary": Rotary(angles.sin(), angles.cos(), interleaved=True)}
