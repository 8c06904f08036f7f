"""Triton's interpreter keeps bfloat16 as raw 16-bit patterns and `tl.dot` multiplies those patterns as integers.
The shim widens bfloat16 operands to float32, which holds every bfloat16 exactly, before the dot."""

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
