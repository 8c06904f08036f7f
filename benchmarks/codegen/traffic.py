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

import contextlib
import os
import sys
from collections.abc import Iterator
from unittest import mock

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch

from benchmarks.codegen.traffic_counter import CountedLaunch, Traffic, count
from benchmarks.harness.columns import make, terminal_width
from benchmarks.harness.draw import Draw
from benchmarks.harness.program import parser
from benchmarks.harness.workloads import Workload, workloads
from fastvit.cli import terminal
from fastvit.kernels import _configs
from fastvit.ops.linear import launch as linear_launch
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
        # which remembers configurations
        mock.patch.object(linear_launch, "_gemm_plan", linear_launch._gemm_plan.__wrapped__),
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


def rows(workload: Workload) -> Iterator[tuple[str, ...]]:
    """Yield a row for each kernel of the forward and of the backward pass, and one for all of them."""
    part = f", 1 of {workload.parts} parts" if workload.parts > 1 else ""
    for step, traffic in measure(workload).items():
        name = f"{workload.op}, {step}: {workload}{part}"
        for kernel in dict.fromkeys(launch.kernel for launch in traffic.launches):
            launches = [launch for launch in traffic.launches if launch.kernel == kernel]
            yield name, *_row(kernel, launches, sum(launch.least for launch in launches))
            name = ""
        yield "", *_row("all of it", traffic.launches, traffic.least)


def _row(kernel: str, launches: list[CountedLaunch], least: int) -> tuple[str, ...]:
    moved = sum(launch.loaded + launch.stored for launch in launches)
    tiled = sum(launch.least_tiled for launch in launches)
    return kernel, f"{moved / 1024:,.0f}", f"{moved / least:.3f}", f"{moved / tiled:.3f}"


def main(arguments: list[str] | None = None) -> None:
    options = parser("benchmarks.codegen.traffic", __doc__)
    options.add_argument("--op", action="append", default=[], help="only the workloads of this op (default: all)")
    chosen = options.parse_args(arguments)
    selected = workloads("traffic", ops=tuple(chosen.op))
    columns = ("", "kernel", "moved\nKB", "moved\n/ least", "moved\n/ tiled")
    with terminal.progress(len(selected), "counting") as step:
        for workload in selected:
            step(f"{workload.op} {workload}")
            print("", *make(columns, rows(workload), left=2, width=terminal_width()), sep="\n", flush=True)


if __name__ == "__main__":
    sys.exit(terminal.guarded(main, name="benchmarks.codegen.traffic"))
