"""Record the kernels that a step or ops launch, and compile them in several processes, without a GPU.

Ops run on meta tensors, without memory and arithmetic. Registered ops go to the Triton launchers, and Triton's own
binder turns each launch into types, alignments, constants and options for the target GPU. Then the launch is recorded
instead of compiled and run. A kernel compiled from the record has the cache key of the launch, so Triton finds it in
its cache later.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest import mock

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from fastvit.ops.runtime import backend as backends
from fastvit.ops.runtime import device as devices
from fastvit.ops.runtime import dtypes, record, registry
from fastvit.ops.runtime.backend import KernelUnsupported, Route
from fastvit.study.machine import why_no_gpu
from fastvit.study.memory.allocations import without_data
from fastvit.study.memory.plan import trace_step
from fastvit.study.memory.step import StepSpec

T = TypeVar("T")
L = TypeVar("L", bound="Launch")

# target -> multiprocessors of a common GPU: A100, A40, L40S, H100, B200, RTX 5090, MI300X
MULTIPROCESSORS = {"sm_80": 108, "sm_86": 84, "sm_89": 142, "sm_90": 132, "sm_100": 148, "sm_120": 170, "gfx942": 304}


def gpu_target(arch: str) -> GPUTarget:
    """Return Triton's target for "sm_90", "gfx942" and the like."""
    return GPUTarget("hip", arch, 64) if arch.startswith("gfx") else GPUTarget("cuda", int(arch[3:]), 32)


@dataclass(frozen=True)
class Launch:
    """One kernel as it is launched on one target. The fields are what Triton compiles from."""

    kernel: Any  # triton.JITFunction
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attrs: dict[tuple[int, ...], Any]
    options: dict[str, Any]
    target: str

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    @property
    def constexprs(self) -> dict[str, Any]:
        """Compile-time parameters, absent pointers and scalars equal to 1, by name."""
        return {self.kernel.arg_names[i]: value for (i,), value in self.constants.items()}

    def build(self) -> Any:
        """Return the compiled kernel, from Triton's cache if it is there."""
        source = self.kernel.ASTSource(self.kernel, dict(self.signature), dict(self.constants), dict(self.attrs))
        return triton.compile(source, target=gpu_target(self.target), options=dict(self.options))


