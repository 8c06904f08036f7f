"""Elementwise maths that several kernels share: activations with their gradients, and the dropout mask."""

import triton
import triton.language as tl


@triton.jit
def survives(random, dropout_p):
    """Whether a random 32-bit number means keep: its top 24 bits, exactly representable, as a number in [0, 1)."""
    return (random >> 8).to(tl.float32) * (1.0 / 16777216.0) >= dropout_p


@triton.jit
def keep_mask(seed, i, j, k, dropout_p):
    """Whether element (i, j, k) survives dropout: Philox of its indices, so forward and backward agree without a
    stored mask. i, j broadcast against each other; k is a scalar. dropout_p: probability of zero, in [0, 1)."""
    i, j = tl.broadcast(i.to(tl.uint32), j.to(tl.uint32))
    k = k.to(tl.uint32)
    random, _, _, _ = tl.philox(seed, i, j, k + tl.zeros_like(i), tl.zeros_like(i))
    return survives(random, dropout_p)
