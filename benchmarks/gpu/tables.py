"""The launch tables that can be measured, and which workloads ask for each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.tuner import Run, Work
from benchmarks.harness.draw import Draw
from benchmarks.harness.workloads import Workload, workloads


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


def works(*, tiny: bool = False) -> Iterator[Work]:
    """Yield everything that tuning measures. tiny: one small shape for each table, in the interpreter."""
    for table in TABLES:
        for workload in workloads("quick", ops=(table.op,))[:1] if tiny else workloads("tune", ops=(table.op,)):
            for step in table.steps if table.suits(workload.sizes) else ():
                build = functools.partial(_build, workload, step, table.leaves)
                yield Work(table.name, f"{workload} {step}", build)


def _build(workload: Workload, step: str, leaves: tuple[int, ...], device: torch.device) -> Run:
    runner = workload.runner("fastvit", Draw(torch.bfloat16, device))
    if step == "forward":
        return runner.infer
    outputs = runner.outputs()
    gradients = tuple(torch.randn_like(out) for out in outputs)
    if step == "both":
        return lambda: runner.gradients(gradients)
    wanted = [runner.leaves[i] for i in leaves] or runner.leaves
    return lambda: torch.autograd.grad(outputs, wanted, gradients, retain_graph=True)
