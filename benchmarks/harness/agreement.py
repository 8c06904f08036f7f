"""Numerical agreement, asserted before anything is timed: by the rule of `fastvit.study._oracle`, of which the ratio is
kept; 1.0 reads "as accurate as eager"."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.harness.draw import Draw
from benchmarks.harness.workloads import Workload
from fastvit.study._oracle import GRADIENT, OUTPUT, error_ratio

FACTOR = {"inference": OUTPUT, "training": GRADIENT}


def difference(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """The largest, over the tensors, of max |got - expected| / max |expected|; infinite where got is not finite."""
    worst = 0.0
    for a, b in zip(got, expected, strict=True):
        if not a.isfinite().all():
            return float("inf")
        worst = max(worst, float((a.float() - b.float()).abs().max() / b.float().abs().max().clamp_min(1e-30)))
    return worst


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
    """Each provider's error ratio, over all outputs or all gradients. AssertionError if fused breaks the rule."""
    exact = results(workload, "eager", mode, Draw(dtype, device, torch.float64))
    eager = results(workload, "eager", mode, Draw(dtype, device))
    factor = FACTOR[mode]
    ratios = {}
    for provider in providers:
        got = eager if provider == "eager" else results(workload, provider, mode, Draw(dtype, device))
        pairs = zip(got, eager, exact, strict=True)
        ratios[provider] = max(error_ratio(*triple, factor) for triple in pairs)
    fused = ratios.get("fused", 0.0)
    assert fused <= factor, (
        f"{workload.op} {workload}, {mode}: fused is not timed, its error ratio {fused:.2f} is over {factor}: "
        "error / (error of eager + ulp), against float64"
    )
    return ratios
