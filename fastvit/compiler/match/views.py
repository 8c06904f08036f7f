"""Chains of views between two nodes, as layouts."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from fastvit.blocks.submodules import CannotFuse
from fastvit.compiler.match.calls import first, name_of
from fastvit.compiler.match.layout import Layout, Size, known_equal
from fastvit.compiler.match.values import CASTS, fake, value_of

RESHAPES = ("reshape", "view", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as")
_PERMUTES = ("permute", "transpose", "movedim", "t", "mT", "T")
COPIES = ("contiguous", "clone", *CASTS)
_PIECES = ("unbind", "chunk", "split", "split_with_sizes")
_SIZES = (2, 3, 5, 7, 11, 13, 17)  # tell dimensions apart


def is_view(node: Any) -> bool:
    """Return whether a node only rearranges, selects or copies elements of its first argument, in the same dtype."""
    name = name_of(node)
    if name in (*COPIES, *RESHAPES):
        before, after = fake(first(node)), fake(node)
        return (before.dtype, before.device) == (after.dtype, after.device)
    return name in (*_PERMUTES, *_PIECES, "getitem", "select", "narrow")


def strip_views(node: Node) -> tuple[Node, list[Node]]:
    """Return the node that a chain of views ending in `node` starts from, and the chain, in order."""
    chain: list[Node] = []
    while is_view(node):
        chain.insert(0, node)
        node = first(node)
    return node, chain


def widened(node: Any) -> bool:
    """Return whether a node casts its first argument to a dtype that holds all of its values."""
    if name_of(node) not in CASTS:
        return False
    before, after = fake(first(node)), fake(node)
    return before.device == after.device and torch.promote_types(before.dtype, after.dtype) == after.dtype


def follow(layout: Layout, chain: list[Node]) -> Layout:
    """Return the layout at the end of a chain of views of a tensor with the layout `layout`."""
    at: Layout | list[Layout] = layout
    for node in chain:
        at = _step(at, node)
    if not isinstance(at, Layout):
        raise CannotFuse("several tensors")
    return at


def _step(at: Layout | list[Layout], node: Node) -> Layout | list[Layout]:
    name = name_of(node)
    args, kwargs = map_arg((node.args[1:], node.kwargs), value_of)  # type: Any, Any
    kwargs = {key: value for key, value in kwargs.items() if key != "input"}
    if isinstance(at, list):
        if name == "getitem" and isinstance(args[0], int):
            return at[args[0]]
        raise CannotFuse("several tensors at once")
    if name in RESHAPES:
        return at.reshape(fake(node).shape)
    if name in COPIES:
        return at
    rank = len(at.dims)
    if name in _PERMUTES:
        probe = torch.empty(_SIZES[:rank], device="meta")
        moved = getattr(probe, name)
        return at.permute([_SIZES.index(size) for size in (moved(*args, **kwargs) if callable(moved) else moved).shape])
    if name == "getitem":
        return _indexed(at, args[0])
    if name == "unbind":
        return _pieces(at, node, kwargs.get("dim", (*args, 0)[0]) % rank)
    if name in _PIECES:
        return _pieces(at, node, kwargs.get("dim", (*args, 0, 0)[1]) % rank)
    if kwargs:
        raise CannotFuse(f"{name} with keywords")
    dim = args[0] % rank
    start = _index(args[1], at, dim)
    return at.select(dim, start) if name == "select" else at.narrow(dim, start, args[2])


def _pieces(at: Layout, node: Node, dim: int) -> list[Layout]:
    pieces = value_of(node)
    if name_of(node) == "unbind":
        return [at.select(dim, i) for i in range(len(pieces))]
    out: list[Layout] = []
    start: Size = 0
    for piece in pieces:
        out.append(at.narrow(dim, start, piece.shape[dim]))
        start = start + piece.shape[dim]
    return out


def _indexed(at: Layout, index: Any) -> Layout:
    """Index by numbers, slices, ... and None."""
    items = list(index) if isinstance(index, tuple) else [index]
    if (i := next((i for i, item in enumerate(items) if item is Ellipsis), None)) is not None:
        missing = len(at.dims) - sum(item is not None and item is not Ellipsis for item in items)
        items[i : i + 1] = [slice(None)] * missing
    dim = 0
    for item in items:
        if item is None:
            at = Layout((*at.dims[:dim], (), *at.dims[dim:]), at.offset)
            dim += 1
        elif isinstance(item, slice):
            size = at.size(dim)
            if item.step not in (None, 1):
                at = _alternate(at, dim, item, size)
                dim += 1
                continue
            start = 0 if item.start is None else _index(item.start, at, dim)
            stop = size if item.stop is None else _index(item.stop, at, dim)
            if isinstance(stop, int) and isinstance(size, int):
                stop = min(stop, size)
            elif item.stop is not None:
                raise CannotFuse("a slice of unknown length")
            at = at.narrow(dim, start, stop - start)
            dim += 1
        elif isinstance(item, int) and not isinstance(item, bool):
            at = at.select(dim, _index(item, at, dim))
        else:
            raise CannotFuse("an index that is a tensor")
    return at


def _alternate(at: Layout, dim: int, item: slice, size: Size) -> Layout:
    """Index by 0::2 or 1::2 along a dimension of even size."""
    if item.step != 2 or item.start not in (None, 0, 1) or item.stop is not None or not known_equal(size % 2, 0):
        raise CannotFuse("a slice with a step")
    shape = [at.size(i) for i in range(len(at.dims))]
    return at.reshape((*shape[:dim], size // 2, 2, *shape[dim + 1 :])).select(dim + 1, item.start or 0)


def _index(i: Any, at: Layout, dim: int) -> Size:
    if not isinstance(i, int):
        raise CannotFuse("an index that is no number")
    return i + at.size(dim) if i < 0 else i
