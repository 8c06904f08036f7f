"""Choose and configure attention's kernels for Hopper GPUs."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from torch import Tensor

from fastvit.kernels._attention_hopper_configs import BLOCK_N, ROWS, HopperConfig, attention_hopper
from fastvit.ops.attention.workload import Workload
from fastvit.ops.runtime import device
from fastvit.ops.runtime.launch import Constants, Launch, has_gluon


def launch(q: Tensor, k: Tensor, v: Tensor, heads: int, workload: Workload, scale: float, today: Launch) -> Launch:
    """Return the launch that takes the place of `today`, or `today` where there is none.

    q, k, v: (B, N, H, d). heads: of all samples.
    """
    is_plain = workload.kind == "" and workload.itemsize == 2 and not workload.has_dropout
    if not (is_plain and workload.arch == "sm_90" and has_gluon() and all(map(_is_describable, (q, k, v)))):
        return today
    multiprocessors = device.multiprocessors(q.device.index)
    N, H = workload.keys, q.shape[2]
    config = attention_hopper(N, workload.head_dim, heads / multiprocessors)
    if config is None:
        return today
    kernel, constants = _kernel(config, workload.head_dim)
    strides = *q.stride()[:3], *k.stride()[:3], *v.stride()[:3]
    work = heads * config.tiles if config.groups else heads
    sizes = (N, H, work, config.tiles) if config.groups else (N, H, work)
    return Launch(kernel, min(work, multiprocessors), (*sizes, *strides, scale), constants, unaligned=today)


def _is_describable(t: Tensor) -> bool:
    """Return whether TMA takes a tensor of 16 bits: strides are multiples of 16 bytes, and not 0."""
    return all(n == 1 or (stride > 0 and stride % 8 == 0) for n, stride in zip(t.shape[:3], t.stride(), strict=False))


@functools.cache
def _kernel(config: HopperConfig, head_dim: int) -> tuple[Any, Constants]:
    """Return a kernel and its constants. Gluon is loaded where it is used. maxnreg: a thread's share of all registers;
    the kernel gives most of them to the groups that compute."""
    described = importlib.import_module("fastvit.ops.runtime.described").Described
    queries = 1, 1, ROWS, head_dim
    others = None, None, None, None, queries, None  # mask, bounds of sequences, seed, o, LSE
    if config.groups == 0:
        absent = 3 - len(config.keys)  # parts take the mask, which is None
        keys = [(1, 1, width, head_dim) for width in config.keys] + [None] * absent
        takes = [0, *[1, 1, 1][absent:], *[3] * absent, *[2, 2, 2][absent:], *[3] * absent, *range(3, 9)]
        kernel = described(_module_kernel(True), [queries, *keys, *keys, *others], takes)
        constants = {"PARTS": len(config.keys), "TILES": config.tiles, "maxnreg": 168}
    else:
        tile = 1, 1, BLOCK_N, head_dim
        kernel = described(_module_kernel(False), [queries, tile, tile, *others])
        tails = {"TAIL_0": config.keys[0], "TAIL_1": config.keys[1]}
        registers = 168 if config.groups == 2 else 128
        constants = {"GROUPS": config.groups, "SLOTS": config.slots, **tails, "maxnreg": registers}
    return kernel, {"HEAD_DIM": head_dim, **constants, "num_warps": 4}


def _module_kernel(is_short: bool) -> Any:
    if is_short:
        return importlib.import_module("fastvit.kernels.attention_hopper_short").attention_fwd_short_hopper_kernel
    return importlib.import_module("fastvit.kernels.attention_hopper_long").attention_fwd_long_hopper_kernel
