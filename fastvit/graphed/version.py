"""What graphs take for granted of a model: everything that it contains, and where its tensors are."""

from __future__ import annotations

import operator
import weakref
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

from fastvit.blocks import unchanged
from fastvit.blocks.hooks import has_foreign_hooks


class Version:
    """A model as it was at some time. It keeps neither the model nor its tensors alive.

    reason: why no graph can stand for the model, or None.
    """

    def __init__(self, model: nn.Module) -> None:
        parameters = list(model.parameters())
        tensors = [*parameters, *model.buffers()]
        compiled: Any = unchanged.compiled()
        self._record = None if compiled is None else compiled.record(model, True)
        self._count = len(parameters)
        self._references = [weakref.ref(t) for t in tensors]
        self._state = _state_of(tensors)
        self.reason = why_not(tensors)
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
            same = _state_of(tensors) == self._state
        except (AttributeError, TypeError):  # of None
            return None
        return (tensors[: self._count], tensors[self._count :]) if same else None

    def is_of(self, model: nn.Module) -> bool:
        """Return whether the model contains what it contained then."""
        return self._record is not None and unchanged.compiled().recall(model, self._record, True, True) is True


def why_not(tensors: list[Tensor]) -> str | None:
    """Return why graphs cannot use tensors of a model, or None."""
    for t in tensors:
        if type(t) not in (Tensor, Parameter):
            why = ": fully_shard (FSDP2) gathers parameters within every call" * (type(t).__name__ == "DTensor")
            return f"the model has a {type(t).__name__} as parameter or buffer{why}"
    return None


_wants_gradient = operator.attrgetter("requires_grad")


def _state_of(tensors: list[Tensor]) -> Any:
    return [*map(Tensor.data_ptr, tensors)], [*map(_wants_gradient, tensors)]
