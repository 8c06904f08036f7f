"""Decide which route a call of an op takes: PyTorch's dispatcher, Triton or ATen; and whether calls are replayed.

The first tensor's device decides for each call, and

    FASTVIT_BACKEND   auto (default: Triton on a GPU or under TRITON_INTERPRET=1, else ATen) | triton | aten
    FASTVIT_STRICT    1: what Triton cannot take raises instead of falling back to ATen with one warning (default: 0)
    FASTVIT_GLUON     0: Triton's kernels run where a Hopper GPU has some in Gluon (default: 1)
    FASTVIT_REPLAY    0: every call runs in Python, where a debugger can stop; none is replayed in C (default: 1)

or `use_backend`, which overrides all but FASTVIT_GLUON. The first two are read in every call: a change of `os.environ`
counts; the others are read when fastvit is imported.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from fastvit._base import which_triton
from fastvit.ops.runtime.torch_private import (
    are_functorch_transforms_active,
    clear_saved_tensors,
    has_forward_level,
    is_any_autocast_enabled,
    is_torch_function_mode_enabled,
    is_tracing,
    is_zerotensor,
    len_torch_dispatch_stack,
    profiler_enabled,
)

BACKENDS = ("auto", "triton", "aten")
VARIABLES = {"FASTVIT_BACKEND": "auto", "FASTVIT_STRICT": "0"}  # and what stands for a variable that is not set
VARIABLES_AT_IMPORT = {"FASTVIT_GLUON": "1", "FASTVIT_REPLAY": "1"}


def _is_on(name: str) -> bool:
    """Return whether a variable that is 0 or 1 is 1."""
    value = os.environ.get(name) or (VARIABLES | VARIABLES_AT_IMPORT)[name]
    if value not in ("0", "1"):
        raise ValueError(f"{name} must be 0 or 1, got {value!r}")
    return value == "1"


INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"
GLUON = _is_on("FASTVIT_GLUON")
replays = _is_on("FASTVIT_REPLAY")  # whether calls are recorded and replayed; `use_backend` changes it
HAVE_TRITON = which_triton.is_installed()


class Route(Enum):
    """The ways to run an op. DISPATCHER calls the registered op, which everything that observes a call can see, and
    whose results are new tensors; the registered op then runs one of the other two."""

    DISPATCHER = "dispatcher"
    TRITON = "triton"
    ATEN = "aten"


class KernelUnsupported(ValueError):
    """Raised by a launcher for a shape, dtype or GPU that its kernels cannot take. Earlier launches of the call do no
    harm: ATen then computes all results into new tensors."""


Settings = tuple[str, bool]  # backend, strict

# os.environ's own dict, if it has one: 20 ns for a variable that is not set; os.environ takes 800
_environ: Mapping[Any, Any] = getattr(os.environ, "_data", os.environ)
_BACKEND, _STRICT = (os.environ.encodekey(name) if _environ is not os.environ else name for name in VARIABLES)
_chosen: Settings | None = None  # by use_backend


@functools.lru_cache(maxsize=8)
def _parsed(*_raw: Any) -> Settings:
    """Parse the variables. The arguments, their raw values, are the cache's key."""
    backend = os.environ.get("FASTVIT_BACKEND") or VARIABLES["FASTVIT_BACKEND"]
    if backend not in BACKENDS:
        raise ValueError(f"FASTVIT_BACKEND must be one of {BACKENDS}, got {backend!r}")
    return backend, _is_on("FASTVIT_STRICT")


def settings() -> Settings:
    """Return the current backend, and whether what Triton cannot take raises."""
    return _chosen or _parsed(_environ.get(_BACKEND), _environ.get(_STRICT))


settings()  # a wrong value is an error at import


@contextlib.contextmanager
def use_backend(name: str, *, strict: bool | None = None, replay: bool | None = None) -> Iterator[None]:
    """Run every op within the context on the backend of that name, whatever FASTVIT_BACKEND says.

        with fastvit.ops.use_backend("aten"):
            loss = model(images).sum()

    The choice holds for the whole process, since autograd runs backward passes in threads of its own. An op reads it
    when it runs; so do a backward pass and a compiled model. Contexts may be nested, but only one thread at a time may
    enter and leave them. A CUDA graph replays what it has captured.

    Args:
        name: "triton", "aten", or "auto": Triton for tensors on a GPU (with TRITON_INTERPRET=1 for all), else ATen.
        strict: whether what Triton cannot take raises (True) or falls back to ATen with one warning (False); None for
            the setting outside: the enclosing context's, or FASTVIT_STRICT's.
        replay: whether later calls of a kind are replayed in C (True) or run in Python (False), so that a debugger can
            stop in them; None for the setting outside: the enclosing context's, or FASTVIT_REPLAY's.

    Raises:
        ValueError: another name.
        TypeError: another type of strict or replay.
        RuntimeError: from an op on "triton", if Triton cannot run on its tensors' device at all.
    """
    global _chosen, replays
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {name!r}")
    for argument, value in (("strict", strict), ("replay", replay)):
        if not isinstance(value, bool | None):
            raise TypeError(f"{argument} must be True, False or None, got {value!r}")
    before = _chosen, replays
    _chosen = name, settings()[1] if strict is None else strict
    replays = replays if replay is None else replay
    try:
        yield
    finally:
        _chosen, replays = before


