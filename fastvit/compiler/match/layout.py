"""Prove that a chain of views, transpositions and copies, in any spelling, is the arrangement that an op reads or
writes. Raises CannotFuse for an arrangement that modes do not describe, or that symbolic sizes do not decide.

A `Layout` describes where the elements of a tensor come from in a dense base tensor: each dimension is a list of modes
(size, stride), the outermost first. Reshaping regroups modes and permuting reorders dimensions, so a copy in between
changes nothing, and the op saves it. Sizes may be symbolic: an arrangement counts as proved only if it holds for all of
their values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fastvit.blocks.submodules import CannotFuse

Size = Any  # int or torch.SymInt
Mode = tuple[Size, Size]  # size, stride in elements of the base


def known_equal(a: Size, b: Size) -> bool:
    return statically_known_true(a == b)


def known_int(size: Size) -> int | None:
    """Return a size that is a number or a symbol that a guard fixes, otherwise None."""
    return size if isinstance(size, int) else size.node.maybe_as_int() if isinstance(size, torch.SymInt) else None


def same_shape(a: Sequence[Size], b: Sequence[Size]) -> bool:
    return len(a) == len(b) and all(map(known_equal, a, b))


def same_strides(a: Any, b: Any) -> bool:
    """Return whether two tensors of one shape have the same strides. Those of dimensions of size 1, and of tensors
    without elements, do not matter."""
    sizes = zip(a.shape, a.stride(), b.stride(), strict=True)
    return any(known_equal(size, 0) for size in a.shape) or all(
        known_equal(size, 1) or known_equal(s, t) for size, s, t in sizes
    )


def dense_strides(shape: Sequence[Size]) -> list[Size]:
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


def outermost_first(strides: Sequence[Size]) -> list[int]:
    """Return the dimensions by falling strides, as far as the order of symbolic strides is known."""
    order: list[int] = []
    for i, stride in enumerate(strides):
        before = [j for j, other in enumerate(order) if statically_known_true(strides[other] < stride)]
        order.insert(before[0] if before else len(order), i)
    return order


@dataclass(frozen=True)
class Layout:
    dims: tuple[tuple[Mode, ...], ...]
    offset: Size = 0

    @classmethod
    def of(cls, shape: Sequence[Size], strides: Sequence[Size] | None = None, offset: Size = 0) -> Layout:
        """Make a layout with one mode per dimension; dense if no strides are given."""
        strides = dense_strides(shape) if strides is None else strides
        return cls(tuple(((size, stride),) for size, stride in zip(shape, strides, strict=True)), offset)

    def size(self, dim: int) -> Size:
        return math.prod(length for length, _ in self.dims[dim])

    def reshape(self, shape: Sequence[Size]) -> Layout:
        modes = [mode for dim in self.dims for mode in dim if not known_equal(mode[0], 1)]
        dims = tuple(_take(modes, size) for size in shape)
        if modes:
            raise CannotFuse("a reshape that leaves elements over")
        return Layout(dims, self.offset)

    def permute(self, order: Sequence[int]) -> Layout:
        return Layout(tuple(self.dims[i] for i in order), self.offset)

    def narrow(self, dim: int, start: Size, length: Size) -> Layout:
        (_, stride), *inner = _coalesced(self.dims[dim]) or ((1, 0),)
        for inner_size, _ in inner:
            start, length = _exact(start, inner_size), _exact(length, inner_size)
        dims = (*self.dims[:dim], ((length, stride), *inner), *self.dims[dim + 1 :])
        return Layout(dims, self.offset + start * stride)

    def select(self, dim: int, index: Size) -> Layout:
        narrowed = self.narrow(dim, index, 1)
        return Layout((*narrowed.dims[:dim], *narrowed.dims[dim + 1 :]), narrowed.offset)

    def through_linear(self, out: Size) -> Layout:
        """Return the layout of a linear layer's output (..., out), over a base whose last dimension is `out`. self: the
        layout of its input (..., in), over a base whose last dimension is `in`."""
        last = _coalesced(self.dims[-1])
        if len(last) != 1 or not known_equal(last[0][1], 1) or not known_equal(self.offset, 0):
            raise CannotFuse("a linear layer of part of a row")
        features = last[0][0]
        leading = tuple(
            tuple((size, _exact(stride, features) * out) for size, stride in _coalesced(dim)) for dim in self.dims[:-1]
        )
        return Layout((*leading, ((out, 1),)))

    def has_rows_of(self, size: Size) -> bool:
        """Return whether the last dimension runs over whole rows of a base whose last dimension is `size`."""
        last, *outer = map(_coalesced, reversed(self.dims))
        begins = [self.offset, *(stride for dim in outer for _, stride in dim)]
        return len(last) == 1 and same_shape(last[0], (size, 1)) and all(known_equal(b % size, 0) for b in begins)

    def is_same(self, other: Layout) -> bool:
        if len(self.dims) != len(other.dims) or not known_equal(self.offset, other.offset):
            return False
        pairs = zip(map(_coalesced, self.dims), map(_coalesced, other.dims), strict=True)
        return all(len(a) == len(b) and all(map(same_shape, a, b)) for a, b in pairs)


def _take(modes: list[Mode], size: Size) -> tuple[Mode, ...]:
    """Take the outermost modes that make up a dimension of that size out of the list."""
    taken: list[Mode] = []
    while not known_equal(size, 1):
        if not modes:
            raise CannotFuse("a reshape to more elements")
        length, stride = modes.pop(0)
        if known_equal(length, size):
            taken.append((length, stride))
            break
        if known_equal(size % length, 0):
            taken.append((length, stride))
            size = size // length
        elif known_equal(length % size, 0):
            inner = length // size
            taken.append((size, inner * stride))
            modes.insert(0, (inner, stride))
            break
        else:
            raise CannotFuse("a reshape across dimensions")
    return tuple(taken)


def _coalesced(modes: Sequence[Mode]) -> tuple[Mode, ...]:
    out: list[Mode] = []
    for size, stride in modes:
        if known_equal(size, 1):
            continue
        if out and known_equal(out[-1][1], size * stride):
            out[-1] = (out[-1][0] * size, stride)
        else:
            out.append((size, stride))
    return tuple(out)


def _exact(a: Size, b: Size) -> Size:
    if not known_equal(a % b, 0):
        raise CannotFuse("a slice across dimensions")
    return a // b
