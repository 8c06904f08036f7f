"""Compile kernels that are about to be launched, in many processes, into Triton's cache.

    python -m benchmarks.gpu.precompile              # of the rows and of memcheck, then of the checks

The launches are recorded on meta tensors (fastvit/warmup.py), so that this process needs no GPU and can be forked.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from benchmarks.codegen.launches import DTYPES, Launch, recording
from benchmarks.gpu import summary
from benchmarks.gpu.journal import REHEARSAL
from benchmarks.gpu.runner import SKIPPED
from benchmarks.harness.draw import Draw
from benchmarks.harness.workloads import Workload, workloads
from fastvit.kernels import _tuned
from fastvit.ops.runtime.backend import KernelUnsupported
from fastvit.study.accuracy import cases
from fastvit.warmup import compiled, in_processes

Machine = tuple[tuple[int, int], int, str]  # compute capability, multiprocessors, name
REHEARSED: Machine = (9, 0), 132, REHEARSAL


def record_rows(rows: Iterable[Workload], machine: Machine) -> list[Launch]:
    """Return every launch of the workloads in bfloat16, forward alone, and forward and backward, each once."""
    with _recording(machine) as recorder:
        for workload in rows:
            runner = workload.runner("fastvit", Draw(DTYPES["bf16"], "meta"))
            runner.gradients()
            runner.infer()
    return list(recorder.launches.values())


def record_checks(machine: Machine) -> list[Launch]:
    """Return every launch of the ops that are checked, by dtype."""
    with _recording(machine) as recorder:
        for dtype in summary.DTYPES.values():
            recorder.dtype = dtype
            for case in cases.cases():
                tensors = case.tensors(DTYPES[dtype], torch.device("meta"))
                with contextlib.suppress(KernelUnsupported):
                    outputs = case.fused(**tensors)
                    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
                    through = [out for out in outputs if out.requires_grad]
                    leaves = [t for t in tensors.values() if t.requires_grad]
                    torch.autograd.grad(through, leaves, [torch.empty_like(out) for out in through])
    return list(recorder.launches.values())


def _recording(machine: Machine) -> Any:
    """Record launches for the GPU and its measured choices: configurations depend on both."""
    (major, minor), multiprocessors, name = machine
    arch = f"sm_{major}{minor}"
    _tuned.load(arch, name)
    return recording(arch, multiprocessors)


def _machine() -> Machine:
    """Return the GPU at hand. A process of its own asks for it: one that has initialised CUDA should not be forked."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        return pool.submit(_ask).result()


def _ask() -> Machine:
    gpu = torch.cuda.get_device_properties(0)
    return (gpu.major, gpu.minor), gpu.multi_processor_count, gpu.name


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rehearse", action="store_true", help="in miniature on a CPU")
    chosen = parser.parse_args(arguments)
    if torch.version.hip:
        print("SKIPPED: kernels are compiled beforehand for NVIDIA GPUs only")
        return SKIPPED
    start = time.perf_counter()
    if chosen.rehearse:  # it launches nothing
        launches = record_rows(workloads("quick", ops=("layer_norm",)), REHEARSED)
    else:
        machine = _machine()
        rows = [*workloads("headline"), *workloads("sanitize", ops=("attention",))]
        launches = record_rows(rows, machine) + record_checks(machine)
    print(f"> {len(launches)} kernels recorded in {time.perf_counter() - start:.1f} s", flush=True)
    failed = 0
    for launch, reason in in_processes(compiled, launches, min(15, max(2, (os.cpu_count() or 2) - 1))):
        if isinstance(reason, str):
            failed += 1
            print(f"{launch.name} {launch.dtype} {launch.constexprs}: {reason}", flush=True)
    print(f"> compiled in {time.perf_counter() - start:.1f} s, {failed} did not compile", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
