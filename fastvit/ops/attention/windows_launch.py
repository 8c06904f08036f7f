"""Launch the kernels of attention within the windows of a grid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fastvit.ops.attention.launch import forward, launch_backward
from fastvit.ops.attention.mask_launch import launch_with_mask
from fastvit.ops.attention.window_layout import if_several, windows_of
from fastvit.ops.runtime.rows import empty_like


def attention_windows_fwd(
    qkv: Tensor, mask: Tensor | None, seed: Tensor | None, window: list[int], shift: list[int],
    shift_bias: float, scale: float, dropout_p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run the forward kernel on the windows of qkv (B, gh, gw, 3, H, d). Its tokens are read by one stride; grids whose
    rows do not follow each other are copied.

    Return o (B, gh, gw, H, d), and LSE as of attention, with windows for samples.
    """
    q, k, v = qkv.flatten(1, 2).unbind(2)
    windows = if_several(windows_of(qkv, window, shift, shift_bias))
    o, lse = forward(q, k, v, mask, seed, scale, dropout_p, False, windows)
    return o.view(*qkv.shape[:3], *o.shape[2:]).detach(), lse  # no view, as in aten.linear


def attention_windows_bwd(
    do: Tensor, qkv: Tensor, mask: Tensor | None, o: Tensor, lse: Tensor, seed: Tensor | None, window: list[int],
    shift: list[int], shift_bias: float, scale: float, dropout_p: float,
) -> Tensor:  # fmt: skip
    return _backward(launch_backward, do, qkv, mask, o, lse, seed, window, shift, shift_bias, scale, dropout_p)[0]


def attention_windows_bwd_with_mask(
    do: Tensor, qkv: Tensor, mask: Tensor, o: Tensor, lse: Tensor, seed: Tensor | None, window: list[int],
    shift: list[int], shift_bias: float, scale: float, dropout_p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _backward(launch_with_mask, do, qkv, mask, o, lse, seed, window, shift, shift_bias, scale, dropout_p)


def _backward(
    launch: Callable[..., Any], do: Tensor, qkv: Tensor, mask: Tensor | None, o: Tensor, lse: Tensor,
    seed: Tensor | None, window: list[int], shift: list[int], shift_bias: float, scale: float, dropout_p: float,
) -> tuple[Tensor, Any]:  # fmt: skip
    """Return dqkv, and what `launch` returns."""
    dqkv, windows = empty_like(qkv), if_several(windows_of(qkv, window, shift, shift_bias))
    q, k, v = qkv.flatten(1, 2).unbind(2)
    gradients = dqkv.flatten(1, 2).unbind(2)
    do, o = do.flatten(1, 2), o.flatten(1, 2)
    return dqkv, launch(do, q, k, v, mask, o, lse, seed, scale, dropout_p, False, gradients, windows)
