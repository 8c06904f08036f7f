"""Numerical agreement by the rule of `fastvit.study.accuracy.rule`, asserted before anything is timed. Its ratio is
recorded; 1.0 is as accurate as eager."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from benchmarks.harness.draw import Draw
from benchmarks.harness.workloads import Workload
from fastvit.study.accuracy import rule
from fastvit.study.accuracy.rule import DRAWS, GRADIENT, OUTPUT, Compared, pooled_ratios


def agreement(
    workload: Workload, mode: str, providers: Sequence[str], dtype: torch.dtype, device: torch.device
) -> dict[str, float]:
    """Return each provider's error ratio over all outputs or all gradients of one draw. Where fastvit misses the rule
    on that draw, its ratio is that of several draws together.

    Raises:
        AssertionError: fastvit misses the rule on several draws, too.
    """
    kind, factor = ("output", OUTPUT) if mode == "inference" else ("d", GRADIENT)

    def run(provider: str, number: int, compute: torch.dtype | None = None) -> tuple[Tensor, ...]:
        draw = Draw(dtype, device, compute, number)
        runner = workload.runner(provider, draw, check=True).train(False)  # providers draw different masks for dropout
        if mode == "inference":
            return runner.infer()
        outputs = runner.outputs()
        return torch.autograd.grad(outputs, runner.leaves, draw.cotangents(outputs))

    measures = functools.cache(lambda number: (run("eager", number), run("eager", number, torch.float64)))

    def compared(provider: str, number: int) -> Iterator[Compared]:
        eager, exact = measures(number)
        return rule.compared(kind, eager if provider == "eager" else run(provider, number), eager, exact)

    ratios = {}
    for provider in providers:
        draws = DRAWS if provider == "fastvit" else 1
        ratios[provider] = max(pooled_ratios(functools.partial(compared, provider), draws).values())
    fused = ratios.get("fastvit", 0.0)
    assert fused <= factor, (
        f"{workload.op} {workload}, {mode}: fastvit is not timed, its error ratio {fused:.2f} is over {factor}: "
        "error / (error of eager + ulp), against float64"
    )
    return ratios
