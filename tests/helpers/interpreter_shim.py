"""Triton's interpreter keeps bfloat16 as raw 16-bit patterns. `tl.dot` multiplies those patterns as integers, and a
cast from float32 truncates where the hardware rounds to nearest even, a bias that adds up in every later sum.
Its `tl.dot` on float32 is numpy's, whose order of summation depends on the tile's shape, while hardware sums in that
of k whatever the tile: scores recomputed in other tiles would differ. The shim widens the operands to float64, which
holds every float exactly, cuts those of TF32 off as tensor cores do, and rounds the sum once; it casts as the hardware
does. `tl.sum` down the rows adds each to the sum of all before, where threads and warps add in a tree; the shim rounds
this sum once, too. Maxima, minima and clamps that are not told to propagate NaN do so in the interpreter; hardware
takes the other operand, and so does the shim. A comparison of numbers is an integer in 3.9, and is a bool here."""

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

Builder = interpreter.InterpreterBuilder


def install() -> None:
    """Replace the functions, once for a process."""
    if getattr(Builder.create_dot, "widens_bfloat16", False):
        return
    _install_dot()
    _install_extrema()
    _install_casts()
    interpreter.ReduceOps.sum = _widened_sum


def _install_dot() -> None:
    plain = Builder.create_dot

    def widen(handle: interpreter.TensorHandle, tf32: bool) -> np.ndarray:
        data = handle.data
        if handle.dtype.scalar == tl.bfloat16:
            data = (data.astype(np.uint32) << 16).view(np.float32)
        elif tf32 and handle.dtype.scalar == tl.float32:
            data = (np.ascontiguousarray(data).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
        return data.astype(np.float64)

    def create_dot(self, a, b, acc, precision, *rest):
        if not acc.dtype.scalar.is_floating():
            return plain(self, a, b, acc, precision, *rest)
        tf32 = precision.name == "TF32"
        with np.errstate(invalid="ignore"):  # 0 * infinity, which a GPU computes without a word
            total = np.matmul(widen(a, tf32), widen(b, tf32)) + acc.data
        return interpreter.TensorHandle(total.astype(acc.data.dtype), acc.dtype.scalar)

    create_dot.widens_bfloat16 = True
    Builder.create_dot = create_dot


def _install_extrema() -> None:
    Builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    Builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
    propagate, plain_binary = Builder.create_clampf, Builder.binary_op

    def create_clampf(self, x, low, high, propagate_nan):
        if propagate_nan == tl.PropagateNan.ALL:
            return propagate(self, x, low, high, propagate_nan)
        return self.create_minnumf(self.create_maxnumf(x, low), high)

    def binary_op(self: Any, a: Any, b: Any, op: Any) -> Any:
        result = plain_binary(self, a, b, op)
        return interpreter.TensorHandle(result.data, tl.int1) if result.data.dtype == np.bool_ else result

    Builder.create_clampf, Builder.binary_op = create_clampf, binary_op


def _install_casts() -> None:
    plain = interpreter._convert_float

    def convert_float(x: np.ndarray, source: Any, target: Any, rounding_mode: Any) -> np.ndarray:
        if (source, target) == (tl.bfloat16, tl.float32):
            return x.view(np.uint16).astype(np.uint32) << 16
        if (source, target) != (tl.float32, tl.bfloat16):
            return plain(x, source, target, rounding_mode)
        bits = x.view(np.uint32)
        nearest_even = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        return np.where(np.isnan(x.view(np.float32)), (bits >> 16) | 0x40, nearest_even).astype(np.uint16)

    interpreter._convert_float = convert_float


def _widened_sum(self: Any, x: Any) -> Any:
    data = x.handle.data
    wide = np.float64 if x.dtype.is_floating() else None
    return self.to_tensor(np.sum(data, axis=self.axis, keepdims=self.keep_dims, dtype=wide), x.dtype)
