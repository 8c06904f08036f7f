"""Compile kernels that are about to be launched, in many processes, into Triton's cache.

    python -m benchmarks.gpu.precompile              # of the rows and of memcheck, then of the checks

The launches are recorded on meta tensors (fastvit/warmup.py), so that this process needs no GPU and can be forked.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor

import torch

from benchmarks.codegen.launches import DTYPES, Launch, record, recording
from benchmarks.gpu.runner import SKIPPED
from benchmarks.harness.program import parser
from benchmarks.harness.workloads import workloads
from fastvit.cli.terminal import guarded
from fastvit.ops.runtime.backend import KernelUnsupported
from fastvit.study.accuracy import cases
from fastvit.warmup import compiled, gpu_at_hand, in_processes


def record_checks(target: str, multiprocessors: int) -> list[Launch]:
    """Return every launch of the ops that `fastvit verify` checks, by dtype."""
    with recording(target, multiprocessors) as recorder:
        for dtype in ("bf16", "fp16", "fp32"):
            recorder.dtype = dtype
            for case in (*cases.cases(), *cases.large()):
                tensors = case.tensors(DTYPES[dtype], torch.device("meta"))
                with contextlib.suppress(KernelUnsupported):
                    outputs = case.fused(**tensors)
                    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
                    through = [out for out in outputs if out.requires_grad]
                    leaves = [t for t in tensors.values() if t.requires_grad]
                    torch.autograd.grad(through, leaves, [torch.empty_like(out) for out in through])
    return list(recorder.launches.values())


def main(arguments: list[str] | None = None) -> int:
    options = parser("benchmarks.gpu.precompile", __doc__)
    options.add_argument("--rehearse", action="store_true", help="in miniature on a CPU")
    chosen = options.parse_args(arguments)
    if torch.version.hip:
        print("SKIPPED: kernels are compiled beforehand for NVIDIA GPUs only")
        return SKIPPED
    start = time.perf_counter()
    if chosen.rehearse:
        launches = record(workloads("quick", ops=("layer_norm",)), "sm_90", ["bf16"], infers=True)
    else:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
            # in a process of its own: one that has initialised CUDA should not be forked
            target, multiprocessors = pool.submit(gpu_at_hand).result()
        rows = [*workloads("headline"), *workloads("sanitize", ops=("attention",))]
        launches = record(rows, target, ["bf16"], multiprocessors=multiprocessors, infers=True)
        launches += record_checks(target, multiprocessors)
    recorded, failed = time.perf_counter() - start, 0
    for launch, reason in in_processes(compiled, launches, min(15, max(2, (os.cpu_count() or 2) - 1))):
        if isinstance(reason, str):
            failed += 1
            print(f"{launch.name} {launch.dtype} {launch.constexprs}: {reason}", flush=True)
    seconds = f"recorded in {recorded:.1f} s, compiled in {time.perf_counter() - start:.1f} s"
    print(f"{len(launches)} kernels {seconds}, {failed} did not compile")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(guarded(main, name="benchmarks.gpu.precompile"))
