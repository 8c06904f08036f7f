"""Fixed position embeddings, learnt ones for another patch grid, and patch embeddings for another patch size."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastvit.ops.runtime.torch_private import len_torch_dispatch_stack

Resize = Callable[[Tensor, tuple[int, int]], Tensor]

FIXED = ("sincos", "sincos2d")

_made_tables: dict[Any, Tensor] = {}
_captured: list[Tensor] = []  # what CUDA graphs read when they are replayed
_MOST = 128  # tables; of 1,024 tokens and 64 channels 32 MB


def remembered(
    key: Any, device: torch.device, make: Callable[[], Tensor], made: dict[Any, Tensor] = _made_tables
) -> Tensor:
    """Return make() on a device, made once for a key while that is among the last used: a table that depends on no
    parameter. Neither trained nor edited parameters make it stale. made: what is kept, the last used last."""
    in_mode = len_torch_dispatch_stack is not None and len_torch_dispatch_stack()
    if torch.compiler.is_compiling() or in_mode:  # a mode of fake tensors takes no kept table
        return make()
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    table = made.pop(key, None)
    if table is None:
        if capturing:  # the graph makes it in every replay
            return make()
        with torch.inference_mode(False), torch.no_grad():
            table = make() if device.type != "cuda" else _finished(device, make)
        if type(table) is not Tensor:  # a fake tensor must not outlive its mode
            return table
        if len(made) >= _MOST:
            made.pop(next(iter(made)), None)
    made[key] = table
    if capturing:
        _captured.append(table)
    elif device.type == "cuda":
        table.record_stream(torch.cuda.current_stream(device))  # its memory is free when this stream has read it
    return table


def _finished(device: torch.device, make: Callable[[], Tensor]) -> Tensor:
    """Return make() when the GPU has made it, so that all streams and threads may use it. It is made on a stream of its
    own: only that is waited for, not the work of the caller's stream."""
    stream = _stream(device)
    with torch.cuda.stream(stream):
        made = make()
    stream.synchronize()
    return made


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def antialiased(image: Tensor, grid: tuple[int, int]) -> Tensor:
    """Interpolate (1, D, h, w) -> (1, D, *grid), like timm, open_clip, and DINOv2 with registers."""
    return F.interpolate(image, size=grid, mode="bicubic", antialias=True)


def fixed_positions(kind: str, dim: int, grid: tuple[int, int], num_prefix_tokens: int, device: torch.device) -> Tensor:
    """Compute a table of sines and cosines for P prefix tokens and the n patches of a grid, row by row: (1, P + n, D).

    It is in float64, because the angles of distant patches lose digits in float32, which MPS alone uses. Of F
    frequencies the i-th, from 0, is 10000^(-i / F).

    Args:
        kind: "sincos" (Vaswani et al. 2017, arXiv:1706.03762, section 3.5): the token at position p, prefix tokens
            included, has sin and cos of p times each of D/2 frequencies, in turn: sin, cos, sin, cos, ...
            "sincos2d" (He et al. 2021, arXiv:2111.06377, in MAE's order): D/4 frequencies for each axis. The first half
            of the channels has the sines and then the cosines of the column, the second half those of the row; prefix
            tokens have zeros. `timm.layers.build_sincos2d_pos_embed` has the same numbers in the order sine of the
            row, sine of the column, cosine of the row, cosine of the column.
        dim: D, a multiple of 2 for "sincos" and of 4 for "sincos2d".
    """
    # MPS has no float64
    where: dict[str, Any] = {"device": device, "dtype": torch.float32 if device.type == "mps" else torch.float64}

    def angles(steps: int, count: int) -> Tensor:
        """(steps, count)"""
        frequencies = 10000.0 ** (-torch.arange(count, **where) / count)
        return torch.arange(steps, **where)[:, None] * frequencies

    P = num_prefix_tokens
    if kind == "sincos":
        along = angles(P + math.prod(grid), dim // 2)
        return torch.stack((along.sin(), along.cos()), dim=-1).flatten(1)[None]
    h, w = grid
    row, column = (torch.cat((a.sin(), a.cos()), dim=1) for a in (angles(h, dim // 4), angles(w, dim // 4)))
    patches = torch.cat((column.repeat(h, 1), row.repeat_interleave(w, dim=0)), dim=1)
    return F.pad(patches, (0, 0, P, 0))[None]


def resample_abs_pos_embed(
    pos_embed: Tensor,
    grid: tuple[int, int],
    old_grid: tuple[int, int],
    num_prefix_tokens: int = 1,
    resize: Resize = antialiased,
) -> Tensor:
    """Interpolate positions (1, P + h*w, D) to another patch grid, (1, P + h'*w', D), as timm and Dosovitskiy et al.
    (2021, section 3.2): in float32, by default bicubic and antialiased, the P prefix rows unchanged. Differentiable."""
    if grid == old_grid:
        return pos_embed
    prefix, patches = pos_embed[:, :num_prefix_tokens], pos_embed[:, num_prefix_tokens:]
    image = resize(patches.float().unflatten(1, old_grid).permute(0, 3, 1, 2), grid)
    return torch.cat([prefix, image.flatten(2).transpose(1, 2).to(pos_embed.dtype)], dim=1)


def resample_patch_embed(weight: Tensor, patch_size: tuple[int, int]) -> Tensor:
    """Resample weights (..., h, w) to another patch size, (..., h', w'), in float32 or wider.

    The new weights' products with a resized patch equal the old weights' products with the original patch (Beyer et al.
    2022, arXiv:2212.08013, section 3.4); for smaller patches they are the closest possible."""
    h, w = weight.shape[-2:]
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    pixels = torch.eye(h * w, dtype=wide.dtype, device=wide.device).view(1, h * w, h, w)
    resized = antialiased(pixels, patch_size)[0].flatten(1)  # (h * w, h' * w')
    return (wide.flatten(-2) @ torch.linalg.pinv(resized).T).unflatten(-1, patch_size).to(weight.dtype)
