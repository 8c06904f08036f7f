"""How a call of an op lives: first, recorded, replayed.

At batch 1 the host takes longer to prepare a call than a GPU to run it: checks, launch configurations, strides, grids,
allocations, views. So like calls are prepared once.

1. The first call of its kind runs in Python.
2. The second is recorded while it runs in Python (record.py).
3. All later ones are replayed in C (replay.c): the same allocations, views, calls of PyTorch's functions and launches,
   on other tensors. What cannot be recorded runs in Python every time; with FASTVIT_REPLAY=0, or within
   `use_backend(..., replay=False)`, everything does.

`run.py` does this for a public op, from its arguments to its results; `Call.run` for a function of tensors:

    call, _ = begin("backward of linear", inputs, (options,))
    gradients = call.run(function, inputs)

Two calls are alike if op, route and options are equal, their types included, and grad mode, autocast's dtype and the
precision of float32 matmuls; and if their tensors have the same classes, dtypes, devices, shapes, strides,
requires_grad and dispatch keys, and are repeated at the same indices. Nothing is kept of a call on the dispatcher's
route, and no tensor of any call. Without a C compiler nothing is kept.

So what is kept cannot be stale: all that a call decides follows from what is compared. It may also depend on what a
launch means in tests and plans of memory: when that changes, everything is forgotten. Addresses are looked at in every
call.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fastvit.ops.runtime import backend
from fastvit.ops.runtime.backend import (
    Route,
    fall_back,
    has_lazy_values,
    is_observed,
    is_on_current_device,
    wants_triton,
)
from fastvit.ops.runtime.device import float32_precision
from fastvit.ops.runtime.dtypes import autocast_dtype
from fastvit.ops.runtime.record import Function, Recorder, Replay, available
from fastvit.ops.runtime.torch_private import TensorGuards, is_any_autocast_enabled, unwrap_if_dead

Key = tuple[Any, ...]
Alike = Callable[..., bool]  # whether tensors are like those of the recorded call


class Call:
    """A call on a route.

    replay: (tensors) -> results, or None, with the list as it was, for tensors that it does not take; or it is None,
        for a call that runs in Python. It may empty the list.
    single: whether the caller wants the first result alone.
    is_plain: whether its tensors are known to have memory of their own.
    """

    __slots__ = ("is_plain", "replay", "route", "single")

    def __init__(
        self, route: Route, replay: Replay | None = None, *, single: bool = False, is_plain: bool = False
    ) -> None:
        self.route = route
        self.replay = replay
        self.single = single
        self.is_plain = is_plain

    def run(self, function: Function, inputs: list[Any]) -> tuple[Any, ...]:
        """Return function(inputs), a tuple of tensors and None that depends on the inputs and on what `begin` compares.
        The function may empty the list, so that memory that nobody else holds is freed early."""
        replayed = None if self.replay is None else self.replay(inputs)
        return function(inputs) if replayed is None else replayed


class RecordedCall(Call):
    """The second call of its kind."""

    __slots__ = ("_kept", "_key", "_signature")

    def __init__(self, route: Route, key: Key, signature: tuple[Any, ...]) -> None:
        super().__init__(route, is_plain=True)
        self._key = key
        self._signature = signature
        self._kept = _kept  # may be forgotten before the call has succeeded

    def run(self, function: Function, inputs: list[Any]) -> tuple[Any, ...]:
        recorder = Recorder(inputs)
        with recorder:
            outputs = function(inputs)
        self.keep(recorder.plan(outputs))
        return outputs

    def keep(self, replay: Replay | None, *, single: bool = False) -> None:
        """Let later calls be replayed, or run in Python for None."""
        if len(self._kept) >= _MOST:
            self._kept.clear()
        later = Call(self.route, replay, single=single, is_plain=True)
        self._kept[self._key] = (*self._kept.get(self._key, ()), (*self._signature, later))


UNKEPT = {route: Call(route) for route in Route}
_DISPATCHED: tuple[Call, list[Any]] = UNKEPT[Route.DISPATCHER], []

_MOST = 4096  # keys; then all calls are forgotten
_MOST_ALIKE = 32  # calls of one key, some 20 KB each; others run in Python
_MOST_TENSORS = 64  # of a call that is kept, as in replay.c
# (op, shape of the first tensor) -> calls: patterns of arguments and options, settings, guards, and what later calls
# are. `find` of replay.c looks it up.
_kept: dict[Key, tuple[tuple[Any, Key, Key, Alike, Call], ...]] = {}
_VALUES = frozenset({bool, int, float, str, type(None), torch.dtype, type})  # the same where they are equal
_TENSORS = frozenset({Tensor, Parameter, type(None)})  # no subclass such as a fake, a distributed or a tracer's


def _no_launches() -> bool:
    return False


launches_are_watched: Callable[[], bool] = _no_launches  # `launch.py`, once imported, asks Triton's hooks


def begin(op: str, arguments: tuple[Any, ...], options: Key = ()) -> tuple[Call, list[Any]]:
    """Begin a call: choose its route, and find what is kept of calls like it. Also return its tensors, if it is
    recorded or replayed.

    The route is that of `backend.choose_route`, but under autocast a call that runs kernels stays on the Triton route,
    because ops cast their inputs themselves.

    Args:
        arguments: tensors, None, plain values, and tuples and lists of these; one at least is a tensor, and the first
            of them is x. Arguments of other kinds go by the dispatcher's route, and the op's checks see them.
        options: plain values, or tuples of them.
    """
    if is_observed():
        return _DISPATCHED
    if _module is not None and backend.replays:
        found: tuple[Call, list[Any]] | None = _module.find(_kept, op, arguments, options, _settings)
        if found is not None:
            return found
    return _unknown(op, arguments, options)


def _settings(x: Tensor) -> Key | None:
    """Return what a call depends on beside its arguments, whether it runs on Triton first; None where the dispatcher
    has to see it."""
    if type(x) not in _TENSORS or not (x.is_cuda or x.is_cpu):
        return None
    if wants_triton(x):
        if x.is_cuda and not is_on_current_device(x):
            return None
        cast = autocast_dtype(x) if is_any_autocast_enabled() else None
        return True, torch.is_grad_enabled(), launches_are_watched(), float32_precision(), cast
    return None if is_any_autocast_enabled() else (False, torch.is_grad_enabled())


def _unknown(op: str, arguments: tuple[Any, ...], options: Key) -> tuple[Call, list[Any]]:
    """Begin a call of which nothing is kept."""
    global _module
    tensors: list[Any] = []
    try:
        pattern = tuple, *[_pattern(a, tensors) for a in arguments]
        if not tensors:
            return _DISPATCHED
        if any(t.layout is not torch.strided for t in tensors):
            if wants_triton(tensors[0]):
                fall_back(op, "a tensor has no strides")
            return UNKEPT[Route.ATEN], []
        settings, shape = _settings(tensors[0]), tensors[0].shape
    except (AttributeError, TypeError, RuntimeError):  # RuntimeError: from a nested tensor, which has no shape
        return _DISPATCHED
    if settings is None:
        return _DISPATCHED
    route = Route.TRITON if settings[0] else Route.ATEN
    if route is Route.TRITON and has_lazy_values(tensors):
        return _DISPATCHED
    if unwrap_if_dead is not None and any(unwrap_if_dead(t) is not t for t in tensors):
        return _DISPATCHED  # it knows what is in the wrapper of a functorch transform that has ended
    key = op, shape
    in_python: tuple[Call, list[Any]] = UNKEPT[route], []
    if not backend.replays or unwrap_if_dead is None or TensorGuards is None:
        return in_python
    if route is Route.TRITON and launches_are_watched():
        return in_python
    if len(tensors) > _MOST_TENSORS or len(_kept.get(key, ())) >= _MOST_ALIKE:
        return in_python
    of_options: list[Any] = []
    try:
        pattern_of_options = _pattern(options, of_options)
        was_seen = _was_seen(hash((key, options, settings)))
    except TypeError:
        return in_python
    if of_options or not was_seen:  # the value of a tensor may change
        return in_python
    _module = available()
    if _module is None:
        return in_python
    return RecordedCall(route, key, (pattern, pattern_of_options, settings, _guards(tensors))), tensors


_module: Any = None  # of replay.c, from the first call that is recorded


def _pattern(argument: Any, tensors: list[Any]) -> Any:
    """Return what `find` compares an argument with, and append its tensors to the list."""
    kind = type(argument)
    if kind in _TENSORS:
        tensors.extend([argument] * (argument is not None))
        return kind
    if isinstance(argument, tuple | list):
        return kind, *[_pattern(a, tensors) for a in argument]
    if kind in _VALUES:
        return [argument]
    raise TypeError(f"{kind.__name__} is neither a tensor nor a plain value")


_seen: set[int] = set()  # hashes of keys


def _was_seen(key: int) -> bool:
    """Return whether a call with this hash was seen before. A call that never comes again is not recorded: it takes
    time, and on a CPU guards between the tensors on the heap would fragment it."""
    if key in _seen:
        return True
    if len(_seen) >= _MOST:
        _seen.clear()
    _seen.add(key)
    return False


def _guards(tensors: Sequence[Tensor]) -> Alike:
    """Return a comparison of class, dtype, device, shape, strides, requires_grad and the dispatcher's keys, which show
    lazy negations, functorch wrappers, autocast and inference mode. It takes 1.5 us for 17 tensors and holds none."""
    first = {id(t): i for i, t in reversed([*enumerate(tensors)])}
    firsts = sorted(first.values())
    once = [tensors[i] for i in firsts]
    layout = {
        "dynamic_dims_sizes": [list(t.shape) for t in once],
        "dynamic_dims_strides": [list(t.stride()) for t in once],
    }
    alike: Alike = TensorGuards(*once, **layout).check  # takes no tensor twice
    if len(once) == len(tensors):
        return alike
    again = [(i, first[id(t)]) for i, t in enumerate(tensors) if first[id(t)] != i]

    each = operator.itemgetter(*firsts, firsts[0])  # a tuple also of one

    def alike_with_repeats(*others: Any) -> bool:
        for i, j in again:
            if others[i] is not others[j]:
                return False
        return alike(*each(others)[:-1])

    return alike_with_repeats


def _forget() -> None:
    global _kept
    _kept = {}
    _seen.clear()


@contextlib.contextmanager
def forgotten() -> Iterator[None]:
    """Forget everything before and after the context, in which launches mean something else."""
    _forget()
    try:
        yield
    finally:
        _forget()
