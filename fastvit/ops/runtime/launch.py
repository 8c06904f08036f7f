"""How a kernel is called: the only module that knows.

Triton's own `kernel[grid](...)` binds and classifies every argument and makes a text of them all, on every call:
some 17 us of Python for a kernel of 40 arguments, more than a small one runs. Here Triton does so once for each set of
values that it could tell apart; the kernel that it has compiled for them is kept, and called directly from then on, in
3 to 4 us (`python -m benchmarks.host.launch`).

Triton's public way it stays wherever somebody watches launches (profilers hook them), in the interpreter, on AMD GPUs
(where kernels also depend on the size of tensors), and with versions of Triton that nobody has compared.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.errors import TritonError
from triton.runtime import driver

from fastvit.ops.runtime import devices, dispatch, plans
from fastvit.ops.runtime.dispatch import KernelUnsupported
from fastvit.ops.runtime.interpreter import warn_of_bfloat16

# In these `Compiled` is called as below, and a CUDA kernel depends on nothing that the key of `launch` has not
_DIRECT = triton.__version__.startswith(("3.6.", "3.7.", "3.8.", "3.9."))
OPTIONS = {"enable_fp_fusion": True}  # of every launch. Triton 3.9 warns that 3.10 will not fuse by default
_runtime = triton.knobs.runtime
_MOST = 50_000  # entries, some 500 bytes each: as many shapes in one process, and all begin anew

Key = tuple[Any, ...]
Constants = dict[str, Any]


class Compiled(NamedTuple):
    """A kernel as Triton's launcher takes it, on one device. constexprs: a place for each, which the launcher skips."""

    run: Callable[..., object]
    stream: Callable[[int], int]  # the current one of a device
    device: int
    function: int
    metadata: object
    constexprs: tuple[Any, ...]
    kernel: object  # whose code Triton 3.9 unloads once nobody holds it


def _in_interpreter(kernel: Any, programs: int, tensors: Any, numbers: Any, constants: Constants) -> None:
    if any(t is not None and t.dtype is torch.bfloat16 for t in tensors):
        warn_of_bfloat16()
    kernel[(programs,)](*tensors, *numbers, **constants)


# What launches kernels in place of a GPU
_instead: Callable[..., object] | None = _in_interpreter if dispatch.INTERPRET else None


@contextlib.contextmanager
def launching(function: Callable[..., object]) -> Iterator[None]:
    """Within the context launchers call this with the arguments of `launch`, in its place."""
    global _instead
    before = _instead
    with plans.forgotten():
        _instead = function
        try:
            yield
        finally:
            _instead = before


@contextlib.contextmanager
def nothing_launched(multiprocessors: int) -> Iterator[None]:
    """Within the context launchers allocate what they would on a GPU of so many multiprocessors, and launch nothing:
    how memory is planned."""
    before = dispatch.INTERPRET, devices.without_gpu
    with launching(lambda *_: None):
        dispatch.INTERPRET, devices.without_gpu = False, multiprocessors
        try:
            yield
        finally:
            dispatch.INTERPRET, devices.without_gpu = before


_compiled: dict[Key, Compiled] = {}
_refused: dict[Key, str] = {}  # why a GPU or the compiler does not take a kernel
_triton = threading.RLock()


def launch(
    kernel: Any, programs: int, tensors: tuple[Tensor | None, ...], numbers: tuple[float, ...], constants: Constants
) -> Compiled | None:
    """kernel[(programs,)](*tensors, *numbers, **constants), on the current device and stream; nothing for no programs.

    A kernel's parameters are tensors, then numbers, of which some may be constexprs, then constexprs only; constants
    are the latter and launch options, in one order for one kernel. Raises `Unsupported` where it does not compile or
    fit: each time, but is compiled only once. -> what the same launch may call directly, on tensors of other addresses
    that are multiples of 16, or None.
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


class Launch:
    """A launch but for its tensors, which look alike in every call, for `plans.Plans`: what two launches of one kernel
    may differ in is then where tensors lie, and that is soon compared."""

    __slots__ = ("_direct", "constants", "kernel", "numbers", "programs")

    def __init__(self, kernel: Any, programs: int, numbers: tuple[float, ...], constants: Constants) -> None:
        self.kernel, self.programs, self.numbers, self.constants = kernel, programs, numbers, constants
        self._direct: Compiled | None = None  # of aligned tensors, the numbers before the constexprs

    def __call__(self, *tensors: Tensor | None) -> None:
        if self._direct is not None:
            pointers = [0 if t is None else t.data_ptr() for t in tensors]
            if not functools.reduce(operator.or_, pointers) & 15:
                run, stream, device, function, metadata, rest, _ = self._direct
                run(self.programs, 1, 1, stream(device), function, metadata, None, None, None, *pointers, *rest)
                return
        compiled = launch(self.kernel, self.programs, tensors, self.numbers, self.constants)
        if compiled is not None:
            self._direct = compiled._replace(constexprs=(*self.numbers, *compiled.constexprs))


def cdiv(a: int, b: int) -> int:
    """ceil(a / b) on the host, where `triton.cdiv` takes 3 us."""
    return -(-a // b)


def _watched() -> bool:
    """Whether a profiler hooks launches."""
    for hook in (_runtime.launch_enter_hook, _runtime.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):  # a chain of hooks, in some versions a single one
            return True
    return False


plans.launches_are_watched = _watched


def _by_triton(
    key: Key, kernel: Any, programs: int, arguments: tuple[Any, ...], constants: Constants
) -> Compiled | None:
    """Triton's own launch, which compiles where it has to; what it launched is kept."""
    with _triton:
        if (reason := _refused.get(key)) is not None:
            raise KernelUnsupported(reason)
        try:
            compiled = kernel[(programs,)](*arguments, **constants, **OPTIONS)
        except (TritonError, RuntimeError) as error:
            if not isinstance(error, TritonError) and "PassManager" not in str(error):  # no error of the compiler
                raise
            _refused[key] = f"{kernel.__name__} does not compile or fit: {error}"
            raise KernelUnsupported(_refused[key]) from error
        target = getattr(getattr(compiled, "metadata", None), "target", None)
        if _DIRECT and getattr(target, "backend", None) == "cuda":
            if len(_compiled) >= _MOST:
                _compiled.clear()
            constexprs = (None,) * (len(kernel.arg_names) - len(arguments))
            stream, packed = driver.active.get_current_stream, compiled.packed_metadata
            kept = Compiled(compiled.run, stream, key[1], compiled.function, packed, constexprs, compiled)
            _compiled[key] = kept
            return None if key[2] else kept
    return None
