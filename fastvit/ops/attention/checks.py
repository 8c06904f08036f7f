"""The checks of attention's arguments, for its public functions, the block op and modules."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fastvit.ops.attention.groups import Relative
from fastvit.ops.runtime.checks import check_dropout, check_float, check_head_dim, check_like


def checked_scale(head_dim: int, scale: float | None, dropout_p: float, is_causal: bool = False) -> float:
    """Check the four; return the scale."""
    check_head_dim("head_dim", head_dim)
    check_causal(is_causal)
    if dropout_p != 0.0:
        check_dropout("dropout_p", dropout_p)
    if scale is None:
        return head_dim**-0.5
    if not -math.inf < scale < math.inf:  # isfinite takes no symbolic float
        raise ValueError(f"scale must be finite, got {scale}")
    return float(scale)


def check_keys(q: Tensor, k: Tensor, v: Tensor, *, dtype: bool) -> None:
    """Check k and v for q (B, M, H, d). dtype: whether they must have q's."""
    check_like("q", q, ("k", k, None, ""), ("v", v, None, ""), dtype=dtype)
    if k.shape == q.shape == v.shape:
        return
    B, M, H, d = q.shape
    N, heads = k.shape[1:3] if k.dim() == 4 else (0, 0)
    if k.shape != (B, N, heads, d) or heads == 0 or H % heads:
        raise ValueError(
            f"k must have shape (B, N, H, d) with q's B, d, and H or a divisor of it, got {tuple(k.shape)} for q's "
            f'{tuple(q.shape)}; layout="bhnd" takes (B, H, N, d)'
        )
    if N == 0 and M > 0:
        raise ValueError(f"k must have a token for q's {M} to attend to, got {tuple(k.shape)}")
    _check_values(k, v)


def check_keys_of_sequences(q: Tensor, k: Tensor, v: Tensor, *, own_tokens: bool, dtype: bool) -> None:
    """Check k and v for q (T, H, d). own_tokens: whether they have other tokens than q."""
    T, H, d = q.shape
    check_like("q", q, ("k", k, None, ""), ("v", v, None, ""), dtype=dtype)
    keys, heads = k.shape[:2] if k.dim() == 3 else (0, 0)
    tokens = "any T"
    if not own_tokens:
        keys, tokens = T, "q's T"
    if k.shape != (keys, heads, d) or heads == 0 or H % heads:
        raise ValueError(
            f"k must have shape (T, H, d) with {tokens}, q's d, and H or a divisor of it, got {tuple(k.shape)} for q's "
            f"{tuple(q.shape)}"
        )
    _check_values(k, v)


def _check_values(k: Tensor, v: Tensor) -> None:
    if v.shape != k.shape:
        raise ValueError(f"v must have k's shape {tuple(k.shape)}, got {tuple(v.shape)}")


def check_causal(is_causal: Any) -> None:
    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal must be a bool, got {is_causal!r}")


def check_unmasked(attn_mask: Tensor | None = None, is_causal: bool = False, *, of: str) -> None:
    """Check that there is no mask in a call with several sequences."""
    if attn_mask is not None or is_causal:
        raise ValueError(f"attn_mask must be None and is_causal False with {of}")


def checked_mask(
    mask: Any, x_name: str, x: Tensor, full: tuple[int, int, int, int], shape_name: str = "B, H, N, N"
) -> Tensor:
    """Check a mask for x; return it as (B or 1, H or 1, M or 1, N). full: B, H, M, N; shape_name: their names in an
    error."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"attn_mask must be a tensor or None, got {type(mask).__name__}")
    if mask.dtype is not torch.bool:
        check_float("attn_mask", mask)
    if mask.device != x.device:
        raise ValueError(f"attn_mask must be on {x_name}'s device {x.device}, got {mask.device}")
    shape = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    if len(shape) != 4 or any(have not in (1, want) for have, want in zip(shape, full, strict=True)):
        raise ValueError(f"attn_mask must be broadcastable to ({shape_name}) = {full}, got {tuple(mask.shape)}")
    return mask[(None,) * (4 - mask.dim())].expand(-1, -1, -1, full[3])


def checked_mask_of_sequences(
    mask: Any, x_name: str, x: Tensor, heads: int, longest: int, longest_k: int | None = None
) -> Tensor:
    """Check the mask that all sequences in x have; return it as `checked_mask` does. longest_k: of keys that have
    sequences of their own."""
    if longest_k is None:
        full, shape_name = (1, heads, longest, longest), "1, H, max_seqlen, max_seqlen"
    else:
        full, shape_name = (1, heads, longest, longest_k), "1, H, max_seqlen, max_seqlen_k"
    mask = checked_mask(mask, x_name, x, full, shape_name)
    if mask.requires_grad and torch.is_grad_enabled():
        raise ValueError("attn_mask must not require a gradient with cu_seqlens, got one that does")
    return mask


def check_lengths(name: str, x: Tensor, cu_seqlens: Any, max_seqlen: Any, which: str = "") -> int:
    """Check both for x (T, ...), on the device of the tensor of that name; return max_seqlen. which: "_k" for those of
    k."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        kind = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"cu_seqlens{which} must be a tensor of int32 or int64, got {kind}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens{which} must have shape (B + 1,) with B > 0, got {tuple(cu_seqlens.shape)}")
    if cu_seqlens.device != x.device:
        raise ValueError(f"cu_seqlens{which} must be on {name}'s device {x.device}, got {cu_seqlens.device}")
    if max_seqlen is None:
        return max(x.shape[0], 1)
    if not isinstance(max_seqlen, (int, torch.SymInt)) or isinstance(max_seqlen, bool):
        raise TypeError(f"max_seqlen{which} must be an integer or None, got {max_seqlen!r}")
    if max_seqlen < 1:
        raise ValueError(f"max_seqlen{which} must be at least 1, got {max_seqlen}")
    return max_seqlen  # type: ignore[return-value]


