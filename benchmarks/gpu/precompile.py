"""Compile kernels that are about to be launched, in many processes, into Triton's cache.

The launches are recorded on meta tensors, so that this process needs no GPU and can be forked
(fastvit/tuning/launches.py).
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from benchmarks.codegen.launches import DTYPES, Launch, recording
from benchmarks.gpu import correct, headline, process
from benchmarks.gpu.journal import REHEARSAL
from benchmarks.gpu.runner import SKIPPED
from benchmarks.gpu.tables import works
from benchmarks.harness.draw import Draw
from benchmarks.harness.workloads import Workload, workloads
from fastvit.kernels import _tuned
from fastvit.ops.runtime.device import cache_folder
from fastvit.tuning.candidates import candidates
from fastvit.tuning.launches import compile_all
from fastvit.tuning.tuner import run_candidates, using

Item = tuple[Workload, str]  # and a dtype: a name of codegen/launches.py
Machine = tuple[tuple[int, int], int, str]  # compute capability, multiprocessors, name
REHEARSED: Machine = (9, 0), 132, REHEARSAL


def first_minutes(rehearse: bool, machine: Machine) -> list[Launch]:
    """Return every launch of the first minutes, the most important first: rows, candidates of their tuning, then checks
    by dtype. A rehearsal, which launches nothing, records only the rows."""
    with _recording(machine) as recorder:
        _run(recorder, ((w, "bf16") for w in headline.rows(rehearse)))
        if not rehearse:
            for work in works(headline=True):
                run_candidates(work)
            _try_in_block()
            sanitized = workloads("sanitize", ops=("attention",))
            for dtype in correct.dtypes(rehearse):
                _run(recorder, ((w, dtype) for w in correct.cases(rehearse)))
                _run(recorder, ((w, dtype) for w in sanitized if dtype != "fp16"))
    return list(recorder.launches.values())


def record(items: Iterable[Item], machine: Machine) -> list[Launch]:
    """Return every launch of the items, forward alone, and forward and backward, each once."""
    with _recording(machine) as recorder:
        _run(recorder, items)
    return list(recorder.launches.values())


def record_candidates(tables: Iterable[str], machine: Machine) -> list[Launch]:
    """Return every launch that tuning of these tables tries."""
    wanted = set(tables)
    with _recording(machine) as recorder:
        for work in works():
            if work.table in wanted:
                run_candidates(work)
    return list(recorder.launches.values())


def _run(recorder: Any, items: Iterable[Item]) -> None:
    for workload, dtype in items:
        recorder.dtype = dtype
        runner = workload.runner("fastvit", Draw(DTYPES[dtype], "meta"))
        runner.gradients()
        runner.infer()


def _try_in_block() -> None:
    """Record the launches of the rows for every choice that tuning before them may make: blocks have other epilogues
    than the works that tuning measures. One block has all of them, at every batch and width."""
    block = next(w for w in headline.rows(False) if w.op == "block")
    runner = block.runner("fastvit", Draw(headline.DTYPE, "meta"))
    for choice in candidates("gemm", ()):
        with using({("gemm", ()): choice, ("use_triton_gemm", ()): (1,)}):
            runner.gradients()
            runner.infer()


def _recording(machine: Machine) -> Any:
    """Record launches for the GPU and its measured choices: configurations depend on both."""
    (major, minor), multiprocessors, name = machine
    arch = f"sm_{major}{minor}"
    _tuned.load(arch, name, cache_folder())
    return recording(arch, multiprocessors)


def _machine() -> Machine:
    """Return the GPU at hand. A process of its own asks for it: one that has initialised CUDA should not be forked."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        return pool.submit(_ask).result()


def _ask() -> Machine:
    gpu = torch.cuda.get_device_properties(0)
    return (gpu.major, gpu.minor), gpu.multi_processor_count, gpu.name


def main(arguments: list[str] | None = None) -> int:
    parser = process.arguments(__doc__)
    parser.add_argument(
        "--tables", nargs="+", choices=sorted(_tuned.FIELDS), help="what tuning of these tries, instead"
    )
    chosen = parser.parse_args(arguments)
    if torch.version.hip:
        print("SKIPPED: kernels are compiled beforehand for NVIDIA GPUs only")
        return SKIPPED
    start = time.perf_counter()
    machine = REHEARSED if chosen.rehearse else _machine()
    tables = chosen.tables
    launches = record_candidates(tables, machine) if tables else first_minutes(chosen.rehearse, machine)
    print(f"> {len(launches)} kernels recorded in {time.perf_counter() - start:.1f} s", flush=True)
    failed = {}
    results = compile_all(launches, min(15, max(2, (os.cpu_count() or 2) - 1)))
    for i, (launch, reason) in enumerate(results, 1):
        if i % 100 == 0:
            print(f"> {i} of {len(launches)} compiled in {time.perf_counter() - start:.1f} s", flush=True)
        if isinstance(reason, str):
            failed[f"{launch.name} {launch.dtype}"] = reason[:200]
            print(f"{launch.name} {launch.dtype} {launch.constexprs}: {reason}", flush=True)
    print(f"> compiled in {time.perf_counter() - start:.1f} s, {len(failed)} did not compile", flush=True)
    if not tables:  # some candidates of tuning do not fit, and that is no failure
        journal = process.journal(chosen.out, process.device_of(chosen))
        status = "failed" if failed else "passed"
        reason = f"{len(failed)} did not compile: {', '.join(failed)}" if failed else ""
        journal.add("compile", "kernels", status, kernels=len(launches), failed=failed, reason=reason)
    return int(bool(failed) and not tables)


if __name__ == "__main__":
    sys.exit(main())
