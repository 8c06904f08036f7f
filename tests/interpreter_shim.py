"""Triton's interpreter keeps bfloat16 as raw 16-bit patterns. `tl.dot` multiplies those patterns as integers, and a
cast from float32 truncates where the hardware rounds to nearest even, a bias that adds up in every sum behind it.
The shim widens bfloat16 operands to float32, which holds every bfloat16 exactly, before the dot, and casts as the
hardware does."""

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def install() -> None:
    builder = interpreter.InterpreterBuilder
    if getattr(builder.create_dot, "widens_bfloat16", False):
        return
    plain = builder.create_dot

    def widen(handle: interpreter.TensorHandle) -> interpreter.TensorHandle:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        data = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(data, tl.float32)

    def create_dot(self, a, b, *rest):
        return plain(self, widen(a), widen(b), *rest)

    create_dot.widens_bfloat16 = True
    builder.create_dot = create_dot

    plain_convert = interpreter._convert_float

    def convert_float(x: np.ndarray, source: Any, target: Any, rounding_mode: Any) -> np.ndarray:
        if (source, target) == (tl.bfloat16, tl.float32):
            return x.view(np.uint16).astype(np.uint32) << 16
        if (source, target) != (tl.float32, tl.bfloat16):
            return plain_convert(x, source, target, rounding_mode)
        bits = x.view(np.uint32)
        nearest_even = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        return np.where(np.isnan(x.view(np.float32)), (bits >> 16) | 0x40, nearest_even).astype(np.uint16)

    interpreter._convert_float = convert_float
