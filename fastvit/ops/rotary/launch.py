"""Launch the kernel of rotary positions."""

from __future__ import annotations

import torch
from torch import Tensor

from fastvit.kernels import _configs
from fastvit.kernels.rotary import rotary_kernel
from fastvit.ops.attention.launch import MAX_STRIDE, in_units, readable
from fastvit.ops.runtime import devices
from fastvit.ops.runtime.checks import empty_like
from fastvit.ops.runtime.dispatch import KernelUnsupported
from fastvit.ops.runtime.launch import cdiv, launch


def rotary(
    x: Tensor, sin: Tensor, cos: Tensor, rotated: int, interleaved: bool, transposed: bool, out: Tensor | None = None
) -> Tensor:
    """Launch the kernel. out: x itself, to write over it; prefix tokens and heads that are not rotated are then
    untouched."""
    if torch.float64 in (x.dtype, sin.dtype, cos.dtype):
        raise KernelUnsupported("float64")
    B, N, heads, d = x.shape
    P = N - sin.shape[2]
    first = 0
    if out is None:
        out = empty_like(x)
        x = readable(x)
    else:
        first, heads = P, rotated
    if x.numel() == 0 or first == N:
        return out
    sin, cos, table = readable_tables(sin, cos)
    unit, strides = in_units(x.shape, x.stride(), table, out.stride())
    cfg = _configs.heads(d, devices.arch(x))
    steps = B * cdiv(N - first, cfg.block_n) * heads
    launch(
        rotary_kernel, cfg.programs(steps, devices.multiprocessors(x.device.index)),
        (x, sin, cos, out), (N, P, first, heads, rotated, steps, len(sin), *strides),
        {"UNIT": unit, "HEAD_DIM": d, "HALF": cfg.half, "TABLE_HEADS": sin.shape[1],
         "INTERLEAVED": interleaved, "TRANSPOSED": transposed, "BLOCK_N": cfg.block_n, "STAGES": cfg.num_stages,
         "num_warps": cfg.num_warps, **_configs.register_limit(cfg.max_registers)},
    )  # fmt: skip
    return out


def readable_tables(sin: Tensor, cos: Tensor) -> tuple[Tensor, Tensor, tuple[int, int, int]]:
    """Return both tables (B or 1, H or 1, T, d), or copies with the same strides, and the strides of batch, token and
    head. An expanded dimension becomes 1, so that a program loads it once."""
    for dim in (0, 1):
        if sin.stride(dim) == cos.stride(dim) == 0:
            sin, cos = sin.narrow(dim, 0, 1), cos.narrow(dim, 0, 1)
    if sin.stride() != cos.stride() or sin.stride(3) != 1 or sin.stride(2) > MAX_STRIDE:
        sin, cos = sin.contiguous(), cos.contiguous()
    batch, head, token, _ = sin.stride()
    return sin, cos, (0 if len(sin) == 1 else batch, token, 0 if sin.shape[1] == 1 else head)
