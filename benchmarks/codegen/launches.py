"""Which kernels, with which launch parameters, the package launches: found by running its ops, so nothing can drift.

The public ops run forward and backward on meta tensors (no memory, no arithmetic) at the shapes of real models. Their
registered ops are sent to the Triton launchers, and Triton's own binder turns each launch into types, alignments,
constants and options for the target GPU; then, instead of compiling and launching, the launch is recorded.

    for launch in record(workloads("kernels", ops=("layer_norm",)), target="sm_90", dtypes=["bf16"]):
        print(launch.name, launch.workload, launch.compile().registers)
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest import mock

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.driver import DriverBase

from benchmarks.codegen.aot import TARGETS, Compiled, compile_source
from benchmarks.codegen.stub_driver import in_library
from benchmarks.harness.draw import Draw
from benchmarks.harness.workloads import Workload
from fastvit.ops import _library

T = TypeVar("T")

# "tf32" and "amp" are float32 tensors: with matmul precision "high", and under autocast to bfloat16.
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16} | dict.fromkeys(("fp32", "tf32", "amp"), torch.float32)


@dataclass(frozen=True)
class Launch:
    """One kernel as one workload launches it on one target."""

    kernel: Any  # triton.JITFunction
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attrs: dict[tuple[int, ...], Any]
    options: dict[str, Any]
    target: str
    dtype: str
    workload: str  # of the first workload that launches it so
    granule: int  # bytes that lie together and aligned in its tensors, at most 16

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    @property
    def constexprs(self) -> dict[str, Any]:
        """By name: compile-time parameters, absent pointers, scalars equal to 1."""
        return {self.kernel.arg_names[i]: value for (i,), value in self.constants.items()}

    def compile(self) -> Compiled:
        return compile_source(
            self.kernel, self.signature, self.constants, self.attrs, self.options,
            target=self.target, granule=self.granule, dtype=self.dtype,
        )  # fmt: skip


class _Recorder(DriverBase):
    """Stands in for a GPU driver: names the target, so that Triton's launch code runs as it would there."""

    def __init__(self, target: str) -> None:
        super().__init__()
        self.target = target
        self.dtype, self.workload = "bf16", ""
        self.granule = 16
        self.launches: dict[str, Launch] = {}

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> Any:
        return TARGETS[self.target].gpu

    def get_current_device(self) -> str:
        return self.target

    def get_current_stream(self, device: str) -> int:
        return 0

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("nothing is launched here")

    get_active_torch_device = get_benchmarker = map_python_to_cpp_type

    def hook(self, *, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        """Triton's jit_cache_hook: called where a kernel would be compiled; True means: do not."""
        options = json.loads(compile["specialization_data"])["options"]
        options = {name: value for name, value in options.items() if not isinstance(value, list)}
        launch = Launch(
            fn.jit_function, compile["signature"], compile["constants"], compile["configs"][0], options,
            self.target, self.dtype, self.workload, self.granule,
        )  # fmt: skip
        self.launches.setdefault(f"{fn.module}:{fn.name}:{key}", launch)
        return True


class _ToLaunchers(TorchDispatchMode):
    """Sends registered ops on meta tensors to the implementation that real tensors get, not to the fake one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fastvit":
            return func._op_dk(torch._C.DispatchKey.CPU, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def recording(target: str) -> Iterator[_Recorder]:
    """Within the context no launch runs: each is kept, once, in `launches` of what this yields."""
    recorder = _Recorder(target)
    library = in_library(
        wants_triton=lambda x: True,
        arch=lambda x: target,
        multiprocessors=lambda index: TARGETS[target].sms,
        autocast_dtype=lambda x: torch.bfloat16 if recorder.dtype == "amp" else None,  # refuses the meta device
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(library)
        stack.enter_context(mock.patch.object(triton.knobs.runtime, "jit_cache_hook", recorder.hook))
        stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", recorder))
        stack.enter_context(_library.use_backend("auto", strict=True))
        stack.enter_context(_ToLaunchers())
        yield recorder


def _granule(workload: Workload, dtype: torch.dtype) -> int:
    """Bytes, at most 16, that lie together and aligned in all of its tensors: multiples of 8 elements, a patch's
    width, half a head or an odd hidden size."""
    sizes = workload.sizes
    itemsize = 1 if sizes.get("image") == "uint8" else dtype.itemsize
    half = sizes["d"] // 2 if sizes.get("spelling") == "halves" else 8
    return math.gcd(*(elements * itemsize for elements in (half, sizes.get("patch", 8), sizes.get("hidden", 8))), 16)


def record(workloads: Iterable[Workload], target: str, dtypes: Iterable[str] = tuple(DTYPES)) -> list[Launch]:
    """Every distinct launch of the workloads: kernel, types, alignments, constants and options."""
    before = torch.get_float32_matmul_precision()
    with recording(target) as recorder:
        try:
            for dtype in dtypes:
                recorder.dtype = dtype
                torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
                for workload in workloads:
                    recorder.workload = f"{workload.op} {workload}"
                    recorder.granule = _granule(workload, DTYPES[dtype])
                    runner = workload.runner("fused", Draw(DTYPES[dtype], "meta"))
                    runner.gradients(tuple(torch.empty_like(out) for out in runner.outputs()))
        finally:
            torch.set_float32_matmul_precision(before)
    return list(recorder.launches.values())


def compile_all(launches: list[Launch]) -> Iterator[tuple[Launch, Compiled | str]]:
    """In a process a core, in order; a string says why a kernel did not compile."""
    return in_processes(Launch.compile, launches)


def in_processes(
    function: Callable[[Launch], T], launches: list[Launch], workers: int | None = None
) -> Iterator[tuple[Launch, T | str]]:
    """Each launch with function(launch), in order, or with the error that this raised, as a string."""
    global _pending
    _pending = launches, function
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        yield from zip(launches, pool.map(_work_off, range(len(launches))), strict=True)


_pending: tuple[list[Launch], Callable[[Launch], Any]]  # reaches the workers by fork: a kernel cannot be pickled


def _work_off(index: int) -> Any:
    launches, function = _pending
    try:
        return function(launches[index])
    except Exception as error:  # of the compiler's C++ part: its reason is on stderr
        return f"{type(error).__name__}: {error}"
