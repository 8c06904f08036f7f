"""Choose and configure attention's kernels for Hopper GPUs."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fastvit.kernels import _attention_hopper_configs as configs
from fastvit.kernels._attention_hopper_configs import ROWS, HopperConfig, attention_bwd_hopper, attention_hopper
from fastvit.ops.attention.workload import Call, Workload
from fastvit.ops.runtime import device
from fastvit.ops.runtime.launch import Constants, Launch, has_gluon


def launch(q: Tensor, k: Tensor, v: Tensor, heads: int, workload: Workload, scale: float, today: Launch) -> Launch:
    """Return the launch that takes the place of `today`, or `today` where there is none.

    q, k, v: (B, N, H, d). heads: of all samples.
    """
    if not _is_candidate(workload) or not all(map(_is_describable, (q, k, v))):
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


def launch_backward(
    strided: tuple[Tensor, ...], call: Call, scale: float, today: Callable[..., object]
) -> Launch | None:
    """Return the launch of q, k, v, o, do, lse, None, dq, dk and dv that computes all gradients, or None where there is
    none. strided: q, k, v, o, do, dq, dk, dv. today: takes the same tensors."""
    heads, strides, _, workload = call
    if not _is_candidate(workload) or workload.unit != 8:
        return None
    multiprocessors = device.multiprocessors(strided[0].device.index)
    config = attention_bwd_hopper(workload.keys, workload.head_dim, heads / multiprocessors)
    if config is None or not all(map(_is_describable, strided)):
        return None
    kernel, constants = _backward_kernel(*config)
    numbers = workload.keys, strided[0].shape[2], heads, *strides, scale
    return Launch(kernel, min(heads, multiprocessors), numbers, constants, unaligned=today)


def _is_candidate(workload: Workload) -> bool:
    is_plain = workload.kind == "" and workload.itemsize == 2 and not workload.has_dropout
    return is_plain and workload.arch == "sm_90" and has_gluon()


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
        tile = 1, 1, configs.BLOCK_N, head_dim
        kernel = described(_module_kernel(False), [queries, tile, tile, *others])
        tails = {"TAIL_0": config.keys[0], "TAIL_1": config.keys[1]}
        registers = 168 if config.groups == 2 else 128
        constants = {"GROUPS": config.groups, "SLOTS": config.slots, **tails, "maxnreg": registers}
    return kernel, {"HEAD_DIM": head_dim, **constants, "num_warps": 4}


@functools.cache
def _backward_kernel(full: int, tail: int) -> tuple[Any, Constants]:
    described = importlib.import_module("fastvit.ops.runtime.described").Described
    module = importlib.import_module("fastvit.kernels.attention_hopper_bwd")
    tile, narrow, keys = [(1, 1, rows, 64) for rows in (ROWS, tail or 16, configs.BLOCK_N)]
    boxes = [tile, narrow, keys, keys, None, tile, narrow, None, None, None, tile, narrow, tile, tile]
    takes = [0, 0, 1, 2, 3, 4, 4, 4, 5, 6, 7, 7, 8, 9]
    constants = {
        "FULL": full, "TAIL": tail > 0, "REGISTERS": configs.REGISTERS, "DQ_REGISTERS": configs.DQ_REGISTERS,
        "num_warps": 4, "maxnreg": 128,
    }  # fmt: skip
    return described(module.attention_bwd_hopper_kernel, boxes, takes), constants


def _module_kernel(is_short: bool) -> Any:
    if is_short:
        return importlib.import_module("fastvit.kernels.attention_hopper_short").attention_fwd_short_hopper_kernel
    return importlib.import_module("fastvit.kernels.attention_hopper_long").attention_fwd_long_hopper_kernel
