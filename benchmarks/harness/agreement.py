"""Numerical agreement, asserted before anything is timed: against float64, and against eager in the same dtype.

    err(provider) <= factor * err(eager) + ulp          factor 2 for outputs, 3 for gradients; maximum and RMS

which is `error_ratio <= factor` for the ratio below. 1.0 reads "as accurate as eager".
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.harness.draw import Draw
from benchmarks.harness.workloads import Workload

FACTOR = {"inference": 2.0, "training": 3.0}


def error_ratio(got: Tensor, eager: Tensor, exact: Tensor, factor: float) -> float:
    """err(got) / (err(eager) + ulp / factor), the worse of maximum and RMS; infinite where got is not finite.

    got, eager: one shape and dtype; exact: float64. `ulp` is the spacing of got's dtype at the exact values.
    """
    if got.shape != exact.shape or got.dtype != eager.dtype:
        raise ValueError(f"got {tuple(got.shape)} {got.dtype}, exact {tuple(exact.shape)}, eager {eager.dtype}")
    if not got.isfinite().all():
        return float("inf")
    ulp = _ulp(exact, got.dtype)
    maximum_and_rms = (lambda t: float(t.abs().max()), lambda t: float(t.square().mean().sqrt()))
    return max(
        norm(got.double() - exact) / (norm(eager.double() - exact) + norm(ulp) / factor) for norm in maximum_and_rms
    )


def _ulp(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """The spacing of the dtype at these values; torch.nextafter knows no float16 on a GPU."""
    limits = torch.finfo(dtype)
    _, exponent = torch.frexp(exact.to(dtype).double().abs().clamp_min(limits.tiny))
    return limits.eps * torch.exp2(exponent.double() - 1)


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
