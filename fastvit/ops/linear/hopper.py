"""Choose and configure the kernels of linear_hopper.py, for Hopper GPUs."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from torch import Tensor

from fastvit.kernels import _configs
from fastvit.ops.runtime import device
from fastvit.ops.runtime.launch import Launch, cdiv, has_gluon

ROWS = COLUMNS = 128  # of a tile


def takes(x: Tensor, n: int, *others: Tensor | None, scales: bool = False) -> bool:
    """Return whether these kernels multiply x [..., K] @ [K, n]: where they were measured faster.

    others: the weight, and what the result's dtype depends on. scales: as in `takes_turns`.
    """
    if not has_gluon() or x.element_size() != 2 or any(t is not None and t.dtype is not x.dtype for t in others):
        return False
    k = x.shape[-1]
    m = x.numel() // k
    # rows are at multiples of 16 bytes, and coordinates have 32 bits
    return n % 8 == k % 8 == 0 and m < 1 << 30 and _configs.takes_turns(m, n, k, scales, device.arch(x))


def launch(
    x: Tensor, n: int, numbers: tuple[int, ...], activation: str, today: Launch, backward: bool = False
) -> Launch:
    """Return the launch that takes the place of `today`, which is left to addresses that are not multiples of 16."""
    module = _module()
    programs = min(cdiv(numbers[0], ROWS) * cdiv(n, COLUMNS), device.multiprocessors(x.device.index))
    constants = {"ACTIVATION": activation, **module.OPTIONS}
    return Launch(_kernel(module, backward), programs, numbers, constants, unaligned=today)


def _module() -> Any:
    """Return the kernels' module. Gluon is loaded where it is used."""
    return importlib.import_module("fastvit.kernels.linear_hopper")


@functools.cache
def _kernel(module: Any, backward: bool) -> Any:
    described = importlib.import_module("fastvit.ops.runtime.described").Described
    if backward:
        return described(module.linear_dact_hopper_kernel, module.BACKWARD_BOXES)
    return described(module.linear_fwd_hopper_kernel, module.FORWARD_BOXES)
