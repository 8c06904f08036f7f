"""One call of an op: which path it takes, and what it works out once for all calls like it.

At batch 1 the host takes longer to prepare a call than a GPU to run it: checks, launch configurations, strides, grids.

    call = begin("linear", (x, weight, bias), (activation,))
    needs_gradient, options = call.once("checked", _checked, x, weight, bias, activation)
    y = linear_fwd(x, weight, bias, activation, call=call)
    call.remember()

In the first call `once` computes a value and stores it under its name; a second value of that name is an error, and an
op that runs twice gets `call.child("fc1")`, with names of its own. `remember`, when nothing has raised, keeps the
values. `begin` finds them for later calls, in which `once` returns them and computes nothing; a name that is missing
is an error.

Two calls are alike if op, path and options are equal, and grad mode, autocast's dtype and the precision of float32
matmuls; and if their tensors have the same classes, dtypes, devices, shapes, strides, requires_grad and dispatch keys,
and are repeated at the same places. No value is kept of a call on the dispatcher's path, of one whose kernels read
copies of its tensors, or that a kernel refused; and never a tensor.

So what is kept cannot be stale: all that `once` computes follows from what is compared. Values may also depend on
tuned tables, and on what a launch means in tests and plans of memory: when these change, everything is forgotten.
Addresses are looked at in every launch.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress, repeat
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from fastvit.kernels import _tuned
from fastvit.ops.runtime.backend import Path, has_lazy_values, is_observed, is_on_current_device, wants_triton
from fastvit.ops.runtime.device import float32_precision
from fastvit.ops.runtime.dtypes import autocast_dtype
from fastvit.ops.runtime.torch_private import TensorGuards, is_any_autocast_enabled, unwrap_if_dead

T = TypeVar("T")
Key = tuple[Any, ...]
Alike = Callable[..., bool]  # whether tensors are like those of the first call


class Call:
    """A call of which nothing is kept. is_plain: whether its tensors are known to have memory of their own."""

    __slots__ = ("path",)
    is_first = is_plain = False

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

    def remember(self) -> None:
        """Keep what the call has worked out, after it has succeeded. Does nothing unless it is the first."""

    def forget(self) -> None:
        """Keep no value of the call, because a kernel refused it or reads copies of its tensors."""


class FirstCall(Call):
    """The first call of its kind."""

    __slots__ = ("_alike", "_is_kept", "_kept", "_key", "_values", "_whole")
    is_first = is_plain = True

    def __init__(self, path: Path, key: Key | None, alike: Alike, whole: FirstCall | None = None) -> None:
        self.path = path
        self._key = key  # None for a part of a call, and for one that is remembered
        self._alike = alike
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
        return self.once(name, FirstCall, self.path, None, self._alike, self._whole or self)

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
            self._kept[self._key] = (*others[1 - _MOST_ALIKE :], (self._alike, later))
            self._key = None

    def forget(self) -> None:
        (self._whole or self)._is_kept = False

    def later(self) -> LaterCall:
        """Return what calls like this one are."""
        values = {name: v.later() if isinstance(v, FirstCall) else v for name, v in self._values.items()}
        return LaterCall(self.path, values)


class LaterCall(Call):
    """All later calls of their kind. If a kernel refuses one, ATen's results have the layout of the kernel's, so that
    what is kept holds for the rest of the call."""

    __slots__ = ("_values",)
    is_plain = True

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self._values = values

    def once(self, name: str, function: Callable[..., T], *args: Any) -> T:
        value: T = self._values[name]
        return value

    def child(self, name: str) -> Call:
        part: Call = self._values[name]
        return part

    def as_read(self, convert: Callable[[Any], Any], *tensors: Tensor | None) -> Any:
        return tensors


UNKEPT = {path: Call(path) for path in Path}
_DISPATCHED, _ON_TRITON, _ON_ATEN = (UNKEPT[path] for path in (Path.DISPATCHER, Path.TRITON, Path.ATEN))

_MOST = 8192  # keys, some 3 KB each; then all are forgotten
_MOST_ALIKE = 16  # calls of one key
Kept = dict[Key, tuple[tuple[Alike, Call], ...]]  # UNKEPT if later calls have to work out everything, too
_kept: Kept = {}
launches_are_watched: Callable[[], bool] = bool  # False, until `launch.py` is imported and asks Triton's hooks
_NONES = repeat(None)
_VALUES = frozenset({bool, int, float, str, type(None), torch.dtype, type})  # the same where they are equal
_TENSORS = frozenset({Tensor, Parameter, type(None)})  # no subclass such as a fake, a distributed or a tracer's


def begin(op: str, arguments: tuple[Any, ...], options: Key = (), *, kernels_only: bool = False) -> Call:
    """Begin a call: choose its path, and find what calls like it have worked out.

    The path is that of `backend.choose_path`, but under autocast a call that runs kernels stays on the Triton path,
    because ops cast their inputs themselves.

    Args:
        arguments: x, then other tensors, None, or tuples and lists of these and of plain values. Arguments of other
            kinds go by the dispatcher's path, and the op's checks see them.
        options: plain values, or tuples of them.
        kernels_only: the call works out nothing but launches, so that nothing is kept of it on the ATen path.
    """
    if is_observed():
        return _DISPATCHED
    try:
        x, types = arguments[0], tuple(map(type, arguments))
        if x is None:  # no gradient of a first result
            x = next(t for t in arguments if t is not None)
        if type(x) not in _TENSORS or not (x.is_cuda or x.is_cpu):
            return _DISPATCHED
        if not _TENSORS.issuperset(types):
            flat: list[Any] = []
            structure: list[Any] = []
            _flatten(arguments, flat, structure)
            arguments, options, types = tuple(flat), (options, *structure), tuple(map(type, flat))
        settings = None
        if on_triton := wants_triton(x):
            if x.is_cuda and not is_on_current_device(x):
                return _DISPATCHED
            settings = float32_precision(), autocast_dtype(x) if is_any_autocast_enabled() else None
        elif is_any_autocast_enabled():
            return _DISPATCHED
        elif kernels_only:
            return _ON_ATEN
        key = op, types, x.shape, options, torch.is_grad_enabled(), settings
        if type(None) in types:
            arguments = tuple(compress(arguments, map(operator.is_not, arguments, _NONES)))  # in C
        for alike, later in _kept.get(key, ()):
            if alike(*arguments):
                return _ON_TRITON if on_triton and launches_are_watched() else later
        return _first(Path.TRITON if on_triton else Path.ATEN, key, types, options, arguments)
    # RuntimeError: from a nested tensor, which has no shape; SystemError: from guards with other arguments
    except (AttributeError, TypeError, StopIteration, RuntimeError, SystemError):
        return _DISPATCHED


def _first(path: Path, key: Key, types: tuple[type, ...], options: Key, tensors: Sequence[Any]) -> Call:
    if not _TENSORS.issuperset(types) or (path is Path.TRITON and has_lazy_values(tensors)):
        return _DISPATCHED
    if unwrap_if_dead is None or TensorGuards is None:
        return UNKEPT[path]
    if any(unwrap_if_dead(t) is not t for t in tensors):
        return _DISPATCHED  # it knows what is in the wrapper of a functorch transform that has ended
    if (path is Path.TRITON and launches_are_watched()) or not _are_values(options):
        return UNKEPT[path]
    if path is Path.ATEN and not _was_seen(hash(key)):
        return UNKEPT[path]
    return FirstCall(path, key, _guards(tensors))


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


def _flatten(arguments: Iterable[Any], tensors: list[Any], structure: list[Any]) -> None:
    """Append the tensors in the arguments, and in tuples among them, to one list, and everything else with its place to
    the other."""
    for value in arguments:
        if value is None or isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, tuple | list):
            structure += len(tensors), type(value), len(value)
            _flatten(value, tensors, structure)
        elif type(value) in _VALUES:
            structure += len(tensors), value
        else:
            raise TypeError(f"{type(value).__name__} is neither a tensor nor a plain value")


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
