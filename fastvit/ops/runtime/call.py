"""How a call of an op lives: first, remembered, replayed.

At batch 1 the host takes longer to prepare a call than a GPU to run it: checks, launch configurations, strides, grids,
allocations, views. So like calls are prepared once.

    call = begin("linear", (x, weight, bias), (activation,))
    needs_gradient, options = call.once("checked", _checked, x, weight, bias, activation)
    (y,) = call.run(lambda inputs: (linear_fwd(*inputs, activation, call=call),), [x, weight, bias])
    call.remember()

1. First: `once` computes a value and stores it under its name; a second value of that name is an error, and an op that
   runs twice gets `call.child("fc1")`, with names of its own. `remember`, when nothing has raised, keeps the values.
   On ATen a call is the first when one like it was seen before.
2. Remembered: `begin` finds what calls like it have worked out. `once` returns it and computes nothing; a name that is
   missing is an error. In the first such call `run` also records what its function does (record.py).
3. Replayed: from then on `run` replays that in C (replay.c): the same allocations, views, calls of PyTorch's functions
   and launches, on other tensors. What cannot be recorded is run in Python again.

Two calls are alike if op, path and options are equal, and grad mode, autocast's dtype and the precision of float32
matmuls; and if their tensors have the same classes, dtypes, devices, shapes, strides, requires_grad and dispatch keys,
and are repeated at the same places. Nothing is kept of a call on the dispatcher's path, of one whose kernels read
copies of its tensors, or that a kernel refused; and never a tensor. Without a C compiler nothing is kept.

So what is kept cannot be stale: all that `once` computes, and all that `run` decides, follows from what is compared. It
may also depend on tuned tables, and on what a launch means in tests and plans of memory: when these change, everything
is forgotten. Addresses are looked at in every launch.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from fastvit.kernels import _tuned
from fastvit.ops.runtime.backend import Path, has_lazy_values, is_observed, is_on_current_device, wants_triton
from fastvit.ops.runtime.device import float32_precision
from fastvit.ops.runtime.dtypes import autocast_dtype
from fastvit.ops.runtime.record import Function, Plan, available, record
from fastvit.ops.runtime.torch_private import TensorGuards, is_any_autocast_enabled, unwrap_if_dead

T = TypeVar("T")
Key = tuple[Any, ...]
Apply = Callable[..., tuple[Any, ...] | None]  # (call, *arguments) -> results
Alike = Callable[..., bool]  # whether tensors are like those of the first call


class Call:
    """A call of which nothing is kept. is_plain: whether its tensors are known to have memory of their own."""

    __slots__ = ("path",)
    is_first = is_plain = may_learn = False

    def __init__(self, path: Path) -> None:
        self.path = path

    def once(self, name: str, function: Callable[..., T], *args: Any) -> T:
        """Return function(*args). It depends on nothing but what `begin` compares, and returns no tensor."""
        return function(*args)

    def child(self, name: str) -> Call:
        """Return a part of the call, with names of its own."""
        return self

    def as_read(self, convert: Callable[[Any], Any], *tensors: Tensor | None) -> Any:
        """Return each tensor as a kernel reads it: itself, or `convert` of it."""
        return [convert(t) for t in tensors]

    def run(self, function: Function, inputs: list[Any]) -> tuple[Any, ...]:
        """Return function(inputs), a tuple of tensors and None that depends on the inputs and on what `begin` compares.
        The function may empty the list, so that memory that nobody else holds is freed early."""
        return function(inputs)

    def replay(self, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Return the results of a call that began with these arguments, or None if it has to go on in Python."""
        return None

    def remember(self) -> None:
        """Keep what the call has worked out, after it has succeeded. Does nothing unless it is the first."""

    def forget(self) -> None:
        """Keep no value of the call, because a kernel refused it or reads copies of its tensors."""


