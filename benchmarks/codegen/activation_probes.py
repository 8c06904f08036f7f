# mypy: disable-error-code="no-untyped-def"
"""What one evaluation of an activation costs in a kernel's epilogue: issue slots per element, load and store included.

    python -m benchmarks.codegen.activation_probes [--target sm_90] [--dtype bf16]

The derivative's probe multiplies it by a second tensor that it loads, as a backward epilogue does; "both" also stores
the recomputed value.
"""

from __future__ import annotations

import argparse

import triton
import triton.language as tl

from benchmarks.codegen.aot import TARGETS, compile_kernel
from fastvit.kernels._math import activate, activate_with_grad

ACTIVATIONS = ("gelu", "gelu_tanh", "quick_gelu", "relu", "silu")
_BLOCK, _WARPS = 8192, 4


@triton.jit
def _value_probe(x_ptr, out_ptr, ACTIVATION: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = activate(tl.load(x_ptr + at).to(tl.float32), ACTIVATION, EXACT)
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty))


@triton.jit
def _derivative_probe(
    x_ptr, dy_ptr, h_ptr, out_ptr,
    ACTIVATION: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    h, grad = activate_with_grad(tl.load(x_ptr + at).to(tl.float32), ACTIVATION, EXACT)
    if h_ptr is not None:
        tl.store(h_ptr + at, h.to(h_ptr.dtype.element_ty))
    tl.store(out_ptr + at, (tl.load(dy_ptr + at).to(tl.float32) * grad).to(out_ptr.dtype.element_ty))


def slots(activation: str, *, target: str = "sm_90", dtype: str = "bf16") -> dict[str, float]:
    """Per element of a tensor of `dtype` ("bf16", "fp16" or "fp32")."""
    count = {}
    for name, kernel, absent in (
        ("value", _value_probe, {}),
        ("derivative", _derivative_probe, {"h_ptr": None}),
        ("both", _derivative_probe, {}),
    ):
        constexprs = {"ACTIVATION": activation, "EXACT": dtype == "fp32", "BLOCK": _BLOCK, **absent}
        signature = {n: f"*{dtype}" for n in kernel.arg_names if n.endswith("_ptr") and n not in absent}
        compiled = compile_kernel(kernel, signature, constexprs, target=target, num_warps=_WARPS)
        count[name] = compiled.whole.slots_per(_BLOCK / (32 * _WARPS))
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="sm_90", choices=TARGETS)
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16", "fp32"))
    chosen = parser.parse_args()
    for activation in ACTIVATIONS:
        found = slots(activation, target=chosen.target, dtype=chosen.dtype)
        print(f"{activation:<12}" + "".join(f"{name} {count:.1f}   " for name, count in found.items()))


if __name__ == "__main__":
    main()
