"""Tell whether a model is as it was when graphs were captured: all that it contains, and where its tensors are."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from fastvit.blocks import unchanged
from fastvit.blocks.hooks import has_foreign_hooks
from fastvit.cuda_graphs.recorder import may_wait
from fastvit.ops.runtime.torch_private import StorageWeakRef, TensorGuards, is_any_autocast_enabled, storage_expired

# Types of values that cannot change, and of what graphs put on a model
OPAQUE = {
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    bytes,
    range,
    slice,
    type(...),
}


# Types whose members are compared, or cannot change
_COMPARED = {object, dict, OrderedDict, list, tuple, torch.Size, str, int, float, bytes}
_MANAGED_DICT = 1 << 4  # a flag of types: what objects have as __dict__ takes no room in them


class Version:
    """A model as it was at some time. It keeps neither the model nor its tensors alive.

    reason: why no graph can stand for the model, or None.
    """

    def __init__(self, model: nn.Module) -> None:
        self._same: dict[Any, Callable[..., bool]] = {}
        self._record, self.reason, compiled = None, None, unchanged.compiled()
        parameters, buffers, types = list(model.parameters()), list(model.buffers()), set[type]()
        record = None if compiled is None else compiled.record(model, OPAQUE, types)
        found = {} if record is None else unchanged.tensors_in(record)
        order = dict.fromkeys([*map(id, parameters), *map(id, buffers), *found])
        if compiled is None:
            self.reason = "there is no C compiler, without which changes of the model would not be seen"
        elif hidden := sorted(kind.__name__ for kind in types if not _is_compared(kind)):
            self.reason = f"the model holds a {hidden[0]}, which could change inside unseen"
        elif record is None or len(order) > len(found):
            self.reason = "the model holds more values than can be compared in every call"
        elif has_foreign_hooks(model):
            self.reason = "there are hooks on modules in it, which replays do not call"
        else:
            self._template, self._counts = (
                tuple([found[i] for i in order]),
                (len(parameters), len(parameters + buffers)),
            )
            tensors = compiled.recall(model, record, self._template, OPAQUE)
            self.reason = why_not(tensors)
        if self.reason is None:
            self._record = record
            self._addresses, self._state = [*map(Tensor.data_ptr, tensors)], _state_of(tensors)
            weak = StorageWeakRef if storage_expired else None
            self._memory = [weak(t.untyped_storage()) for t in tensors] if weak else []

    def tensors(self, model: nn.Module) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]] | None:
        """Return the model's parameters, its buffers and its other tensors, each once; None if the model contains
        something else than then, or if a tensor has moved, or now wants a gradient, or wants none any more."""
        if self._record is None:
            return None
        tensors = unchanged.compiled().recall(model, self._record, self._template, OPAQUE)
        try:
            if tensors is None or [*map(Tensor.data_ptr, tensors)] != self._addresses:
                return None
        except RuntimeError:  # swapped for a tensor without an address, such as a sparse one
            return None
        mode = torch.is_inference_mode_enabled(), is_any_autocast_enabled is None or is_any_autocast_enabled()
        if mode not in self._same or not self._same[mode](*tensors):
            if _state_of(tensors) != self._state:
                return None
            if TensorGuards is not None and tensors:  # compares in a fifth of the time, within one mode
                sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
                guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
                self._same[mode] = guards.check
        return tensors[: self._counts[0]], tensors[slice(*self._counts)], tensors[self._counts[1] :]

    def is_gone(self) -> bool:
        """Return whether memory of a tensor has been freed, so that no model can be of this version again."""
        return any(map(storage_expired, [memory.cdata for memory in self._memory]))


def _is_compared(kind: type) -> bool:
    """Return whether objects of a class have nothing but attributes and members: no slots, and no fields of C."""
    base = kind.__base__
    if kind is partial or kind in _COMPARED or base is None:
        return True
    has_dict = kind.__dictoffset__ != base.__dictoffset__ and not kind.__flags__ & _MANAGED_DICT
    size = base.__basicsize__ + 8 * (has_dict + (kind.__weakrefoffset__ > base.__weakrefoffset__))
    return base is not partial and kind.__basicsize__ == size and _is_compared(base)


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


def _state_of(tensors: Sequence[Tensor]) -> Any:
    return [*map(_read, tensors)], [*map(Tensor.stride, tensors)]


_version = operator.attrgetter("_version")


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return how often each was changed in place, as autograd counts; zeros if one is of inference mode, without a
    count."""
    try:
        return [*map(_version, tensors)]
    except RuntimeError:
        return [0] * len(tensors)


def marks_of(tensors: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
    """Return what changes with the value of each tensor: its version and, as changes by `.data` have none, a weighted
    sum of its elements."""
    return [*zip(versions_of(tensors), map(_weighted_sum, tensors), strict=True)]


def _weighted_sum(t: Tensor) -> Tensor:
    try:
        values = torch.view_as_real(t.detach()) if t.is_complex() else t.detach()
        values = values.float().nan_to_num().flatten()
    except RuntimeError:  # quantised, or of 4 bits
        return torch.zeros(())
    return (values * torch.linspace(1, 2, len(values), device=t.device)).sum(dtype=torch.float64)


def changes(before: Sequence[tuple[int, Tensor]], after: Sequence[tuple[int, Tensor]]) -> set[int]:
    """Return the numbers of the tensors whose marks differ. The host waits for them."""
    pairs = enumerate(zip(before, after, strict=True))
    with may_wait():
        return {i for i, ((v, a), (w, b)) in pairs if v != w or not torch.equal(a, b)}