class FirstCall(Call):
    """The first call of its kind."""

    __slots__ = ("_is_kept", "_kept", "_key", "_signature", "_values", "_whole")
    is_first = is_plain = True

    def __init__(self, path: Path, key: Key | None, signature: tuple[Any, ...], whole: FirstCall | None = None) -> None:
        self.path = path
        self._key = key  # None for a part of a call, and for one that is remembered
        self._signature = signature
        self._kept = _kept  # may be forgotten before the call has succeeded
        self._values: dict[str, Any] = {}
        self._whole = whole  # that this is a part of
        self._is_kept = True

    def once(self, name: str, function: Callable[..., T], *args: Any) -> T:
        if name in self._values:
            raise RuntimeError(f"a call works out {name!r} twice: one of them needs a `child`")
        value = self._values[name] = function(*args)
        return value

    def child(self, name: str) -> Call:
        return self.once(name, FirstCall, self.path, None, (), self._whole or self)

    def as_read(self, convert: Callable[[Any], Any], *tensors: Tensor | None) -> Any:
        converted = [convert(t) for t in tensors]
        if any(map(operator.is_not, converted, tensors)):
            self.forget()  # it has to be converted in every call
        return converted

    def remember(self) -> None:
        if self._key is not None:
            if len(self._kept) >= _MOST:
                self._kept.clear()
            others = self._kept.get(self._key, ())
            later = self.later() if self._is_kept else UNKEPT[self.path]
            self._kept[self._key] = (*others[1 - _MOST_ALIKE :], (*self._signature, later))
            self._key = None

    def forget(self) -> None:
        (self._whole or self)._is_kept = False

    def later(self) -> LaterCall:
        """Return what calls like this one are."""
        values = {name: v.later() if isinstance(v, FirstCall) else v for name, v in self._values.items()}
        return LaterCall(self.path, values)


def _not_recorded(inputs: list[Any]) -> None:
    """Stand for the plan of a call that cannot be recorded."""


