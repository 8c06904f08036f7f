"""The dtypes of statistics, of sums, and of autocast."""

from __future__ import annotations

import torch
from torch import Tensor

from fastvit.ops.runtime.torch_private import is_any_autocast_enabled


def stat_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of statistics, softmax and sums over x: float32, or float64 for float64."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def promoted_dtype(x: Tensor, *others: Tensor | None) -> torch.dtype:
    """Return the dtype that x and the others, unless None, promote to."""
    dtype = x.dtype
    for t in others:
        if t is not None and t.dtype is not dtype:
            dtype = torch.promote_types(dtype, t.dtype)
    return dtype


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return autocast's dtype on x's device; None outside autocast and for float64."""
    if is_any_autocast_enabled is not None and not is_any_autocast_enabled():
        return None
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind) and x.dtype is not torch.float64:  # refuses meta tensors
        return torch.get_autocast_dtype(kind)
    return None
