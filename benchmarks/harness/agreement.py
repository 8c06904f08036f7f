"""Numerical agreement, asserted before anything is timed: by the rule of `fastvit.study.accuracy.rule`. Its
ratio is kept; 1.0 reads "as accurate as eager"."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from benchmarks.harness.draw import Draw
from benchmarks.harness.workloads import Workload
from fastvit.study.accuracy.rule import DRAWS, GRADIENT, OUTPUT, Compared, pooled_ratios

FACTOR = {"inference": OUTPUT, "training": GRADIENT}


def results(workload: Workload, provider: str, mode: str, draw: Draw) -> tuple[Tensor, ...]:
    """The outputs, or for training the gradients; dropout off, since providers draw different masks."""
    runner = workload.runner(provider, draw, check=True).train(False)
    if mode == "inference":
        return runner.infer()
    outputs = runner.outputs()
    return torch.autograd.grad(outputs, runner.leaves, draw.cotangents(outputs))


def agreement(
    workload: Workload, mode: str, providers: Sequence[str], dtype: torch.dtype, device: torch.device
) -> dict[str, float]:
    """Each provider's error ratio, over all outputs or all gradients, of one draw; of fused, where that one misses the
    rule, of several together. AssertionError if they miss it, too."""
    kind = "output" if mode == "inference" else "d"

    def run(provider: str, number: int, compute: torch.dtype | None = None) -> tuple[Tensor, ...]:
        return results(workload, provider, mode, Draw(dtype, device, compute, number))

    measures = functools.cache(lambda number: (run("eager", number), run("eager", number, torch.float64)))

    def compared(provider: str, number: int) -> Iterator[Compared]:
        eager, exact = measures(number)
        three = eager if provider == "eager" else run(provider, number), eager, exact
        for i, triple in enumerate(zip(*three, strict=True)):
            yield Compared(f"{kind}{i}", *triple)

    ratios = {}
    for provider in providers:
        draws = DRAWS if provider == "fused" else 1
        ratios[provider] = max(pooled_ratios(functools.partial(compared, provider), draws).values())
    fused, factor = ratios.get("fused", 0.0), FACTOR[mode]
    assert fused <= factor, (
        f"{workload.op} {workload}, {mode}: fused is not timed, its error ratio {fused:.2f} is over {factor}: "
        "error / (error of eager + ulp), against float64"
    )
    return ratios
