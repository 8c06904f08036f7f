"""Argument checks that the ops share. Each names the argument, what it was, and what is allowed."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def as_rows(x: Tensor) -> Tensor:
    """[..., D] -> [M, D] with unit stride along D; a copy only where strides leave no other way."""
    if x.is_contiguous():
        return x if x.dim() == 2 else x.view(-1, x.shape[-1])
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def as_tokens(x: Tensor) -> Tensor:
    """[..., D] as the forward ops take it: contiguous [B, N, D] as it is, which saves the 2 us of two views a call, and
    anything else as rows [M, D]."""
    return x if x.dim() == 3 and x.is_contiguous() else as_rows(x)


def like_tokens(residual: Tensor, tokens: Tensor) -> Tensor:
    """The residual of the x that became `tokens`, in the same form."""
    return residual.contiguous() if tokens.dim() == 3 else as_rows(residual)


def from_tokens(tokens: Tensor, x: Tensor) -> Tensor:
    """[M, D] or [B, N, D] -> [..., D] with the leading dimensions of x."""
    return tokens if tokens.dim() == x.dim() else tokens.view(*x.shape[:-1], tokens.shape[-1])


def contiguous(*tensors: Tensor | None) -> tuple[Any, ...]:
    """What a kernel reads without strides: vectors over columns or samples, as a caller may have sliced them."""
    return tuple([None if t is None else t.contiguous() for t in tensors])


def rows_and_columns(tokens: Tensor) -> tuple[int, int]:
    """M and D of [M, D] or [B, N, D]."""
    D = tokens.shape[-1]
    return tokens.numel() // D, D


def row_stride(tokens: Tensor) -> int:
    """Elements from one row to the next of what `as_tokens` or `as_rows` returned."""
    return tokens.stride(0) if tokens.dim() == 2 else tokens.shape[-1]


def check_float(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.dtype not in FLOATS:
        raise TypeError(f"{name} must be float32, float16, bfloat16 or float64, got {x.dtype}")


def check_like(
    name: str,
    x: Tensor,
    like_name: str,
    like: Tensor,
    shape: tuple[int, ...] | None = None,
    meaning: str = "",
    *,
    dtype: bool = True,
) -> None:
    """Same device and, unless `dtype` is False, same dtype as another argument; and of `shape`, if that is given, which
    `meaning` puts into words, such as "(D,)"."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.device != like.device:
        raise ValueError(f"{name} must be on {like_name}'s device {like.device}, got {x.device}")
    if dtype and x.dtype is not like.dtype:
        raise TypeError(f"{name} must have {like_name}'s dtype {like.dtype}, got {x.dtype}")
    if shape is not None and x.shape != shape:
        raise ValueError(f"{name} must have shape {meaning} = {tuple(shape)}, got {tuple(x.shape)}")


def check_eps(eps: float) -> None:
    if not 0.0 <= eps < math.inf:
        raise ValueError(f"eps must be finite and not negative, got {eps}")


def check_dropout(name: str, p: float) -> None:
    if not 0.0 <= p < 1.0:
        raise ValueError(f"{name} must be in [0, 1), got {p}")


def rows_per_sample(x: Tensor, row_scale: Tensor | None, name: str = "x") -> int:
    """How many rows of [..., D] -> [M, D] share one entry of row_scale (B,), after checking its shape; 1 without."""
    if row_scale is None:
        return 1
    if x.dim() < 2:
        raise ValueError(f"row_scale needs {name} with a batch dimension, got shape {tuple(x.shape)}")
    check_like("row_scale", row_scale, name, x, (x.shape[0],), "(B,)", dtype=False)
    return math.prod(x.shape[1:-1])
