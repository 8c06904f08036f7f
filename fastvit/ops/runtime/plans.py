"""Cache what an op derives from the signature of a call: types, shapes, strides, dtypes, devices and options.

At batch 1 the host takes longer to prepare a call than a GPU to run it: checks, the choice of a path, launch
configurations, strides, grids. All of that follows from the signature. An op asks `recall` for its plans before
anything else and passes them to its launchers. What follows from the signature alone goes through `plan`: computed in
the first call, read in later calls, in the same order.

    plans = recall("linear", (x, weight, bias), (activation,))
    options = plans.plan(_checked, x, weight, bias, activation)
    y = linear_fwd(x, weight, bias, activation, backend=None if plans is AFRESH else plans)
    plans.keep()  # once nothing has raised
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
from fastvit.ops.runtime.autograd import autocast_dtype
from fastvit.ops.runtime.devices import float32_precision
from fastvit.ops.runtime.dispatch import is_observed, wants_triton
from fastvit.ops.runtime.torch_private import TensorGuards, is_any_autocast_enabled, is_zerotensor, unwrap_if_dead

T = TypeVar("T")
Key = tuple[Any, ...]
Alike = Callable[..., bool]  # whether tensors match those of the first call

_MOST = 8192  # keys, some 3 KB each; then the cache is cleared
_MOST_ALIKE = 16  # signatures of one key
Kept = dict[Key, tuple[tuple[Alike, list[Any]], ...]]
_kept: Kept = {}
launches_are_watched: Callable[[], bool] = bool  # False, until `launch.py` is imported and asks Triton's hooks
_VALUES = frozenset({bool, int, float, str, type(None), tuple, torch.dtype, type})  # the same where they are equal
_TENSORS = frozenset({Tensor, Parameter, type(None)})  # no subclass such as a fake, a distributed or a tracer's


class Plans:
    """No caching: compute everything."""

    __slots__ = ()

    def plan(self, function: Callable[..., T], *args: Any) -> T:
        """Return function(*args). It depends on nothing but what `recall` compared, and its result holds no tensor."""
        return function(*args)

    def readable(self, convert: Callable[[Any], Any], *tensors: Tensor | None) -> Any:
        """Return each tensor as a kernel reads it: itself, or `convert` of it."""
        return [convert(t) for t in tensors]

    def keep(self) -> None:
        """Keep the plans: the call has succeeded."""

    def abandon(self) -> None:
        """Compute everything from here on: the call has left the planned path."""


AFRESH = Plans()


class _First(Plans):
    """First call with this signature: record."""

    __slots__ = ("_alike", "_found", "_into", "_key")

    def __init__(self, key: Key, alike: Alike, into: Kept) -> None:
        self._key: Key | None = key
        self._alike = alike
        self._into = into  # may be cleared before the call has succeeded
        self._found: list[Any] = []

    def plan(self, function: Callable[..., T], *args: Any) -> T:
        found = function(*args)
        self._found.append(found)
        return found

    def readable(self, convert: Callable[[Any], Any], *tensors: Tensor | None) -> Any:
        converted = [convert(t) for t in tensors]
        if any(map(operator.is_not, converted, tensors)):
            self.abandon()  # it has to be converted in every call
        return converted

    def keep(self) -> None:
        if self._key is not None:
            if len(self._into) >= _MOST:
                self._into.clear()
            others = self._into.get(self._key, ())
            self._into[self._key] = (*others[1 - _MOST_ALIKE :], (self._alike, self._found))

    def abandon(self) -> None:
        self._key = None


class _Again(Plans):
    """Later call with this signature: replay."""

    __slots__ = ("_next",)

    def __init__(self, found: list[Any]) -> None:
        self._next: Callable[[], Any] | None = iter(found).__next__

    def plan(self, function: Callable[..., T], *args: Any) -> T:
        found: T = function(*args) if self._next is None else self._next()
        return found

    def readable(self, convert: Callable[[Any], Any], *tensors: Tensor | None) -> Any:
        return tensors if self._next is not None else [convert(t) for t in tensors]

    def abandon(self) -> None:
        self._next = None


def recall(op: str, arguments: tuple[Any, ...], options: Key) -> Plans:
    """Return the plans of a call of the op: AFRESH, which caches nothing, for a call that is observed (`is_observed`),
    that does not run Triton kernels on the current device, or that has other than plain tensors among its arguments.

    arguments: x, then other tensors, None, or tuples and lists of these and of plain values. options: plain values.
    The call must depend on options and the tensors' signature only. Anything else leads to AFRESH, so that the op's
    checks see it.
    """
    try:
        x, types = arguments[0], tuple(map(type, arguments))
        if is_observed() or types[0] not in _TENSORS or not (x.is_cuda or x.is_cpu):
            return AFRESH
        if not wants_triton(x) or launches_are_watched() or not _VALUES.issuperset(map(type, options)):
            return AFRESH
        if x.is_cuda and x.device.index != torch.cuda.current_device():
            return AFRESH
        if not _TENSORS.issuperset(types):
            arguments, structure = _flattened(arguments)
            options = *options, *structure
            types = tuple(map(type, arguments))
        tensors = [t for t in arguments if t is not None]
        cast = autocast_dtype(x) if is_any_autocast_enabled() else None
        key = op, types, x.shape, options, torch.is_grad_enabled(), cast, float32_precision()
        for alike, found in _kept.get(key, ()):
            if alike(*tensors):
                return _Again(found)
        if not _TENSORS.issuperset(types) or not _plain(tensors):
            return AFRESH
        return _First(key, _guards(tensors), _kept)
    except (AttributeError, TypeError, SystemError):  # SystemError: from guards with other arguments
        return AFRESH


def _plain(tensors: Sequence[Tensor]) -> bool:
    """Return whether the tensors are plain, so that kernels may read them or copies, and torch has guards."""
    return bool(
        TensorGuards is not None
        and unwrap_if_dead is not None
        and not any(map(Tensor.is_neg, tensors))
        and not any(map(is_zerotensor, tensors))
        and all(unwrap_if_dead(t) is t for t in tensors)
    )


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
    return lambda *others: all(others[i] is others[j] for i, j in again) and alike(*[others[i] for i in places])


def _flattened(arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], Key]:
    """Return the tensors in the arguments and in tuples among them, and their places with everything else."""
    tensors: list[Any] = []
    structure: list[Any] = []
    rest = list(reversed(arguments))
    while rest:
        value = rest.pop()
        if value is None or isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, tuple | list):
            rest += reversed(value)
            structure += len(rest), type(value), len(value)
        elif type(value) in _VALUES:
            structure += len(rest), value
        else:
            raise TypeError(f"{type(value).__name__} is neither a tensor nor a plain value")
    return tuple(tensors), tuple(structure)


def _forget() -> None:
    global _kept
    _kept = {}


_tuned.on_change(_forget)


@contextlib.contextmanager
def forgotten() -> Iterator[None]:
    """Clear the cache before and after the context, in which launches mean something else."""
    _forget()
    try:
        yield
    finally:
        _forget()