def wants_triton(x: Tensor) -> bool:
    """Return whether ops on x's device run Triton kernels."""
    backend, _ = _chosen or _parsed(_environ.get(_BACKEND), _environ.get(_STRICT))  # `settings`, 60 ns faster
    if backend == "aten" or not (HAVE_TRITON and (x.is_cuda or INTERPRET)):
        if backend == "triton":
            raise RuntimeError(
                f"the backend is 'triton', by FASTVIT_BACKEND or use_backend, but Triton cannot run on {x.device}: "
                + ("set TRITON_INTERPRET=1 for CPU tensors" if HAVE_TRITON else "triton is not installed")
            )
        return False
    return True


def is_jit_tracing() -> bool:
    """Return whether torch.jit.trace is recording."""
    return not is_dynamo_compiling() and is_tracing is not None and is_tracing()


# Types of plain arguments: no subclass of Tensor, such as a fake, distributed or traced one
_PLAIN_TYPES = frozenset({Tensor, Parameter, type(None), bool, int, float, str, torch.dtype})

# If torch lacks one of these, calls always count as observed
_KNOWS_OBSERVERS = has_forward_level and None not in (
    len_torch_dispatch_stack,
    is_torch_function_mode_enabled,
    are_functorch_transforms_active,
    clear_saved_tensors,
    is_any_autocast_enabled,
    is_tracing,
    profiler_enabled,
    is_zerotensor,
)


def is_observed(profilers: bool = True) -> bool:
    """Return whether something has to see the calls made now, or may have to: modes (fake tensors, FLOP counters,
    checkpoint policies, tracers), functorch transforms, forward-mode AD, or, unless they do not count, profilers."""
    return bool(
        not _KNOWS_OBSERVERS
        or is_dynamo_compiling()
        or len_torch_dispatch_stack()
        or is_torch_function_mode_enabled()
        or are_functorch_transforms_active()
        or is_tracing()
        or (profilers and profiler_enabled())
        or forward_ad._current_level >= 0
    )


@contextlib.contextmanager
def hidden_from_profilers() -> Iterator[None]:
    """Do not count profilers as observers within the context: calls run and allocate as they do without one. The
    profiler sees PyTorch's functions and their memory, and no fused op."""
    global profiler_enabled
    before, profiler_enabled = profiler_enabled, lambda: False
    try:
        yield
    finally:
        profiler_enabled = before


def choose_route(*args: Any) -> Route:
    """Return the route of an op on these arguments, and of further ops on its results.

    The dispatcher runs calls that are observed or under autocast, and calls with tensor subclasses or other devices;
    for Triton also those on a GPU that is not the current one, and those with lazy negations (as gradients of conj()
    have), which ATen's functions resolve themselves. Autograd is left to the FusedNodes."""
    x = args[0]
    if (
        is_observed()
        or is_any_autocast_enabled()
        or not _PLAIN_TYPES.issuperset(map(type, args))
        or not (x.is_cpu or x.is_cuda)
    ):
        return Route.DISPATCHER
    if not wants_triton(x):
        return Route.ATEN
    if not is_on_current_device(x) or has_lazy_values([a for a in args if isinstance(a, Tensor)]):
        return Route.DISPATCHER
    return Route.TRITON


def is_on_current_device(x: Tensor) -> bool:
    """Return whether x is on the current GPU, or on none."""
    return not x.is_cuda or x.device.index == torch.cuda.current_device()


def has_lazy_values(tensors: Iterable[Tensor]) -> bool:
    """Return whether the memory of a tensor does not hold its values: a lazy negation, or zeros without memory."""
    return any(t.is_neg() or is_zerotensor(t) for t in tensors)


_warned: set[tuple[str, str]] = set()


def fall_back(name: str, reason: str) -> None:
    """Raise that Triton cannot take a call if strict, else warn once for each reason."""
    if settings()[1]:
        raise KernelUnsupported(f"fastvit::{name}: {reason}")
    if (name, reason) not in _warned:
        _warned.add((name, reason))
        warnings.warn(f"fastvit::{name} runs on ATen instead of Triton: {reason}", stacklevel=4)
