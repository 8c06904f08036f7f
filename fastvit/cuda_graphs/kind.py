"""Kinds of calls: what a graph depends on, and what is known of the calls that agree in it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fastvit.cuda_graphs.captured import Arena, Captured
from fastvit.cuda_graphs.recorder import Unfit
from fastvit.cuda_graphs.rounding import Leaves
from fastvit.ops.runtime import backend
from fastvit.ops.runtime.device import float32_precision

WARM_UPS = 2  # calls before a capture
_CONSTANTS = bool, int, float, str, bytes, torch.dtype, torch.device, torch.memory_format, Enum, type


@dataclass
class Kind:
    """A kind of calls, and what is known of it.

    forwards: how many calls there were before the capture.
    calls: how many of them count: in training, those that have had a backward pass.
    gradients: numbers of the outputs that gradients came for in the last backward pass.
    later: for each output of that call the numbers of those that are computed from it.
    settled: whether a replayed call, whose outputs are no functions of each other, has had a backward pass.
    buffers: numbers of the model's buffers that the forward pass changes.
    draws: whether the forward pass draws random numbers.
    rows_are_independent: whether more rows leave the first ones as they are; None: not known.
    reason: why there will be no capture, or "".
    hooks: on the outputs of the last call.
    captured: its graphs in each arena.
    """

    forwards: int = 0
    calls: int = 0
    gradients: set[int] = field(default_factory=set)
    later: list[set[int]] = field(default_factory=list)
    settled: bool = False
    buffers: set[int] = field(default_factory=set)
    draws: bool = False
    rows_are_independent: bool | None = None
    reason: str = ""
    hooks: list[Any] = field(default_factory=list)
    captured: dict[Arena, Captured] = field(default_factory=dict)

    def is_warm(self, wants: bool) -> bool:
        return self.calls >= WARM_UPS and bool(self.gradients or not wants)

    def read(self, came: set[int]) -> None:
        """Note for which outputs of a replayed call gradients came, the first time. In the calls before, those that
        flow from one output to another within the model counted, too: the next call is captured without them."""
        if not self.settled and came <= self.gradients and all(self.later[i] & came for i in self.gradients - came):
            self.gradients = came
        self.settled = True

    def gradient_came(self, came: set[int], later: list[set[int]], number: int) -> None:
        """Note that a gradient came for an output. came: for which outputs of this call one did. later: of this
        call."""
        if not came:  # the first one
            self.calls, self.gradients, self.later = self.calls + 1, came, later
        came.add(number)
        if torch.is_grad_enabled():
            self.reason = "gradients of gradients are wanted (create_graph)"


def is_constant(value: Any) -> bool:
    """Return whether a value cannot change."""
    return value is None or isinstance(value, _CONSTANTS) or inspect.isfunction(value)


def described(leaves: Leaves, wants: bool) -> list[Any]:
    """Return what graphs depend on of each argument."""
    described: list[Any] = []
    sizes = iter(leaves.sizes)
    for v in leaves.values:
        if isinstance(v, Tensor):
            size = next(sizes)
            shape = v.shape if size is None else (size, *v.shape[1:])
            described.append((shape, v.stride(), v.dtype, (v.requires_grad, v.is_leaf) if wants else None))
        else:
            if not is_constant(v):
                raise Unfit(f"an argument is a {type(v).__name__}")
            described.append((type(v), v.hex() if isinstance(v, float) else v))  # 0.0 and -0.0 are equal
    return described


def circumstances(device: str) -> tuple[Any, ...]:
    """Return what else a graph depends on."""
    autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled()
    numbers = torch.get_default_dtype(), float32_precision(), torch.are_deterministic_algorithms_enabled()
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return *modes, *autocast, *numbers, backend.settings(), ddp_runs()


def ddp_runs() -> bool:
    """Return whether a DistributedDataParallel calls the model."""
    return getattr(DistributedDataParallel, "_active_ddp_module", None) is not None
