"""Check whether Triton's interpreter multiplies bfloat16 rightly. On its own it multiplies the raw 16-bit patterns as
integers; the tests replace its `tl.dot`."""

from __future__ import annotations

import functools
import warnings

import torch
import triton
import triton.language as tl


@triton.jit
def dot_kernel(x_ptr, out_ptr):  # type: ignore[no-untyped-def]
    index = tl.arange(0, 16)
    at = index[:, None] * 16 + index[None, :]
    x = tl.load(x_ptr + at)
    tl.store(out_ptr + at, tl.dot(x, x, input_precision="ieee"))


@functools.cache
def warn_of_bfloat16() -> None:
    """Warn if the interpreter's product of ones is wrong, once a process."""
    ones, out = torch.ones(16, 16, dtype=torch.bfloat16), torch.empty(16, 16)
    dot_kernel[(1,)](ones, out)
    if not bool((out == 16.0).all()):
        warnings.warn(
            f"Triton's interpreter (TRITON_INTERPRET=1) multiplies bfloat16 wrongly: 16 ones have the product sum "
            f"{out[0, 0]:.3g}. fastvit's results in bfloat16 are wrong here; on a GPU they are not, and "
            "FASTVIT_BACKEND=aten is right, too",
            stacklevel=2,
        )
