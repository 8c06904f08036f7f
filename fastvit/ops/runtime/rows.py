"""Tensors as rows, as kernels read them, and new tensors for their results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def as_rows(x: Tensor) -> Tensor:
    """Return x (..., D) as [M, D] with unit stride along D. Copy only where strides leave no other way, and copy an
    expanded row: without the copy, a batch of one would be the only one with stride 0."""
    if x.is_contiguous():
        return x if x.dim() == 2 else x.view(-1, x.shape[-1])
    x = x.reshape(-1, x.shape[-1])
    return x if (x.stride(-1) == 1 or x.shape[-1] == 1) and x.stride(0) > 0 else x.contiguous()


def by_rows(x: Tensor | None) -> Any:
    """Return x (..., D) for a kernel that reads it row by row: x itself, or `as_rows` of it; None for None. `as_rows`
    alone would make a view in every launch, which takes time."""
    return x if x is None or x.is_contiguous() else as_rows(x)


def row_stride(x: Tensor | None) -> int:
    """Return the stride of the rows of `by_rows`, in elements; 0 for None."""
    if x is None:
        return 0
    return x.shape[-1] if x.is_contiguous() else x.stride(0)


def contiguous(x: Tensor | None) -> Any:
    """Return x contiguous, for a vector that a kernel reads without a stride."""
    return None if x is None else x.contiguous()


def empty_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty contiguous tensor of x's shape, in half the time of `torch.empty` with three arguments."""
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def unexpanded(x: Tensor) -> Tensor:
    """Return x with one element along every expanded dimension."""
    for i, stride in enumerate(x.stride()):
        if stride == 0 and x.shape[i] > 1:
            x = x.narrow(i, 0, 1)
    return x
