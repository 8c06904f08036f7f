"""How a fused op is registered, dispatched and differentiated: the only module that knows.

An op has one schema and two implementations: `triton` (a launcher of kernels from `fastvit.kernels`) and `aten`
(PyTorch's own fused functions). Both sit behind one entry of the `fastvit::` namespace, with a fake implementation for
`torch.compile` and `torch.export`. Which one runs is decided per call by the first tensor's device and by

    FASTVIT_BACKEND   auto (default: Triton on a GPU or under TRITON_INTERPRET=1, else ATen) | triton | aten
    FASTVIT_STRICT    1: what Triton cannot take raises instead of falling back to ATen with one warning
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C import (
    _are_functorch_transforms_active,
    _is_any_autocast_enabled,
    _is_torch_function_mode_enabled,
    _is_tracing,
    _len_torch_dispatch_stack,
)
from torch._C._functorch import unwrap_if_dead
from torch.autograd import _profiler_enabled, forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from fastvit.kernels import _tuned

BACKENDS = ("auto", "triton", "aten")
INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"
HAVE_TRITON = importlib.util.find_spec("triton") is not None

_LIB = torch.library.Library("fastvit", "DEF")
_warned: set[tuple[str, str]] = set()


class Unsupported(ValueError):
    """Raised by a launcher, before it launches anything, for a shape or dtype that its kernels cannot take."""


def _backend_from_environment() -> str:
    name = os.environ.get("FASTVIT_BACKEND", "auto")
    if name not in BACKENDS:
        raise ValueError(f"FASTVIT_BACKEND must be one of {BACKENDS}, got {name!r}")
    return name


_backend = _backend_from_environment()
_strict = os.environ.get("FASTVIT_STRICT", "0") == "1"


@contextlib.contextmanager
def use_backend(name: str, *, strict: bool = True) -> Iterator[None]:
    """Within the context every op runs on `name`: "auto", "triton" or "aten". Process-wide, not per thread."""
    global _backend, _strict
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {name!r}")
    before = _backend, _strict
    _backend, _strict = name, strict
    try:
        yield
    finally:
        _backend, _strict = before


def wants_triton(x: Tensor) -> bool:
    """Whether ops on x's device run Triton kernels."""
    if _backend == "aten" or not (HAVE_TRITON and (x.is_cuda or INTERPRET)):
        if _backend == "triton":
            raise RuntimeError(
                f"FASTVIT_BACKEND=triton, but Triton cannot run on {x.device}: "
                + ("set TRITON_INTERPRET=1 for CPU tensors" if HAVE_TRITON else "triton is not installed")
            )
        return False
    return True


def register(
    schema: str,
    *,
    aten: Callable[..., Any],
    triton: Callable[..., Any],
    fake: Callable[..., Any],
    flops: Callable[..., int] | None = None,
) -> Callable[..., Any]:
    """Defines `fastvit::<schema>` and returns the function that the rest of the package calls: the registered op, or,
    where nothing could tell the difference, its implementation without the dispatcher's 3 us (see `_shortcut`).

    schema: "name(Tensor x, ...) -> ..."; the first argument is a tensor on the op's device. No argument is mutated
        and no output aliases an input or another output.
    aten, triton: positional arguments as in the schema. `triton` raises `Unsupported` before it launches.
    fake: the same on fake tensors; shapes, dtypes and strides exactly as both implementations return them.
    flops: as `torch.utils.flop_counter.register_flop_formula` takes it, shapes for tensors, `out_shape` by keyword.
    """
    name = schema[: schema.index("(")]

    def run(*args: Any) -> Any:
        # An op works in the dtypes that it chose, and its gradient is its FusedFunction's: no autocast inside (which
        # refuses meta tensors) and no autograd, which is on where an exported program calls the op itself.
        kind = args[0].device.type
        if kind != "meta" and torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False), torch.no_grad():
                return choose(*args)
        if torch.is_grad_enabled():
            with torch.no_grad():
                return choose(*args)
        return choose(*args)

    def choose(*args: Any) -> Any:
        if wants_triton(args[0]):
            try:
                if args[0].is_cuda and args[0].device.index != torch.cuda.current_device():
                    with torch.cuda.device(args[0].device):
                        return triton(*args)
                return triton(*args)
            except Unsupported as reason:
                _fall_back(name, str(reason))
        return aten(*args)

    _LIB.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    _LIB.impl(name, run, "CPU")
    _LIB.impl(name, run, "CUDA")
    torch.library.register_fake(f"fastvit::{name}", fake, lib=_LIB)
    overload: torch._ops.OpOverload = getattr(torch.ops.fastvit, name).default
    if flops is not None:
        from torch.utils.flop_counter import register_flop_formula

        register_flop_formula(getattr(torch.ops.fastvit, name))(flops)

    def op(*args: Any) -> Any:
        kernels = _shortcut(args)
        if kernels is None:
            return overload(*args)
        return choose(*args) if kernels else aten(*args)

    op.chosen, op.aten = choose, aten  # type: ignore[attr-defined]
    return op


class Together:
    """Several registered ops, for functions that call them in a row and ask only once how."""

    def __init__(self, *ops: Any) -> None:
        self._ops = ops
        self._chosen = tuple(op.chosen for op in ops)
        self._aten = tuple(op.aten for op in ops)

    def settle(self, args: tuple[Any, ...]) -> tuple[Callable[..., Any], ...]:
        """The ops, or their implementations where nothing could tell the difference for calls with these arguments and
        with what comes of them."""
        kernels = _shortcut(args)
        if kernels is None:
            return self._ops
        return self._chosen if kernels else self._aten


