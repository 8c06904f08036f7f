"""Count the bytes that every kernel moves, against the least possible, in Triton's interpreter.

    python -m benchmarks.codegen.traffic                     # every case, two minutes
    python -m benchmarks.codegen.traffic --op attention

Bytes are those of unmasked lanes: what the programs ask of the caches. The least possible: every element that the
launch needs is loaded once, every result stored once. The least for the tiling: every program loads each element that
it needs once; anything beyond that is loaded twice by a program, or not needed. Matmuls are not computed, because no
address depends on a value.

The workloads have real N, d and D and the launch configurations of sm_90. Where the real case has too many rows, a part
of the rows runs on the same part of a GPU, so that a persistent program has its real share of rows.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from unittest import mock

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch

from benchmarks.codegen.traffic_counter import CountedLaunch, Traffic, count
from benchmarks.gpu.tuner import using
from benchmarks.harness.columns import make
from benchmarks.harness.draw import Draw
from benchmarks.harness.workloads import Workload, workloads
from fastvit.kernels import _configs
from fastvit.ops.runtime import backend as backends
from fastvit.ops.runtime import device as devices

SMS = 132  # of an H100, whose launch configurations are counted


@contextlib.contextmanager
def _part_of_gpu(parts: int) -> Iterator[None]:
    """Within the context, launchers see the multiprocessors of one of `parts` parts of the GPU, and GEMMs are
    configured for the rows of the whole."""
    gemm = _configs.gemm
    with (
        backends.use_backend("triton", strict=True),
        mock.patch.object(devices, "multiprocessors", return_value=round(SMS / parts)),
        mock.patch.object(_configs, "gemm", lambda m, *rest: gemm(m * parts, *rest)),
        using({}),  # configurations that were looked up before are computed again
    ):
        yield


def measure(workload: Workload) -> dict[str, Traffic]:
    """Return the traffic of the forward and of the backward pass, in bfloat16."""
    runner = workload.runner("fastvit", Draw(torch.bfloat16, "cpu"))
    with _part_of_gpu(workload.parts):
        with count(compute=False) as ahead:
            outputs = runner.outputs()
        with count(compute=False) as back:
            torch.autograd.grad(outputs, runner.leaves, [torch.zeros_like(t) for t in outputs])
    return {"forward": ahead, "backward": back}


def passes(workload: Workload) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield title and table of the forward and of the backward pass, with a row per kernel and one for all of them."""
    parts = f", one of {workload.parts} parts of the GPU and of the rows" if workload.parts > 1 else ""
    for step, traffic in measure(workload).items():
        rows = []
        for kernel in dict.fromkeys(launch.kernel for launch in traffic.launches):
            launches = [launch for launch in traffic.launches if launch.kernel == kernel]
            rows.append(_row(kernel, _repeated(launches), launches, sum(launch.least for launch in launches)))
        rows.append(_row("all of it", "", traffic.launches, traffic.least))
        yield f"{workload.op}, {step}: {workload}{parts}", rows


def _row(kernel: str, repeated: str, launches: list[CountedLaunch], least: int) -> list[str]:
    moved = sum(launch.loaded + launch.stored for launch in launches)
    tiled = sum(launch.least_tiled for launch in launches)
    kilobytes = (f"{n / 1024:,.0f}" for n in (moved, least, tiled))
    return [kernel, repeated, *kilobytes, f"{moved / least:.3f}", f"{moved / tiled:.3f}"]


def _repeated(launches: list[CountedLaunch]) -> str:
    """Name the arguments of a kernel that are loaded more than once, and how often, the largest excess first."""
    loaded: Counter[str] = Counter()
    once: Counter[str] = Counter()
    for argument in (argument for launch in launches for argument in launch.arguments.values()):
        loaded[argument.name.removesuffix("_ptr")] += argument.loaded
        once[argument.name.removesuffix("_ptr")] += argument.loaded_once
    least = sum(launch.least for launch in launches)
    large = [name for name, excess in (loaded - once).most_common() if excess > 0.01 * least]
    return ", ".join(f"{name} x{loaded[name] / once[name]:.3g}" for name in large)


LEGEND = """\
KB moved: loaded and stored by unmasked lanes. KB least: every element loaded once and every result stored once. KB
tiled: loaded once by every program that needs it. Loaded again: arguments, and how often an element is loaded; those
whose further loads are at most 1 % of the least are left out."""
_COLUMNS = ("kernel", "loaded again", "moved\nKB", "least\nKB", "tiled\nKB", "moved\n/ least", "moved\n/ tiled")


def table(title: str, rows: list[list[str]]) -> str:
    return "\n".join(["", title, *make(_COLUMNS, rows, left=2, wrap=1)])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--op", action="append", default=[], help="only the workloads of this op")
    chosen = parser.parse_args(arguments)
    print(LEGEND)
    for workload in workloads("traffic", ops=tuple(chosen.op)):
        for title, rows in passes(workload):
            print(table(title, rows), flush=True)


if __name__ == "__main__":
    main()
