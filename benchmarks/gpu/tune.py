"""Measure the launch tables of fastvit/kernels on the GPU at hand, and write kernels/tuned_<gpu>.json.

    python -m benchmarks.gpu.tune                                   # every table; continues where it was stopped
    python -m benchmarks.gpu.tune --table attention_fwd

How a choice is measured and made: benchmarks/gpu/tuner.py. What is measured: TABLES, in this order.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if "--rehearse" in sys.argv and __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch

from benchmarks.gpu.tuner import Run, Tuner
from benchmarks.harness.clock import HOST_BOUND, Clock
from benchmarks.harness.draw import Draw
from benchmarks.harness.provenance import commit, sources
from benchmarks.harness.record import environment
from benchmarks.harness.workloads import Workload, workloads
from fastvit.kernels import _tuned
from fastvit.ops.runtime import backend as backends
from fastvit.ops.runtime import device as devices


@dataclass(frozen=True)
class Table:
    """A table that an op's workloads measure.

    Attributes:
        steps: "forward", "backward" or "both", as one call.
        leaves: the op's tensors that backward differentiates by, all of them if none is named. A choice leaves out
            those whose gradient takes a GEMM, which would be timed with the kernel.
        suits: whether a workload of these sizes is measured.
    """

    name: str
    op: str
    steps: tuple[str, ...]
    leaves: tuple[int, ...] = ()
    suits: Callable[[dict[str, Any]], bool] = lambda sizes: True


TABLES = (  # in this order: a choice between two kernels comes after the tables of both
    Table("layer_norm", "layer_norm", ("forward", "backward")),
    Table("column_sum", "layer_norm", ("backward",)),
    Table("activation_backward", "linear", ("backward",), (2,), suits=lambda sizes: sizes["B"] == 64),
    Table("attention_fwd", "attention", ("forward",)),
    Table("attention_bwd_dq", "attention", ("backward",)),
    Table("attention_bwd_dkdv", "attention", ("backward",)),
    Table("attention_bwd_short", "attention", ("backward",), suits=lambda sizes: sizes["N"] <= 256),
    # forward and backward, since fc1 and the gradient after it share a choice
    Table("gemm", "mlp", ("both",)),
    Table("gemm", "linear", ("forward",), suits=lambda s: s["D"] == s["out"]),
    Table("use_triton_gemm", "linear", ("forward",), suits=lambda sizes: sizes["B"] != 64),
    # fc1's bias and fc2's weight, whose gradients linear_dact computes
    Table("use_triton_gemm", "mlp", ("backward",), (2, 3)),
    Table("patch_embed", "patch_embed", ("forward", "backward"), (0, 1)),
)


def build(workload: Workload, step: str, leaves: tuple[int, ...], device: torch.device) -> Run:
    """Return the call to time."""
    runner = workload.runner("fastvit", Draw(torch.bfloat16, device))
    if step == "forward":
        return runner.infer
    outputs = runner.outputs()
    gradients = tuple(torch.randn_like(out) for out in outputs)
    if step == "both":
        return lambda: runner.gradients(gradients)
    wanted = [runner.leaves[i] for i in leaves] or runner.leaves
    return lambda: torch.autograd.grad(outputs, wanted, gradients, retain_graph=True)


def measured(device: torch.device) -> dict[str, Any]:
    """Return where, with which versions and with which kernels the table is measured."""
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return environment(device, torch.bfloat16) | {"when": when, "commit": commit(), "sources": sources("kernels")}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--table", action="append", choices=sorted(_tuned.FIELDS), help="default: all")
    parser.add_argument("--out", type=Path, default=_tuned.FOLDER, help="folder of tuned_<gpu>.json")
    parser.add_argument("--rehearse", action="store_true", help="two candidates at tiny shapes in the interpreter")
    chosen = parser.parse_args(arguments)
    if chosen.rehearse and chosen.out == _tuned.FOLDER:
        parser.error("--rehearse measures nothing: give it an --out of its own")
    if not chosen.rehearse and not torch.cuda.is_available():
        parser.error("no GPU; --rehearse runs the steps without one")
    torch.manual_seed(0)
    device = torch.device("cpu" if chosen.rehearse else "cuda")
    gpu = "interpreter" if chosen.rehearse else torch.cuda.get_device_name()
    about = {"gpu": gpu, "arch": devices.arch(torch.empty(0, device=device)), "measured": measured(device)}
    path = chosen.out / _tuned.path_of(gpu).name
    tuner = Tuner(Clock(device).time, path, about, most=2 if chosen.rehearse else 99)
    host_bound = False
    with backends.use_backend("triton", strict=True):
        for table in TABLES:
            if chosen.table and table.name not in chosen.table:
                continue
            every = workloads("quick" if chosen.rehearse else "tune", ops=(table.op,))
            for workload in every[:1] if chosen.rehearse else every:
                for step in table.steps if table.suits(workload.sizes) else ():
                    call = functools.partial(build, workload, step, table.leaves, device)
                    for line in tuner.tune(table.name, f"{workload} {step}", call):
                        host_bound |= HOST_BOUND in line
                        print(line, flush=True)
    print(f"{path.name}: {sum(map(len, tuner.data['tables'].values()))} choices differ from the shipped ones")
    return int(host_bound)


if __name__ == "__main__":
    sys.exit(main())
