"""Kernels in Gluon, which reach most tensors by TMA descriptors that the host makes."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fastvit.ops.runtime.rows import row_stride

Box = tuple[int, ...]  # what a copy takes: rows and columns; or 1, 1, tokens and d of a tensor (B, N, H, d)
_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
_FIRST = 9  # arguments of Triton's launcher before the kernel's
_MOST_KEPT = 1 << 14  # descriptors, of some 500 bytes each
_kept: dict[tuple[object, int], list[Any]] = {}  # by what makes them, and address


class Described:
    """A Gluon kernel as `launch` takes one.

    boxes: of the parameters that are tensors, which it describes as rows; None for a pointer.
    takes: which of a launch's tensors each of these parameters takes; None: each its own.
    """

    def __init__(self, kernel: Any, boxes: Sequence[Box | None], takes: Sequence[int] | None = None) -> None:
        self.kernel, self.boxes, self.takes = kernel, boxes, takes or range(len(boxes))
        self.tensors = max(self.takes) + 1
        self.fn, self.__name__ = kernel.fn, kernel.__name__
        self.arg_names = kernel.arg_names[len(boxes) - self.tensors :]  # as many as a launch has arguments

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return lambda *arguments, **constants: self.kernel[grid](*self.described(arguments), **constants)

    def described(self, arguments: Sequence[Any]) -> list[Any]:
        """Return a launch's arguments, of which the tensors come first, with descriptors."""
        tensors = zip([arguments[i] for i in self.takes], self.boxes, strict=True)
        described = [t if t is None or box is None else _describe(t, box) for t, box in tensors]
        return [*described, *arguments[self.tensors :]]

    def by_address(self, run: Any, arguments: Sequence[Any]) -> Callable[..., object]:
        """Return Triton's launcher `run` for addresses of tensors as in these arguments. A descriptor holds an address;
        an allocator gives the same ones again, so descriptors are kept."""
        like = {i: t for i, t in enumerate(self.described(arguments)) if type(t) is TensorDescriptor}
        makers, bare = _makers(run, like)
        rest = _FIRST + self.tensors
        sources = [(_FIRST + at, makers.get(i)) for i, at in enumerate(self.takes)]

        def launch(*call: Any) -> None:
            filled = [*call[:_FIRST]]
            for at, make in sources:
                if make is None:
                    filled.append(call[at])
                    continue
                descriptor = _kept.get((make, call[at]))
                if descriptor is None:
                    if len(_kept) >= _MOST_KEPT:
                        _kept.clear()
                    descriptor = _kept[make, call[at]] = make(call[at])
                filled += descriptor
            bare(*filled, *call[rest:])

        return launch


def _makers(run: Any, like: dict[int, TensorDescriptor]) -> tuple[dict[int, Callable[[int], list[Any]]], Any]:
    """Return, for each descriptor, the function that makes what Triton's compiled launcher takes for an address; and
    `run` without the step that would make it in every launch, or as it is if this version has another step."""
    step = run.launch
    of_step = dict(zip(step.__code__.co_freevars, (cell.cell_contents for cell in step.__closure__), strict=True))
    make = of_step.get("make_tensordesc_arg") or step.__globals__.get("make_tensordesc_arg")
    if make is None or not {"launcher", "tensordesc_meta"} <= {*of_step}:
        return {i: functools.partial(_described, t.shape, t.strides) for i, t in like.items()}, run
    bare = copy.copy(run)
    bare.launch = of_step["launcher"]
    others = [None] * (len(inspect.signature(make).parameters) - 2)  # from Triton 3.8 on

    def maker(shape: list[int], strides: list[int], metadata: Any) -> Callable[[int], list[Any]]:
        return lambda address: make(_Descriptor(address, shape, strides), metadata, *others)

    of_each = zip(like.items(), of_step["tensordesc_meta"], strict=True)
    return {i: maker(t.shape, t.strides, metadata) for (i, t), metadata in of_each}, bare


def _described(shape: list[int], strides: list[int], address: int) -> list[Any]:
    return [_Descriptor(address, shape, strides)]


class _Descriptor:
    """A TensorDescriptor as Triton's launcher reads it, without the constructor's checks, which were made once."""

    __slots__ = ("address", "shape", "strides")
    padding, round_f32_to_tf32 = "zero", False
    base = property(lambda self: self)

    def __init__(self, address: int, shape: list[int], strides: list[int]) -> None:
        self.address, self.shape, self.strides = address, shape, strides

    def data_ptr(self) -> int:
        return self.address


def _describe(t: Tensor, box: Box) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for([*box], _DTYPES[t.dtype])
    if len(box) == 2:
        width = t.shape[-1]
        return TensorDescriptor(t, [t.numel() // width, width], [row_stride(t), 1], [*box], layout)
    sizes = [t.shape[i] for i in (0, 2, 1, 3)]
    # the stride of one sample, or of one head, may be anything, but TMA takes multiples of 16 bytes only
    strides = [t.stride(i) if t.shape[i] > 1 else t.shape[3] for i in (0, 2, 1)]
    return TensorDescriptor(t, sizes, [*strides, 1], [*box], layout)
