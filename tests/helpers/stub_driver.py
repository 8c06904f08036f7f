"""A stand-in for a GPU and its driver: Triton binds and specialises launches as it would there, and nothing runs.

Nothing is compiled: one object stands for each binary that Triton would compile, and two launches share one exactly
where they would share a binary on the GPU.

    with stub_gpu() as gpu:
        ops.layer_norm(x, weight, bias)  # of CPU tensors
    [launch.kernel.name for launch in gpu.launches]
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from fastvit.ops.runtime import call, launch
from fastvit.ops.runtime.registry import LAUNCH_MODULES
from fastvit.warmup import in_library

MULTIPROCESSORS = 132


class Launched(NamedTuple):
    kernel: StubKernel
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]  # as passed to the launcher: tensors or addresses, numbers, constexprs


class StubKernel(CompiledKernel):
    """A compiled kernel without a binary; everything else is Triton's class."""

    def __init__(self, gpu: StubGpu, source: Any, target: Any, options: dict[str, Any]) -> None:
        self.name = source.fn.__name__
        self.src = source
        self.metadata = SimpleNamespace(name=self.name, target=target, **options)
        self.packed_metadata = (options["num_warps"], 1, 0)
        self.module, self.function = self, id(self)  # loaded
        self.metadata_group: dict[str, str] = {}
        self.hash = self.name  # Triton 3.8 passes it and metadata_group to its unload hook
        self._gpu = gpu
        self._run = self._launch

    def _launch(self, *call: Any) -> None:
        x, y, z, _stream, function, packed, metadata, enter, _leave, *arguments = call
        assert (function, packed) == (self.function, self.packed_metadata)
        if enter is not None:
            enter(metadata)
        self._gpu.launches.append(Launched(self, (x, y, z), tuple(arguments)))


@dataclass
class StubGpu:
    """The parts of a driver that launches use."""

    target: GPUTarget
    device: int = 0
    launches: list[Launched] = field(default_factory=list)
    compiled: list[StubKernel] = field(default_factory=list)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0

    def compile(self, source: Any, target: Any = None, options: Any = None, **_: Any) -> StubKernel:
        """Replace `triton.compile`."""
        self.compiled.append(StubKernel(self, source, target, options))
        return self.compiled[-1]


@contextlib.contextmanager
def stub_gpu(target: GPUTarget | None = None) -> Iterator[StubGpu]:
    """Within the context, ops on CPU tensors launch Triton kernels on a GPU that is not there. Not in the
    interpreter."""
    gpu = StubGpu(target or GPUTarget("cuda", 90, 32))
    arch = f"sm_{gpu.target.arch}" if gpu.target.backend == "cuda" else str(gpu.target.arch)
    for name in LAUNCH_MODULES:
        importlib.import_module(name)
    modules = [module for name, module in sys.modules.items() if name.startswith("fastvit.ops")]
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            in_library(wants_triton=lambda x: True, arch=lambda x: arch, multiprocessors=lambda index: MULTIPROCESSORS)
        )
        stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", gpu))
        stack.enter_context(mock.patch.object(triton.compiler, "compile", gpu.compile))
        stack.enter_context(call.forgotten())
        for name in ("_compiled", "_refused"):
            stack.enter_context(mock.patch.object(launch, name, {}))
        kernels = {id(value): value for module in modules for value in vars(module).values()}
        for kernel in kernels.values():
            if isinstance(kernel, JITFunction):
                stack.enter_context(mock.patch.object(kernel, "device_caches", defaultdict(kernel.create_binder)))
        yield gpu