def check_windows(window: tuple[int, int], shift: tuple[int, int], shift_bias: float) -> None:
    if min(window) < 1:
        raise ValueError(f"window must be at least (1, 1), got {window}")
    if not all(0 <= by < side for by, side in zip(shift, window, strict=True)):
        raise ValueError(f"shift must be from (0, 0) to less than the window {window}, got {shift}")
    if not -math.inf <= shift_bias < math.inf:
        raise ValueError(f"shift_bias must be -inf or finite, got {shift_bias}")


# ---- relative positions ----

_WITHOUT = {"attn_mask": None, "is_causal": False, "shift": (0, 0), "dropout_p": 0.0}  # the kernels have none of these


def check_relative(relative: Any, q: Tensor, k: Tensor, *, dtype: bool, **options: Any) -> None:
    """Check relative positions for q (B, M, H, d) and k (B, N, H, d). dtype: whether they must have q's. options: those
    of the call."""
    _check_options(options)
    B, M, H, _ = q.shape
    _check_tensors(
        relative, "q", q, {name: ((B, M, H, None), f"(B, M, H, {name})") for name in Relative._fields}, dtype
    )
    (rows, columns), keys = (t.shape[3] for t in relative), k.shape[1]
    if rows * columns != keys:
        raise ValueError(
            f"relative must have as many rows times columns as k has tokens, {keys}, got {rows} * {columns}"
        )
    if k.shape[2] != q.shape[2]:
        raise ValueError(f"k must have q's {q.shape[2]} heads with relative, got {k.shape[2]}")


def check_relative_of_windows(
    relative: Any, qkv: Tensor, window: tuple[int, int], *, dtype: bool, **options: Any
) -> None:
    """Check relative positions for qkv (B, gh, gw, 3, H, d), as `check_relative` does."""
    _check_options(options)
    B, gh, gw, _, H, _ = qkv.shape
    wh, ww = window
    shapes = {
        "rows": ((B, gh, gw, H, wh), "(B, gh, gw, H, wh)"),
        "columns": ((B, gh, gw, H, ww), "(B, gh, gw, H, ww)"),
    }
    _check_tensors(relative, "qkv", qkv, shapes, dtype)
    if gh % wh or gw % ww:
        raise ValueError(f"window must divide qkv's grid ({gh}, {gw}) with relative, got {window}")


def _check_options(options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        allowed = _WITHOUT[name]
        if value is not allowed and (name == "attn_mask" or value != allowed):
            got = type(value).__name__ if name == "attn_mask" else repr(value)
            raise ValueError(f"{name} must be {allowed!r} with relative, got {got}")


def _check_tensors(
    relative: Any, x_name: str, x: Tensor, shapes: Mapping[str, tuple[tuple[int | None, ...], str]], dtype: bool
) -> None:
    """Check relative positions for x. shapes: those of the tensors by name, None for any size; and what they mean."""
    if not isinstance(relative, Relative):
        raise TypeError(f"relative must be an ops.Relative or None, got {type(relative).__name__}")
    for name, t in zip(Relative._fields, relative, strict=True):
        check_like(x_name, x, (f"relative.{name}", t, None, ""), dtype=dtype)
        shape, meaning = shapes[name]
        if t.dim() != len(shape) or any(want not in (None, have) for want, have in zip(shape, t.shape, strict=True)):
            sizes = ", ".join(name if size is None else str(size) for size in shape)
            raise ValueError(f"relative.{name} must have shape {meaning} = ({sizes}), got {tuple(t.shape)}")