class Recorder(DriverBase):
    """Stands in for a GPU driver, so that Triton's launch code runs as on the target, and keeps the launches."""

    def __init__(self, target: str) -> None:
        super().__init__()
        self.target = target
        self.launches: dict[str, Any] = {}

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> Any:
        return gpu_target(self.target)

    def get_current_device(self) -> str:
        return self.target

    def get_current_stream(self, device: str) -> int:
        return 0

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("nothing is launched here")

    get_active_torch_device = get_benchmarker = map_python_to_cpp_type

    def launch(self, *fields: Any) -> Launch:
        """Return the record of a launch, from the fields of `Launch`."""
        return Launch(*fields)

    def hook(self, *, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        """Record a launch. As Triton's jit_cache_hook it is called before a kernel is compiled; True prevents that."""
        options = json.loads(compile["specialization_data"])["options"]
        options = {name: value for name, value in options.items() if not isinstance(value, list)}
        launch = self.launch(
            fn.jit_function, compile["signature"], compile["constants"], compile["configs"][0], options, self.target
        )
        self.launches.setdefault(f"{fn.module}:{fn.name}:{key}", launch)
        return True


class _ToLaunchers(TorchDispatchMode):
    """Sends registered ops on meta tensors to the implementation for real tensors instead of the fake one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fastvit":
            return func._op_dk(torch._C.DispatchKey.CPU, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def in_library(**substitutes: Callable[..., object]) -> Iterator[None]:
    """Within the context, replace functions of `fastvit.ops.runtime` by name, wherever ops use them."""
    with contextlib.ExitStack() as stack:
        for name, substitute in substitutes.items():
            original = next(getattr(module, name) for module in (backends, devices, dtypes) if hasattr(module, name))
            for module in [module for key, module in sys.modules.items() if key.startswith("fastvit.ops")]:
                if getattr(module, name, None) is original:
                    stack.enter_context(mock.patch.object(module, name, substitute))
        yield


@contextlib.contextmanager
def recording(recorder: Recorder, multiprocessors: int | None = None) -> Iterator[None]:
    """Within the context, launches do not run; each is kept once in `recorder.launches`.

    Args:
        multiprocessors: of the GPU; None for the number in MULTIPROCESSORS.
    """
    target = recorder.target
    count = MULTIPROCESSORS[target] if multiprocessors is None else multiprocessors
    library = in_library(wants_triton=lambda x: True, arch=lambda x: target, multiprocessors=lambda index: count)
    with contextlib.ExitStack() as stack:
        stack.enter_context(library)
        stack.enter_context(mock.patch.object(triton.knobs.runtime, "jit_cache_hook", recorder.hook))
        stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", recorder))
        stack.enter_context(backends.use_backend("auto", strict=True))
        stack.enter_context(_ToLaunchers())
        yield


def record_step(recorder: Recorder, spec: StepSpec, multiprocessors: int | None = None) -> None:
    """Record the kernels that a step of a model launches, each once, in their order.

    The model, accelerated if it is another library's, runs on fake tensors; then its fused ops run on meta tensors of
    the same layouts. Ops that Triton cannot take launch nothing.

    Raises:
        ValueError: the model refuses the size.
    """
    seen = trace_step(spec).seen
    record.available()  # builds the code that replays calls, into Triton's cache
    with recording(recorder, multiprocessors), torch.no_grad():
        for op, leaves, nested in dict.fromkeys((op.op, op.leaves, op.nested) for op in seen.ops):
            arguments, keywords = without_data(leaves, nested, "meta")
            with contextlib.suppress(KernelUnsupported):
                registry.IMPLEMENTATIONS[op](*arguments, route=Route.TRITON, **keywords)


def gpu_at_hand() -> tuple[str, int]:
    """Return target and multiprocessors of the current GPU.

    Raises:
        ValueError: no kernel can run on a GPU here, with the reason.
    """
    if reason := why_no_gpu():
        raise ValueError(f"no GPU: {reason}")
    device = torch.device("cuda", torch.cuda.current_device())
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return devices.arch(torch.empty(0, device=device)), count


def compiled(launch: Launch) -> bool:
    """Compile a launch into Triton's cache. Returns False if the cache had it already."""
    hits: list[bool] = []
    with mock.patch.object(triton.knobs.compilation, "listener", lambda **seen: hits.append(seen["cache_hit"])):
        kernel = launch.build()
    driver: Any = importlib.import_module("triton.backends.nvidia.driver")
    if hasattr(driver, "make_launcher") and os.path.exists("/dev/nvidiactl"):
        driver.CudaLauncher(kernel.src, kernel.metadata)  # before triton 3.7: a launcher in C for each signature
    return not all(hits)


def cores() -> int:
    """Return how many processes compile at a time: one for each core that this process may use, at most 32."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return min(len(allowed), 32)


def in_processes(
    function: Callable[[L], T], launches: Sequence[L], workers: int | None = None
) -> Iterator[tuple[L, T | str]]:
    """Yield each launch, in order, with function(launch), or with the error that it raised, as a string.

    Args:
        workers: processes at most; None for `cores()`.
    """
    global _pending
    _pending = launches, function
    context = multiprocessing.get_context("fork")
    workers = max(min(workers or cores(), len(launches)), 1)  # all fork with the first launch
    pool = ProcessPoolExecutor(workers, context, signal.signal, (signal.SIGINT, signal.SIG_IGN))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forking while a thread shows progress
            results = pool.map(_work_off, range(len(launches)))
        yield from zip(launches, results, strict=True)
    finally:
        pool.shutdown(cancel_futures=True)  # the caller may stop early, for example after Ctrl-C


_pending: tuple[
    Sequence[Launch], Callable[[Any], Any]
]  # reaches the workers by fork, because kernels cannot be pickled


def _work_off(index: int) -> Any:
    launches, function = _pending
    try:
        return function(launches[index])
    except Exception as error:  # the C++ part of the compiler writes its reason to stderr
        return f"{type(error).__name__}: {error}"
