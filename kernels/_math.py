"""Elementwise maths that several kernels share: activations with their gradients, and the dropout mask."""

import triton
import triton.language as tl


@triton.jit
def normal_tail(x, LOG2_SCALE: tl.constexpr):
    """u = min(|x| / 16, 1) and 2^LOG2_SCALE * Phi(-|x|), Phi the normal distribution function.

    log2 Phi(-16 u) is nearly a parabola, so it is written as c - y(u)^2, corrected by one more step: seven FMAs whose
    relative error is 3.6e-4 down to x = -13, where x * Phi(x) leaves the normal numbers of bfloat16. That is less than
    1/9 ulp of it and 3/4 ulp of float16; a polynomial of as many FMAs has 5.8e-4. Fitted to 0 <= |x| <= 13 so that
    x * Phi(x) and its derivative count by relative error (tests/test_math.py). Beyond, it falls to 0 as it should.
    """
    u = tl.clamp(tl.abs(x) * 0.0625, 0.0, 1.0)  # one instruction, and it keeps u * 0 finite for infinite x
    y = 2.30859743 * u - 8.66579758
    y = y * u + 14.5550033
    y = y * u - 15.5842516
    y = y * u + 17.4836539
    y = y * u + 3.41242446
    p = -6.71008433 - y * y
    p = p * u + (LOG2_SCALE - 1.00051467)
    return u, tl.exp2(p)


@triton.jit
def _sigmoid_argument(x, NAME: tl.constexpr):
    """z and dz/dx, where the activation is x * sigmoid(z)"""
    if NAME == "gelu_tanh":
        square = x * x
        return 1.5957691216 * x * (1.0 + 0.044715 * square), 1.5957691216 * (1.0 + 0.134145 * square)
    elif NAME == "quick_gelu":
        return 1.702 * x, 1.702
    else:
        tl.static_assert(NAME == "silu")
        return x, 1.0


@triton.jit
def _sigmoid(z, EXACT: tl.constexpr):
    """sigmoid(z) and 1 - sigmoid(z)"""
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
    """act(x) for float32 x. EXACT: GELU to float32's accuracy, by erf; else for 16-bit results, at a third of the
    instructions."""
    if NAME == "none":
        return x
    elif NAME == "relu":
        return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif NAME == "gelu":
        if EXACT:
            return x * (0.5 + 0.5 * tl.erf(0.7071067811865476 * x))
        else:
            # x Phi(x) = max(x, 0) - |x| Phi(-|x|); scaled by 16 the tail is normal where the result is
            u, tail = normal_tail(x, 4)
            return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) - u * tail
    else:
        z, _ = _sigmoid_argument(x, NAME)
        s, _ = _sigmoid(z, EXACT)
        return x * s


@triton.jit
def activate_with_grad(x, NAME: tl.constexpr, EXACT: tl.constexpr):
    """act(x) and act'(x) for float32 x."""
    if NAME == "relu":
        value = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return value, tl.where(x <= 0.0, 0.0, 1.0)
    elif NAME == "gelu":
        density = tl.exp2(x * -0.7213475204444817 * x - 1.3257480647361593)
        if EXACT:
            cdf = 0.5 + 0.5 * tl.erf(0.7071067811865476 * x)
        else:
            _, tail = normal_tail(x, 0)
            cdf = tl.where(x < 0.0, tail, 1.0 - tail)
        return x * cdf, x * density + cdf
    else:
        z, dz = _sigmoid_argument(x, NAME)
        s, complement = _sigmoid(z, EXACT)
        return x * s, s * (1.0 + x * complement * dz)


@triton.jit
def survives(random, dropout_p):
    """Whether a random 32-bit number means keep. dropout_p: probability of zero, in [0, 1), as a multiple of 2^-24."""
    threshold = tl.minimum(dropout_p * 16777216.0, 16777215.0).to(tl.uint32) << 8
    return random >= threshold


@triton.jit
def keep_mask(seed, i, j, k, dropout_p):
    """Whether element (i, j, k) survives dropout: a hash of its indices, so forward and backward agree without a
    stored mask. i, j broadcast against each other; k is a scalar. dropout_p: probability of zero, in [0, 1).

    Philox for every element would cost five times the rest of attention. It gives the keys of a plane k; a row i mixes
    them to two words, and an element of it takes two rounds of xor-shift and multiply over them and its column: 9
    instructions. Means, correlations of rows, columns and planes, and spectra are those of independent numbers."""
    zero = k.to(tl.uint32) * 0
    key_i, key_j, key_row, _ = tl.philox(seed, k.to(tl.uint32), zero, zero, zero)
    a = i.to(tl.uint32) * 0x9E3779B1 + key_i
    a = (a ^ (a >> 16)) * 0x7FEB352D
    a = a ^ (a >> 15)
    x = (j.to(tl.uint32) * 0xC2B2AE3D + key_j) ^ a
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15) ^ (a * 0x85EBCA6B + key_row)) * 0x846CA68B
    return survives(x, dropout_p)
