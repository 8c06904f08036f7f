"""Device functions for several kernels: activations with their gradients, the dropout mask, a tile's columns in
parts."""

import triton
import triton.language as tl


@triton.jit
def scaled_normal_tail(x):
    """Return u = min(|x| / 16, 1) and 16 * Phi(-|x|), where Phi is the normal distribution function. Their product is
    |x| Phi(-|x|). The factor 16 keeps the tail out of the denormal numbers wherever the product is.

    log2 Phi(-16 u) is nearly a parabola, so it is written as c - y(u)^2 with a correction: seven FMAs with a relative
    error of 3.5e-4 down to x = -13, where x * Phi(x) becomes denormal in bfloat16. That is 1/11 ulp of bfloat16 and
    3/4 ulp of float16. Fitted to 0 <= |x| <= 13.05 by relative error (tests/kernels/test_math.py). Beyond 13.05 it
    falls to 0 as it should.
    """
    u = tl.clamp(tl.abs(x) * 0.0625, 0.0, 1.0)  # one instruction, and it keeps u * 0 finite for infinite x
    y = 2.21885222 * u - 8.38918568
    y = y * u + 14.2079856
    y = y * u - 15.3538847
    y = y * u + 17.3933934
    y = y * u + 3.43919223
    p = -6.51158038 - y * y
    p = p * u + 2.99953624
    return u, tl.exp2(p)


@triton.jit
def mills_ratio(x):
    """Return Phi(-|x|) / phi(x), where phi is the normal density. Where phi is needed anyway, this takes two
    instructions fewer than Phi.

    A cubic in t = 1 / sqrt(x^2 + p |x| + q), which falls off as the ratio does. The relative error is at most 1.5e-4,
    both of the ratio and of (ratio - |x|), to which GELU's derivative is proportional for x < 0. Fitted to both for
    |x| <= 13.1 (tests/kernels/test_math.py).
    """
    a = tl.abs(x)
    t = tl.rsqrt((a + 3.90076780) * a + 4.82381964)
    return t * ((4.42060375 * t + 1.82573938) * t + 1.00457978)


@triton.jit
def _sigmoid_argument(x, NAME: tl.constexpr):
    """Return z and x * dz/dx of an activation x * sigmoid(z)."""
    if NAME == "gelu_tanh":
        z = 1.5957691216 * x * (1.0 + 0.044715 * x * x)
        return z, 3.0 * z - 3.1915382432 * x
    elif NAME == "quick_gelu":
        return 1.702 * x, 1.702 * x
    else:
        tl.static_assert(NAME == "silu")
        return x, x


@triton.jit
def _sigmoid(z, EXACT: tl.constexpr):
    """Return sigmoid(z) and 1 - sigmoid(z)."""
    if EXACT:
        e = tl.exp2(-1.4426950408889634 * tl.abs(z))
        larger = 1.0 / (1.0 + e)
        smaller = e * larger  # not 1 - larger, which cancels
        return tl.where(z < 0.0, smaller, larger), tl.where(z < 0.0, larger, smaller)
    else:
        # 1 / y = rsqrt(y)^2: two instructions instead of the six of a division
        root = tl.rsqrt(1.0 + tl.exp2(-1.4426950408889634 * z))
        s = root * root
        return s, 1.0 - s


@triton.jit
def activate(x, NAME: tl.constexpr, EXACT: tl.constexpr):
    """Return act(x) for float32 x. EXACT: to float32's accuracy; otherwise to 1/8 ulp of bfloat16, which for GELU takes
    a third of the instructions."""
    if NAME == "none":
        return x
    elif NAME == "relu":
        return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif NAME == "gelu":
        if EXACT:
            return x * (0.5 + 0.5 * tl.erf(0.7071067811865476 * x))
        else:
            # x Phi(x) = max(x, 0) - |x| Phi(-|x|)
            u, tail = scaled_normal_tail(x)
            return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) - u * tail
    else:
        z, _ = _sigmoid_argument(x, NAME)
        s, _ = _sigmoid(z, EXACT)
        return x * s


@triton.jit
def activate_with_grad(x, NAME: tl.constexpr, EXACT: tl.constexpr):
    """Return act(x) and act'(x) for float32 x. EXACT: as for `activate`."""
    if NAME == "relu":
        value = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return value, tl.where(x <= 0.0, 0.0, 1.0)
    elif NAME == "gelu":
        density = tl.exp2(x * -0.7213475204444817 * x - 1.3257480647361593)
        if EXACT:
            cdf = 0.5 + 0.5 * tl.erf(0.7071067811865476 * x)
        else:
            tail = mills_ratio(x) * density
            cdf = tl.where(x < 0.0, tail, 1.0 - tail)
        return x * cdf, x * density + cdf
    else:
        z, xdz = _sigmoid_argument(x, NAME)
        s, complement = _sigmoid(z, EXACT)
        return x * s, s * (1.0 + complement * xdz)


@triton.jit
def survives(random, dropout_p):
    """Whether a random 32-bit number means keep. dropout_p: probability of dropping, in [0, 1), in steps of 2^-24."""
    threshold = tl.minimum(dropout_p * 16777216.0, 16777215.0).to(tl.uint32) << 8
    return random >= threshold


@triton.jit
def keep_mask(seed, i, j, k, dropout_p):
    """Whether element (i, j, k) survives dropout: a hash of its indices, so forward and backward agree without a
    stored mask. i and j broadcast against each other; k is a scalar. dropout_p: probability of dropping, in [0, 1).

    Philox for every element would cost five times the rest of attention. Here Philox makes the keys of plane k, row i
    mixes them into two words, and each element takes two rounds of xor-shift and multiply over these and its column j:
    9 instructions. Means, correlations of rows, columns and planes, and spectra are those of independent numbers."""
    zero = k.to(tl.uint32) * 0
    key_i, key_j, key_row, _ = tl.philox(seed, k.to(tl.uint32), zero, zero, zero)
    a = i.to(tl.uint32) * 0x9E3779B1 + key_i
    a = (a ^ (a >> 16)) * 0x7FEB352D
    a = a ^ (a >> 15)
    x = (j.to(tl.uint32) * 0xC2B2AE3D + key_j) ^ a
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15) ^ (a * 0x85EBCA6B + key_row)) * 0x846CA68B
    return survives(x, dropout_p)


@triton.jit
def columns_part(x, i: tl.constexpr, COUNT: tl.constexpr):
    """Return part i of COUNT equal parts of the columns of a tile in registers. Epilogues work part by part: with a
    whole tile they would need so many registers that no second program fits on the SM, whose matmul hides them."""
    if COUNT == 1:
        return x
    else:
        half = x.reshape(x.shape[0], 2, x.shape[1] // 2).permute(0, 2, 1).split()[i // (COUNT // 2)]
        return columns_part(half, i % (COUNT // 2), COUNT // 2)