# The types of an op's arguments, without tensor subclasses: fake, distributed, a tracer's
_PLAIN = frozenset({Tensor, Parameter, type(None), bool, int, float, str, torch.dtype})


def _shortcut(args: tuple[Any, ...]) -> bool | None:
    """Whether Triton kernels run, if the dispatcher would lead from the registered op straight to its implementation,
    so that calling that at once is the same; else None. It would for plain CPU or CUDA tensors, no mode (fake tensors,
    FLOP counters, checkpoint policies, tracers), no functorch transform, no autocast to switch off, no profiler to
    tell. Kernels also need lazy negations carried out (as gradients of conj() have), which ATen's functions do
    themselves. Autograd is the FusedFunctions' part."""
    if (
        is_dynamo_compiling()
        or not _PLAIN.issuperset(map(type, args))
        or not (args[0].is_cpu or args[0].is_cuda)
        or _len_torch_dispatch_stack()
        or _is_torch_function_mode_enabled()
        or _are_functorch_transforms_active()
        or _is_any_autocast_enabled()
        or _is_tracing()
        or _profiler_enabled()
    ):
        return None
    if not wants_triton(args[0]):
        return False
    if any(isinstance(a, Tensor) and (a.is_neg() or a._is_zerotensor()) for a in args):
        return None
    return True


def _fall_back(name: str, reason: str) -> None:
    if _strict:
        raise Unsupported(f"fastvit::{name}: {reason}")
    if (name, reason) not in _warned:
        _warned.add((name, reason))
        warnings.warn(f"fastvit::{name} runs on ATen instead of Triton: {reason}", stacklevel=5)


@functools.cache
def _cuda_arch(index: int) -> str:
    """Also takes over what was tuned for this model of GPU: configs depend on it and on shapes only."""
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        arch = str(properties.gcnArchName).split(":")[0]
    else:
        arch = f"sm_{properties.major}{properties.minor}"
    _tuned.load(arch, properties.name)
    return arch


@functools.cache
def multiprocessors(index: int | None) -> int:
    """Streaming multiprocessors of a GPU; 4 in the interpreter, so that persistent loops iterate there too."""
    return 4 if index is None else torch.cuda.get_device_properties(index).multi_processor_count


def arch(x: Tensor) -> str:
    """The target that launch configs are chosen for: "sm_90", "gfx942", ...; the interpreter takes Hopper's."""
    return _cuda_arch(x.device.index) if x.is_cuda else "sm_90"


def stat_dtype(x: Tensor) -> torch.dtype:
    """Of statistics, softmax and sums over x: float32, or float64 for float64."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def dot_precision(x: Tensor) -> str:
    """`tl.dot`'s input_precision for x: float32 follows PyTorch's setting, 16-bit operands are exact either way."""
    tf32 = x.dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest"
    return "tf32" if tf32 else "ieee"


def transforming() -> bool:
    """Whether a functorch transform (vmap, grad, ...) is active."""
    return _are_functorch_transforms_active()


def needs_autograd(*tensors: Tensor | None) -> bool:
    """Whether a call must go through its `autograd.Function`. Raises where a tensor carries a forward-mode tangent,
    which an opaque op would drop silently."""
    if forward_ad._current_level >= 0:
        for t in tensors:
            if t is not None and forward_ad.unpack_dual(t).tangent is not None:
                name = sys._getframe(1).f_code.co_name
                raise NotImplementedError(f"fastvit.ops.{name} does not support forward-mode AD")
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return True
    return False


def distinct(*tensors: Tensor | None) -> tuple[Any, ...]:
    """The arguments with repeats replaced by views while torch.compile traces, which refuses to see one tensor twice
    among a Function's inputs, as in linear(x, weight, residual=x)."""
    if not is_dynamo_compiling():
        return tensors
    seen: list[Tensor | None] = []
    for t in tensors:
        repeated = t is not None and any(t is other for other in seen)
        seen.append(t.view_as(t) if t is not None and repeated else t)
    return tuple(seen)


class FusedFunction(torch.autograd.Function):
    """Base of the ops' gradients. Subclasses define `forward`, `setup_context` and `backward`, and call ops in
    `backward` through `once`, so that differentiating a second time raises instead of returning a wrong gradient."""

    generate_vmap_rule = True

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """As torch's own, which inspects the signature of `forward` on every call to fill in defaults: 20 us that no
        op here needs, since all arguments are given."""
        if _are_functorch_transforms_active():
            return super().apply(*args)
        args = tuple([unwrap_if_dead(a) if isinstance(a, Tensor) else a for a in args])
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]


class _Once(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(name: str, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(f"fastvit.ops.{ctx.name} does not support double backward")


def once(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """function(*args) inside a backward pass; a second differentiation raises and names the op."""
    if torch.is_grad_enabled():
        return _Once.apply(name, function, *args)
    return function(*args)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast wants on x's device, or None outside autocast and for float64 input."""
    if not _is_any_autocast_enabled():
        return None
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype is not torch.float64:
        return torch.get_autocast_dtype(kind)
    return None
