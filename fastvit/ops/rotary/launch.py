"""Launch the kernel of rotary positions."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastvit.kernels import _configs
from fastvit.kernels.rotary import rotary_kernel
from fastvit.ops.attention.softmax_launch import MAX_STRIDE, readable
from fastvit.ops.attention.workload import in_units
from fastvit.ops.runtime import device
from fastvit.ops.runtime.backend import KernelUnsupported
from fastvit.ops.runtime.launch import Launch, cdiv
from fastvit.ops.runtime.rows import empty_like


def rotary(
    x: Tensor, sin: Tensor, cos: Tensor, rotated: int, interleaved: bool, transposed: bool, *, out: Tensor | None = None
) -> Tensor:
    """Launch the kernel. out: x itself, to write over it; prefix tokens and heads that are not rotated are then
    untouched."""
    in_place = out is not None
    if out is None:
        out = empty_like(x)
        x = readable(x)
    sin, cos = readable_tables(sin, cos)
    launch = _launch(x, sin, cos, out, rotated, interleaved, transposed, in_place)
    launch(x, sin, cos, out)
    return out


def _launch(
    x: Tensor, sin: Tensor, cos: Tensor, out: Tensor, rotated: int, interleaved: bool, transposed: bool, in_place: bool
) -> Launch:
    if torch.float64 in (x.dtype, sin.dtype, cos.dtype):
        raise KernelUnsupported("float64")
    B, N, heads, d = x.shape
    P = N - sin.shape[2]
    first = 0
    if in_place:
        first, heads = P, rotated
    tables = tables_as_read(sin)
    unit, strides = in_units(x.shape, x.stride(), tables.strides, out.stride())
    cfg = _configs.heads(d, device.arch(x))
    steps = B * cdiv(N - first, cfg.block_n) * heads
    return Launch(
        rotary_kernel, cfg.programs(steps, device.multiprocessors(x.device.index)) if steps else 0,
        (N, P, first, heads, rotated, steps, tables.samples, *strides),
        {"UNIT": unit, "HEAD_DIM": d, "HALF": cfg.half, "TABLE_HEADS": tables.heads,
         "INTERLEAVED": interleaved, "TRANSPOSED": transposed, "BLOCK_N": cfg.block_n, "STAGES": cfg.num_stages,
         "num_warps": cfg.num_warps, **_configs.register_limit(cfg.max_registers)},
    )  # fmt: skip


def readable_tables(sin: Tensor, cos: Tensor) -> Any:
    """Return both tables (B or 1, H or 1, T, d) as a kernel reads them: copies, unless their strides are equal."""
    if sin.stride() != cos.stride() or sin.stride(3) != 1 or sin.stride(2) > MAX_STRIDE:
        for dim in (0, 1):  # one copy of what is expanded in both
            if sin.stride(dim) == cos.stride(dim) == 0:
                sin, cos = sin.narrow(dim, 0, 1), cos.narrow(dim, 0, 1)
        return sin.contiguous(), cos.contiguous()
    return sin, cos


class Tables(NamedTuple):
    """How a kernel reads the tables of positions. An expanded dimension counts as 1, so that a program loads it once.

    samples, heads: B or 1, H or 1.
    strides: of batch, token and head; 0 for a dimension of 1.
    """

    samples: int
    heads: int
    strides: tuple[int, int, int]


def tables_as_read(sin: Tensor) -> Tables:
    batch, head, token, _ = sin.stride()
    samples, heads = 1 if batch == 0 else sin.shape[0], 1 if head == 0 else sin.shape[1]
    return Tables(samples, heads, (0 if samples == 1 else batch, token, 0 if heads == 1 else head))
