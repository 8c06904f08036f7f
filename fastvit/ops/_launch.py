"""How a kernel is called: the only module that knows.

Triton's own `kernel[grid](...)` binds and classifies every argument and makes a text of them all, on every call:
some 17 us of Python for a kernel of 40 arguments, more than a small one runs. Here Triton does so once for each set of
values that it could tell apart; the kernel that it has compiled for them is kept, and called directly from then on, in
3 to 4 us (`python -m benchmarks.harness.launch`).

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

import triton
from torch import Tensor
from triton.errors import TritonError
from triton.runtime import driver

from fastvit.ops import _library
from fastvit.ops._library import Unsupported

# In these `Compiled` is called as below, and a CUDA kernel depends on nothing that the key of `launch` has not
_DIRECT = triton.__version__.startswith(("3.6.", "3.7.", "3.8."))
_MOST = 50_000  # entries, some 500 bytes each: as many shapes in one process, and all begin anew

Key = tuple[Any, ...]
Constants = dict[str, Any]
Call = tuple[Any, int, tuple[Tensor | None, ...], tuple[float, ...], Constants]  # the arguments of `launch`


class Compiled(NamedTuple):
    """A kernel as Triton's launcher takes it. constexprs: a place for each, which the launcher skips."""

    run: Callable[..., object]
    function: int
    metadata: object
    constexprs: tuple[None, ...]


_elsewhere = "interpreter" if _library.INTERPRET else ""  # than on a GPU: there, or "nowhere"


@contextlib.contextmanager
def nothing_launched(multiprocessors: int) -> Iterator[None]:
    """Within the context launchers allocate what they would on a GPU of so many multiprocessors, and launch nothing:
    how memory is planned."""
    global _elsewhere
    before = _elsewhere, _library.INTERPRET, _library.without_gpu
    _elsewhere, _library.INTERPRET, _library.without_gpu = "nowhere", False, multiprocessors
    try:
        yield
    finally:
        _elsewhere, _library.INTERPRET, _library.without_gpu = before


_compiled: dict[Key, Compiled] = {}
_refused: dict[Key, str] = {}  # why a GPU or the compiler does not take a kernel
_triton = threading.RLock()


def launch(
    kernel: Any, programs: int, tensors: tuple[Tensor | None, ...], numbers: tuple[float, ...], constants: Constants
) -> None:
    """kernel[(programs,)](*tensors, *numbers, **constants), on the current device and stream.

    A kernel's parameters are tensors, then numbers, of which some may be constexprs, then constexprs only; constants
    are the latter and launch options, in one order for one kernel. Raises `Unsupported` where it does not compile or
    fit: each time, but is compiled only once.
    """
    if _elsewhere:
        if _elsewhere == "interpreter":
            kernel[(programs,)](*tensors, *numbers, **constants)
        return
    pointers = [0 if t is None else t.data_ptr() for t in tensors]
    device = driver.active.get_current_device()
    key = (
        kernel.fn,  # JITFunction's own hash is computed in Python
        device,
        # almost always 0: every pointer is a multiple of 16
        functools.reduce(operator.or_, pointers) & 15 and tuple([p & 15 == 0 for p in pointers]),
        tuple([None if t is None else t.dtype for t in tensors]),
        numbers,
        tuple(constants.values()),
    )
    compiled = _compiled.get(key)
    if compiled is None or _watched():
        _by_triton(key, kernel, programs, (*tensors, *numbers), constants)
        return
    run, function, metadata, constexprs = compiled
    stream = driver.active.get_current_stream(device)
    run(programs, 1, 1, stream, function, metadata, None, None, None, *pointers, *numbers, *constexprs)


def cdiv(a: int, b: int) -> int:
    """ceil(a / b) on the host, where `triton.cdiv` takes 3 us."""
    return -(-a // b)


def _watched() -> bool:
    """Whether a profiler hooks launches."""
    runtime = triton.knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):  # a chain of hooks, in some versions a single one
            return True
    return False


def _by_triton(key: Key, kernel: Any, programs: int, arguments: tuple[Any, ...], constants: Constants) -> None:
    """Triton's own launch, which compiles where it has to; what it launched is kept."""
    with _triton:
        if (reason := _refused.get(key)) is not None:
            raise Unsupported(reason)
        try:
            compiled = kernel[(programs,)](*arguments, **constants)
        except (TritonError, RuntimeError) as error:
            if not isinstance(error, TritonError) and "PassManager" not in str(error):  # no error of the compiler
                raise
            _refused[key] = f"{kernel.__name__} does not compile or fit: {error}"
            raise Unsupported(_refused[key]) from error
        target = getattr(getattr(compiled, "metadata", None), "target", None)
        if _DIRECT and getattr(target, "backend", None) == "cuda":
            if len(_compiled) >= _MOST:
                _compiled.clear()
            constexprs = (None,) * (len(kernel.arg_names) - len(arguments))
            _compiled[key] = Compiled(compiled.run, compiled.function, compiled.packed_metadata, constexprs)
