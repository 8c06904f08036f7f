"""Kernels in Gluon, which reach most tensors by TMA descriptors that the host makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fastvit.ops.runtime.rows import row_stride

Box = tuple[int, int]  # rows and columns of what a copy takes
_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
_FIRST = 9  # arguments of Triton's launcher before the kernel's


class Described:
    """A Gluon kernel as `launch` takes one: with tensors, each of which it describes as rows, or passes as a pointer.

    boxes: of each tensor; None for a pointer.
    """

    def __init__(self, kernel: Any, boxes: Sequence[Box | None]) -> None:
        self.kernel, self.boxes = kernel, boxes
        self.fn, self.arg_names, self.__name__ = kernel.fn, kernel.arg_names, kernel.__name__

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return lambda *arguments, **constants: self.kernel[grid](*self.described(arguments), **constants)

    def described(self, arguments: Sequence[Any]) -> list[Any]:
        """Return a launch's arguments, of which the tensors come first, with descriptors."""
        boxes = (*self.boxes, *[None] * (len(arguments) - len(self.boxes)))
        return [a if a is None or box is None else _describe(a, box) for a, box in zip(arguments, boxes, strict=True)]

    def by_address(self, run: Callable[..., object], arguments: Sequence[Any]) -> Callable[..., object]:
        """Return Triton's launcher `run` with addresses in place of descriptors, for tensors as in these arguments. A
        descriptor holds the address, so every launch makes its own."""
        made = [
            (_FIRST + i, a.shape, a.strides)
            for i, a in enumerate(self.described(arguments))
            if isinstance(a, TensorDescriptor)
        ]

        def launch(*call: Any) -> None:
            filled = [*call]
            for i, shape, strides in made:
                filled[i] = _Descriptor(filled[i], shape, strides)
            run(*filled)

        return launch


class _Descriptor:
    """What Triton's launcher reads of a TensorDescriptor, whose own constructor checks what is known here."""

    __slots__ = ("_address", "shape", "strides")
    padding, round_f32_to_tf32 = "zero", False

    def __init__(self, address: int, shape: list[int], strides: list[int]) -> None:
        self._address, self.shape, self.strides = address, shape, strides

    @property
    def base(self) -> _Descriptor:
        return self

    def data_ptr(self) -> int:
        return self._address


def _describe(t: Tensor, box: Box) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for([*box], _DTYPES[t.dtype])
    width = t.shape[-1]
    return TensorDescriptor(t, [t.numel() // width, width], [row_stride(t), 1], [*box], layout)
