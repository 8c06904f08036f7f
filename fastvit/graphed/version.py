"""Tell whether a model is as it was when graphs were captured: all that it contains, and where its tensors are."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from fastvit.blocks import unchanged
from fastvit.blocks.hooks import has_foreign_hooks
from fastvit.ops.runtime.torch_private import TensorGuards, is_any_autocast_enabled

# Types of values that cannot change, and of what graphs put on a model
OPAQUE = {
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    bytes,
    complex,
    range,
    slice,
    type(...),
    weakref.ref,
}


class Version:
    """A model as it was at some time. It keeps neither the model nor its tensors alive.

    model: whose tensors `why_not` takes.
    reason: why no graph can stand for the model, or None.
    """

    def __init__(self, model: nn.Module) -> None:
        parameters = list(model.parameters())
        tensors = [*parameters, *model.buffers()]
        compiled: Any = unchanged.compiled()
        self._record = None if compiled is None else compiled.record(model, OPAQUE)
        self._count = len(parameters)
        self._references = [weakref.ref(t) for t in tensors]
        self._addresses, self._state = [*map(Tensor.data_ptr, tensors)], _state_of(tensors)
        self._same: dict[Any, Callable[..., bool]] = {}
        self.reason = None
        if compiled is None:
            self.reason = "there is no C compiler, without which changes of the model would not be seen"
        elif self._record is None:
            self.reason = "the model holds more values than can be compared in every call"
        elif has_foreign_hooks(model):
            self.reason = "there are hooks on modules in it, which replays do not call"

    def tensors(self) -> tuple[list[Tensor], list[Tensor]] | None:
        """Return the model's parameters and buffers, each once; None if one of them is gone or has moved, or now wants
        a gradient, or wants none any more."""
        tensors: list[Any] = [reference() for reference in self._references]
        try:
            if [*map(Tensor.data_ptr, tensors)] != self._addresses:
                return None
        except TypeError:  # of None: it is gone
            return None
        mode = torch.is_inference_mode_enabled(), is_any_autocast_enabled is None or is_any_autocast_enabled()
        if mode not in self._same or not self._same[mode](*tensors):
            if _state_of(tensors) != self._state:
                return None
            if TensorGuards is not None and tensors:  # compares in a fifth of the time, within one mode
                sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
                guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
                self._same[mode] = guards.check
        return tensors[: self._count], tensors[self._count :]

    def is_of(self, model: nn.Module) -> bool:
        """Return whether the model contains what it contained then."""
        return self._record is not None and unchanged.compiled().recall(model, self._record, True, OPAQUE) is True


def why_not(tensors: Sequence[Tensor], of: str = "the model has") -> str | None:
    """Return why graphs cannot use tensors, or None. of: whose they are, for the message."""
    for t in tensors:
        if type(t) not in (Tensor, Parameter):
            why = ": fully_shard (FSDP2) gathers parameters within every call" * (type(t).__name__ == "DTensor")
            return f"{of} a {type(t).__name__}{why}"
        if t.layout is not torch.strided or t.is_nested:
            return f"{of} a sparse or nested tensor"
        if t.device != tensors[0].device:
            return f"{of} tensors on several devices"
    return None


_read = operator.attrgetter("requires_grad", "dtype", "shape")


def _state_of(tensors: list[Tensor]) -> Any:
    return [*map(_read, tensors)], [*map(Tensor.stride, tensors)]