class LaterCall(Call):
    """All later calls of their kind. If a kernel refuses one, ATen's results have the layout of the kernel's, so that
    what is kept holds for the rest of the call."""

    __slots__ = ("_apply", "_pick", "_plan", "_values", "may_learn", "places")
    is_plain = True

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self._values = values
        self._plan: Plan | None = None  # of `run`, from the first of these calls on
        self._pick: Any = None  # (arguments of `begin`, and None) -> inputs of `run`
        self._apply: Apply | None = None
        self.may_learn = True
        self.places: list[int] = []  # by argument of `begin`: the input of `run` that it is, or -1

    def run(self, function: Function, inputs: list[Any]) -> tuple[Any, ...]:
        if self._plan is None:
            outputs, plan = record(function, inputs)
            self._plan = plan or _not_recorded
            return outputs
        replayed = self._plan(inputs)
        return function(inputs) if replayed is None else replayed

    def learn(self, apply: Apply | None, arguments: tuple[Any, ...], inputs: Sequence[Any]) -> None:
        """Let `replay` run later calls from the arguments of `begin` alone, if the inputs of `run` are these tensors,
        each once. apply: runs a call by its autograd Function; None for a call without a gradient."""
        self.may_learn = False
        if self._plan is None or self._plan is _not_recorded:
            return
        numbers = {id(t): i for i, t in enumerate(arguments) if isinstance(t, Tensor)}
        order = [numbers.get(id(t)) if isinstance(t, Tensor) else -1 for t in inputs]
        found = [i for i in order if i != -1]
        if None not in found and len({*found}) == len(found) == sum(isinstance(t, Tensor) for t in arguments):
            self.places = [order.index(i) if i in order else -1 for i in range(len(arguments))]
            self._apply = apply
            self._pick = operator.itemgetter(*order)  # last: another thread may be in `replay`

    def replay(self, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._pick is None:
            return None
        return self.replay_inputs(arguments) if self._apply is None else self._apply(self, *arguments)

    def replay_inputs(self, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Return what `run` does."""
        plan: Any = self._plan
        return plan([*self._pick((*arguments, None))])

    def once(self, name: str, function: Callable[..., T], *args: Any) -> T:
        value: T = self._values[name]
        return value

    def child(self, name: str) -> Call:
        part: Call = self._values[name]
        return part

    def as_read(self, convert: Callable[[Any], Any], *tensors: Tensor | None) -> Any:
        return tensors


UNKEPT = {path: Call(path) for path in Path}
_DISPATCHED = UNKEPT[Path.DISPATCHER]

_MOST = 4096  # keys, some 20 KB each; then all are forgotten
_MOST_ALIKE = 32  # calls of one key
# (op, shape of the first tensor) -> calls: pattern, options, settings, guards, and UNKEPT if later calls have to work
# out everything, too. `find` of replay.c looks it up.
_kept: dict[Key, tuple[tuple[Any, Key, Key, Alike, Call], ...]] = {}
launches_are_watched: Callable[[], bool] = bool  # False, until `launch.py` is imported and asks Triton's hooks
_VALUES = frozenset({bool, int, float, str, type(None), torch.dtype, type})  # the same where they are equal
_TENSORS = frozenset({Tensor, Parameter, type(None)})  # no subclass such as a fake, a distributed or a tracer's


def begin(op: str, arguments: tuple[Any, ...], options: Key = ()) -> Call:
    """Begin a call: choose its path, and find what calls like it have worked out.

    The path is that of `backend.choose_path`, but under autocast a call that runs kernels stays on the Triton path,
    because ops cast their inputs themselves.

    Args:
        arguments: tensors, None, plain values, and tuples and lists of these; one at least is a tensor, and the first
            of them is x. Arguments of other kinds go by the dispatcher's path, and the op's checks see them.
        options: plain values, or tuples of them.
    """
    if is_observed():
        return _DISPATCHED
    if _module is not None and (call := _module.find(_kept, op, arguments, options, _settings)) is not None:
        found: Call = call
        return found
    return _first(op, arguments, options)


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


def _first(op: str, arguments: tuple[Any, ...], options: Key) -> Call:
    """Begin a call of which nothing is kept."""
    global _module
    tensors: list[Any] = []
    try:
        pattern = tuple, *[_pattern(a, tensors) for a in arguments]
        if not tensors:
            return _DISPATCHED
        settings, shape = _settings(tensors[0]), tensors[0].shape
    except (AttributeError, TypeError, RuntimeError):  # RuntimeError: from a nested tensor, which has no shape
        return _DISPATCHED
    if settings is None:
        return _DISPATCHED
    path = Path.TRITON if settings[0] else Path.ATEN
    if path is Path.TRITON and has_lazy_values(tensors):
        return _DISPATCHED
    if unwrap_if_dead is None or TensorGuards is None:
        return UNKEPT[path]
    if any(unwrap_if_dead(t) is not t for t in tensors):
        return _DISPATCHED  # it knows what is in the wrapper of a functorch transform that has ended
    if (path is Path.TRITON and launches_are_watched()) or not _are_values(options):
        return UNKEPT[path]
    key = op, shape
    if path is Path.ATEN and not _was_seen(hash((key, options))):
        return UNKEPT[path]
    _module = available()
    return FirstCall(path, key, (pattern, options, settings, _guards(tensors))) if _module else UNKEPT[path]


_module: Any = None  # of replay.c, from the first call that is kept


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
    """Return whether an ATen call with this hash was seen before. Calls on the CPU are kept from the second one on: if
    every one has another shape, guards between the tensors on the heap would fragment it."""
    if key in _seen:
        return True
    if len(_seen) >= _MOST:
        _seen.clear()
    _seen.add(key)
    return False


def _are_values(options: Any) -> bool:
    return type(options) in _VALUES or (isinstance(options, tuple) and all(map(_are_values, options)))


def _guards(tensors: Sequence[Tensor]) -> Alike:
    """Return a comparison of class, dtype, device, shape, strides, requires_grad and the dispatcher's keys, which show
    lazy negations, functorch wrappers, autocast and inference mode. It takes 1.5 us for 17 tensors and holds none."""
    first = {id(t): i for i, t in reversed([*enumerate(tensors)])}
    places = sorted(first.values())
    once = [tensors[i] for i in places]
    layout = {
        "dynamic_dims_sizes": [list(t.shape) for t in once],
        "dynamic_dims_strides": [list(t.stride()) for t in once],
    }
    alike: Alike = TensorGuards(*once, **layout).check  # takes no tensor twice
    if len(once) == len(tensors):
        return alike
    again = [(i, first[id(t)]) for i, t in enumerate(tensors) if first[id(t)] != i]

    each = operator.itemgetter(*places, places[0])  # a tuple also of one

    def alike_with_repeats(*others: Any) -> bool:
        for i, j in again:
            if others[i] is not others[j]:
                return False
        return alike(*each(others)[:-1])

    return alike_with_repeats


def _forget() -> None:
    global _kept
    _kept = {}


_tuned.on_change(_forget)


@contextlib.contextmanager
def forgotten() -> Iterator[None]:
    """Forget everything before and after the context, in which launches mean something else."""
    _forget()
    try:
        yield
    finally:
        _forget()
