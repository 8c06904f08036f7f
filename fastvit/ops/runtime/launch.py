"""Launch kernels. No other module calls one.

Triton's own `kernel[grid](...)` binds and classifies every argument and builds a string of them all, on every call:
some 16 us of Python for a kernel of 47 arguments, more than a small kernel runs. Here Triton does so once for each set
of values that it distinguishes; the kernel that it compiled is kept and then called directly, in 3 to 4.5 us
(`python -m benchmarks.host`, without CUDA's own 2 us).

Triton's public launch path is used when a profiler hooks launches, in the interpreter, on AMD GPUs (where kernels also
depend on the size of tensors), and with versions of Triton whose internals have not been compared.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError
from triton.runtime import driver

from fastvit.ops.runtime import backend, call, device, record
from fastvit.ops.runtime.backend import KernelUnsupported

# Versions in which `Compiled` is called as below, and a CUDA kernel depends on nothing outside the key of `launch`
_DIRECT = triton.__version__.startswith(("3.6.", "3.7.", "3.8.", "3.9."))
_allocation: Any = importlib.import_module("triton.runtime._allocation") if _DIRECT else None
OPTIONS = {"enable_fp_fusion": True}  # for every launch: Triton 3.9 warns that 3.10 will not fuse by default
_runtime = triton.knobs.runtime
_MOST = 50_000  # entries, some 500 bytes each; then the cache is cleared

Key = tuple[Any, ...]
Constants = dict[str, Any]


class Compiled(NamedTuple):
    """A kernel as Triton's launcher takes it, on one device. constexprs: a placeholder for each; the launcher skips
    them."""

    run: Callable[..., object]
    stream: Callable[[int], int]  # the current one of a device
    device: int
    function: int
    metadata: object
    constexprs: tuple[Any, ...]
    kernel: object  # held, because Triton 3.9 unloads the code with the last reference


@triton.jit
def _dot_kernel(x_ptr, out_ptr):  # type: ignore[no-untyped-def]
    index = tl.arange(0, 16)
    at = index[:, None] * 16 + index[None, :]
    x = tl.load(x_ptr + at)
    tl.store(out_ptr + at, tl.dot(x, x, input_precision="ieee"))


@functools.cache
def warn_of_bfloat16() -> None:
    """Warn once a process if Triton's interpreter multiplies bfloat16 wrongly. On its own it multiplies the raw 16-bit
    patterns as integers; the tests replace its `tl.dot`."""
    ones, out = torch.ones(16, 16, dtype=torch.bfloat16), torch.empty(16, 16)
    _dot_kernel[(1,)](ones, out)
    if not bool((out == 16.0).all()):
        warnings.warn(
            f"Triton's interpreter (TRITON_INTERPRET=1) multiplies bfloat16 wrongly: 16 ones have the product sum "
            f"{out[0, 0]:.3g}. fastvit's results in bfloat16 are wrong here; on a GPU they are not, and "
            "FASTVIT_BACKEND=aten is right, too",
            stacklevel=2,
        )


def _in_interpreter(kernel: Any, programs: int, tensors: Any, numbers: Any, constants: Constants) -> None:
    if any(t is not None and t.dtype is torch.bfloat16 for t in tensors):
        warn_of_bfloat16()
    kernel[(programs,)](*tensors, *numbers, **constants)


# called instead of a launch, see `launching`
_instead: Callable[..., object] | None = _in_interpreter if backend.INTERPRET else None


@contextlib.contextmanager
def launching(function: Callable[..., object]) -> Iterator[None]:
    """Call the function with the arguments of `launch`, instead of `launch`, within the context."""
    global _instead
    before = _instead
    with call.forgotten():
        _instead = function
        try:
            yield
        finally:
            _instead = before


@contextlib.contextmanager
def nothing_launched(multiprocessors: int) -> Iterator[None]:
    """Launch nothing within the context, to plan memory: launchers allocate what they would on a GPU with so many
    multiprocessors."""
    before = backend.INTERPRET, device.without_gpu
    with launching(lambda *_: None):
        backend.INTERPRET, device.without_gpu = False, multiprocessors
        try:
            yield
        finally:
            backend.INTERPRET, device.without_gpu = before


_compiled: dict[Key, Compiled] = {}
_refused: dict[Key, str] = {}  # why a GPU or the compiler does not take a kernel
_triton = threading.RLock()


def launch(
    kernel: Any, programs: int, tensors: tuple[Tensor | None, ...], numbers: tuple[float, ...], constants: Constants
) -> Compiled | None:
    """Run kernel[(programs,)](*tensors, *numbers, **constants) on the current device and stream; do nothing for no
    programs.

    A kernel's parameters are tensors, then numbers, some of which may be constexprs, then constexprs only. constants
    holds the latter and launch options, always in the same order for one kernel. Return what the same launch may call
    directly on other tensors whose addresses are multiples of 16, or None. Raise `KernelUnsupported` if the kernel does
    not compile or fit: in every call, but it is compiled only once.
    """
    if programs == 0:
        return None
    if _instead is not None:
        _instead(kernel, programs, tensors, numbers, constants)
        return None
    pointers = [0 if t is None else t.data_ptr() for t in tensors]
    device = driver.active.get_current_device()
    # almost always 0: every pointer is a multiple of 16
    unaligned = functools.reduce(operator.or_, pointers) & 15 and tuple([p & 15 == 0 for p in pointers])
    key = (
        kernel.fn,  # JITFunction's own hash is computed in Python
        device,
        unaligned,
        tuple([None if t is None else t.dtype for t in tensors]),
        numbers,
        tuple(constants.values()),
    )
    compiled = _compiled.get(key)
    if compiled is None or _watched():
        return _by_triton(key, kernel, programs, (*tensors, *numbers), constants)
    run, stream, _, function, metadata, constexprs, _ = compiled
    run(programs, 1, 1, stream(device), function, metadata, None, None, None, *pointers, *numbers, *constexprs)
    return None if unaligned else compiled


class Launch(NamedTuple):
    """A launch without its tensors. unaligned: what is called instead if an address is not a multiple of 16, or the
    kernel does not compile: another launch or a function; None: the same."""

    kernel: Any
    programs: int
    numbers: tuple[float, ...]
    constants: Constants
    unaligned: Launch | Callable[..., object] | None = None

    def __call__(self, *tensors: Tensor | None) -> None:
        if (recorder := record.current()) is not None:
            recorder.launch(self, tensors)
        else:
            self.directly(*tensors)

    def directly(self, *tensors: Tensor | None) -> Any:
        """Launch. Return what the same launch may call on other tensors whose addresses are multiples of 16: a
        function, its arguments before the stream, a function that returns the stream, and arguments before and after
        the addresses. None where `launch` must not be left out."""
        if (unaligned := self.unaligned) is not None and not all(map(_is_aligned, tensors)):
            unaligned(*tensors)
            return None
        try:
            compiled = launch(self.kernel, self.programs, tensors, self.numbers, self.constants)
        except KernelUnsupported as reason:
            if unaligned is None or backend.settings()[1]:
                raise
            warnings.warn(f"another kernel runs: {reason}", stacklevel=2)
            unaligned(*tensors)
            return None
        if compiled is None:
            return None
        run, stream, device, function, metadata, rest, _ = compiled
        before, after = (self.programs, 1, 1), (function, metadata, None, None, None)
        return run, before, functools.partial(stream, device), after, (*self.numbers, *rest)


def _is_aligned(t: Tensor | None) -> bool:
    return t is None or device.is_fake(t) or t.data_ptr() & 15 == 0


def has_gluon() -> bool:
    """Return whether kernels in Gluon run here: in the versions of Triton that they were compiled with."""
    return backend.GLUON and _DIRECT and not backend.INTERPRET


def cdiv(a: int, b: int) -> int:
    """Return ceil(a / b); `triton.cdiv` takes 3 us on the host."""
    return -(-a // b)


def _watched() -> bool:
    """Return whether a profiler hooks launches."""
    for hook in (_runtime.launch_enter_hook, _runtime.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):  # a chain of hooks, in some versions a single one
            return True
    return False


call.launches_are_watched = _watched


def _by_triton(
    key: Key, kernel: Any, programs: int, arguments: tuple[Any, ...], constants: Constants
) -> Compiled | None:
    """Launch by Triton, which compiles if it has to, and keep what it launched."""
    with _triton:
        if (reason := _refused.get(key)) is not None:
            raise KernelUnsupported(reason)
        if by_tma := constants.get("TMA", False):
            _set_allocator()
        try:
            compiled = kernel[(programs,)](*arguments, **constants, **OPTIONS)
        except (TritonError, RuntimeError) as error:
            if not isinstance(error, TritonError) and "PassManager" not in str(error):  # not the compiler's error
                raise
            _refused[key] = f"{kernel.__name__} does not compile or fit: {error}"
            raise KernelUnsupported(_refused[key]) from error
        target = getattr(getattr(compiled, "metadata", None), "target", None)
        if _DIRECT and getattr(target, "backend", None) == "cuda":
            if len(_compiled) >= _MOST:
                _compiled.clear()
            constexprs = (None,) * (len(kernel.arg_names) - len(arguments))
            stream, packed = driver.active.get_current_stream, compiled.packed_metadata
            run = _with_scratch(compiled.run) if by_tma else compiled.run
            if (by_address := getattr(kernel, "by_address", None)) is not None:
                run = by_address(run, arguments)
            kept = Compiled(run, stream, key[1], compiled.function, packed, constexprs, compiled)
            _compiled[key] = kept
            return None if key[2] else kept
    return None


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Allocate what a kernel writes TMA descriptors to. Like any tensor's, the memory belongs to the current stream, or
    to the graph that is captured, and is used again by what follows there."""
    return torch.empty(size, dtype=torch.uint8, device="cuda")  # at a multiple of 512 bytes


def _set_allocator() -> None:
    """Give Triton an allocator, unless it has one: each thread has its own."""
    if not _DIRECT or isinstance(_allocation._allocator.get(), _allocation.NullAllocator):
        triton.set_allocator(_scratch)


def _with_scratch(run: Callable[..., object]) -> Callable[..., object]:
    def with_scratch(*arguments: Any) -> None:
        _set_allocator()
        run(*arguments)

    return with_scratch
