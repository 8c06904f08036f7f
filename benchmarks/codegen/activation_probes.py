# mypy: disable-error-code="no-untyped-def"
"""What one evaluation of an activation costs in a kernel's epilogue: issue slots per element, load and store included.
The derivative's probe multiplies it by a second tensor that it loads, as a backward epilogue does."""

from __future__ import annotations

import triton
import triton.language as tl

from benchmarks.codegen.aot import compile_kernel
from fastvit.kernels._math import activate, activate_with_grad

_BLOCK, _WARPS = 8192, 4


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


def slots(activation: str, target: str = "sm_90") -> tuple[float, float]:
    """Of the value and of the derivative, per element of a bfloat16 tensor."""
    count = []
    for kernel in (_value_probe, _derivative_probe):
        signature = {name: "*bf16" for name in kernel.arg_names if name.endswith("_ptr")}
        constexprs = {"ACTIVATION": activation, "EXACT": False, "BLOCK": _BLOCK}
        compiled = compile_kernel(kernel, signature, constexprs, target=target, num_warps=_WARPS)
        count.append(compiled.whole.slots_per(_BLOCK / (32 * _WARPS)))
    return count[0], count[1]
