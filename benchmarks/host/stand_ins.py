"""Replace ATen's CPU kernels by stand-ins that only allocate their results (stand_ins.cpp), to time the host alone."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile
from torch.utils.cpp_extension import include_paths, library_paths

from fastvit.ops.runtime.backend import hidden_from_profilers

SOURCE = Path(__file__).with_suffix(".cpp")
_ALLOCATIONS = {"aten::empty.memory_format", "aten::empty_strided", "aten::_unsafe_view"}


def compiled() -> Path:
    """Compile the stand-ins, once for a version of them and of PyTorch. Return the library, in ~/.cache/fastvit.

    Raises:
        RuntimeError: there is no compiler of the name in CXX, or c++.
    """
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        raise RuntimeError("stand-ins for PyTorch's kernels need a C++ compiler: install g++, or set CXX")
    digest = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "fastvit", f"stand_ins-{digest}.so")
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        where = [*(f"-isystem{path}" for path in include_paths()), *(f"-L{path}" for path in library_paths())]
        command = [compiler, "-O2", "-shared", "-fPIC", "-std=c++20", *where, str(SOURCE), "-ltorch_cpu", "-lc10"]
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:  # another process sees all of it or nothing
            new = Path(folder, library.name)
            subprocess.run([*command, "-o", new], check=True)
            new.rename(library)
    return library


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Within the context, PyTorch's functions compute nothing on the CPU: their results are not initialised."""
    library = ctypes.CDLL(str(compiled()))
    library.replace_kernels.restype, library.restore_kernels.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    kernels = library.replace_kernels()
    try:
        yield
    finally:
        library.restore_kernels(kernels)


def real_work(steps: Iterable[Callable[[], object]]) -> set[str]:
    """Run the steps; return the functions of ATen that still compute something in them.

    The profiler sees more than a dispatch mode: calls within functions, and the sums in place that autograd makes only
    where no mode is active.
    """
    overloads = _ExperimentalConfig(capture_overload_names=True)
    with hidden_from_profilers(), profile(activities=[ProfilerActivity.CPU], experimental_config=overloads) as profiled:
        for step in steps:
            step()
    events = [event for event in profiled.events() or () if event.name.startswith("aten::")]
    calls = {(event.name.removeprefix("aten::"), event.overload_name, bool(event.cpu_children)) for event in events}
    overload = {call: getattr(getattr(torch.ops.aten, call[0]), call[1] or "default") for call in calls}
    return {op.name() for (*_, has_calls), op in overload.items() if _computes(op, has_calls)}


def _computes(op: torch._ops.OpOverload, has_calls: bool) -> bool:
    """Return whether the op is not replaced, no view, no allocation, and not made of other functions."""
    name = op.name()
    if op.is_view or name in _ALLOCATIONS:
        return False
    if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU"):
        return SOURCE.name not in torch._C._dispatch_dump(name)
    return not has_calls and not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
