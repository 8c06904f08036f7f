# mypy: disable-error-code="no-untyped-def"
"""Measure what an activation costs in an epilogue: issue slots per element, including load and store. The probe of the
derivative multiplies it by a second tensor, as a backward epilogue does."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from benchmarks.codegen.launches import recording
from fastvit.kernels._math import activate, activate_with_grad

_BLOCK = 8192


@triton.jit
def _value_probe(x_ptr, out_ptr, ACTIVATION: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = activate(tl.load(x_ptr + at).to(tl.float32), ACTIVATION, EXACT)
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty))


@triton.jit
def _derivative_probe(x_ptr, dy_ptr, out_ptr, ACTIVATION: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _, grad = activate_with_grad(tl.load(x_ptr + at).to(tl.float32), ACTIVATION, EXACT)
    tl.store(out_ptr + at, (tl.load(dy_ptr + at).to(tl.float32) * grad).to(out_ptr.dtype.element_ty))


def slots(activation: str) -> tuple[float, ...]:
    """Return the issue slots of value and derivative, per element of a bfloat16 tensor, on sm_90."""
    x = torch.empty(_BLOCK, dtype=torch.bfloat16, device="meta")
    with recording("sm_90") as recorder:
        _value_probe[(1,)](x, x, activation, False, _BLOCK)
        _derivative_probe[(1,)](x, x, x, activation, False, _BLOCK)
    found = [launch.compile() for launch in recorder.launches.values()]
    return tuple(c.whole.slots * 32 * c.num_warps / _BLOCK for c in found)
