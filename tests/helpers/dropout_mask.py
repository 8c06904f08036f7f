"""A kernel that writes the dropout mask of attention."""

import triton
import triton.language as tl

from fastvit.kernels._math import keep_mask


@triton.jit
def mask_kernel(seed_ptr, out_ptr, dropout_p: tl.float32, N: tl.constexpr):
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    keep = keep_mask(tl.load(seed_ptr), i, j, tl.program_id(0), dropout_p)
    tl.store(out_ptr + tl.program_id(0) * N * N + i * N + j, keep.to(tl.int8))
