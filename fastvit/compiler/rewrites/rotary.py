"""Rotary positions of q or k, of all tokens or of those after a prefix:

    x * cos + turned(x) * sin               turned(x): (-second half, first half), or (-x1, x0, -x3, x2, ...)
    cat((tokens[:P], rotated(tokens[P:])))  over (B, H, N, d), and rounded back

become an `ops.Rotary` for the op of the attention half, which rotates in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from fastvit.blocks.submodules import CannotFuse
from fastvit.compiler.match.calls import arguments, first, name_of, operands
from fastvit.compiler.match.layout import Layout, known_equal, same_shape
from fastvit.compiler.match.values import VIEWS, fake
from fastvit.compiler.match.views import follow, is_view, strip_views
from fastvit.ops import Rotary


@dataclass(frozen=True)
class Rotation:
    """x: the tensor that is rotated, (B, H, N, d); matched: the nodes that rotate it."""

    x: Node
    rotary: Rotary  # of nodes
    matched: frozenset[Node]


def rotation_of(node: Node) -> Rotation | None:
    """Return the rotation that ends at node, or None. Raises CannotFuse for a rotation that the op does not take."""
    if name_of(node) == "add":
        return _rotated(node)
    if name_of(node) != "cat":
        return None
    tensors, dim = arguments(node, tensors=None, dim=0)
    if len(tensors) != 2 or dim not in (2, -2) or fake(node).dim() != 4:
        return None
    prefix, (at, casts) = tensors[0], strip_views(tensors[1])
    inner = _rotated(at)
    if inner is None:
        return None
    P = fake(prefix).shape[2]
    whole = _sliced_from(inner.x)
    tokens = Layout.of(fake(whole).shape)
    if not isinstance(P, int) or not _relative(prefix, whole).is_same(tokens.narrow(2, 0, P)):
        raise CannotFuse("tokens before the rotated ones that are not those before them")
    if not _relative(inner.x, whole).is_same(tokens.narrow(2, P, tokens.size(2) - P)):
        raise CannotFuse("rotated tokens that are not the last")
    views = _between(prefix, whole) + _between(inner.x, whole)
    return Rotation(whole, inner.rotary._replace(num_prefix_tokens=P), inner.matched.union(casts, views, (node,)))


def _rotated(add: Node) -> Rotation | None:
    """x * cos + turned(x) * sin"""
    for by_cos, by_sin in operands(add, "add"):
        for turned, sin in operands(by_sin, "mul"):
            for x, cos in operands(by_cos, "mul"):
                if not all(isinstance(t, Node) for t in (turned, sin, x, cos)) or fake(x).dim() != 4:
                    continue
                if (found := _turned(turned, x)) is not None:
                    interleaved, matched = found
                    _check_tables(x, sin, cos)
                    return Rotation(x, Rotary(sin, cos, 0, interleaved), matched | {add, by_cos, by_sin})
    return None


def same_positions(a: Rotary | None, b: Rotary | None) -> bool:
    """Return whether two rotations have the same tables, or equal slices of one, or there is none of both."""
    if a is None or b is None:
        return a is b
    return a[2:] == b[2:] and _same(a.sin, b.sin) and _same(a.cos, b.cos)


def _same(a: Any, b: Any) -> bool:
    if a is b or not (isinstance(a, Node) and isinstance(b, Node)):
        return a is b or a == b
    alike = a.target == b.target and name_of(a) in VIEWS and a.kwargs == b.kwargs and len(a.args) == len(b.args)
    return alike and all(map(_same, a.args, b.args))


def _check_tables(x: Node, sin: Node, cos: Node) -> None:
    if fake(sin).requires_grad or fake(cos).requires_grad:
        raise CannotFuse("rotary positions that are learnt")
    if not same_shape(fake(sin).shape[-2:], fake(x).shape[-2:]) or not same_shape(fake(cos).shape, fake(sin).shape):
        raise CannotFuse("rotary positions of part of a head")


def _turned(node: Node, x: Node) -> tuple[bool, frozenset[Node]] | None:
    """Return whether turned(x) is interleaved, and its nodes; None if node is not turned(x)."""
    shape = fake(x).shape
    half = shape[-1] // 2
    joined, views = strip_views(node) if name_of(node) != "cat" else (node, [])
    if name_of(joined) not in ("cat", "stack") or not known_equal(half * 2, shape[-1]):
        return None
    interleaved = name_of(joined) == "stack"
    tensors, dim = arguments(joined, tensors=None, dim=0)
    if len(tensors) != 2 or dim not in (-1, len(shape) - (not interleaved)) or name_of(tensors[0]) != "neg":
        return None
    if views and not follow(Layout.of(fake(joined).shape), views).is_same(Layout.of(shape)):
        return None
    second, firsts = first(tensors[0]), tensors[1]
    whole = Layout.of(shape)
    if interleaved:
        pairs = whole.reshape((*shape[:-1], half, 2))
        wanted = pairs.select(len(shape), 1), pairs.select(len(shape), 0)
    else:
        wanted = whole.narrow(len(shape) - 1, half, half), whole.narrow(len(shape) - 1, 0, half)
    try:
        if not all(_relative(t, x).is_same(want) for t, want in zip((second, firsts), wanted, strict=True)):
            return None
    except CannotFuse:
        return None
    between = {*_between(second, x), *_between(firsts, x)}
    return interleaved, frozenset({node, joined, *views, tensors[0], *between})


def _between(node: Node, base: Node) -> list[Node]:
    """Return the views from base, without it, to node, in order."""
    chain: list[Node] = []
    while node is not base:
        if not is_view(node):
            raise CannotFuse("something between a tensor and its parts")
        chain.insert(0, node)
        node = first(node)
    return chain


def _relative(node: Node, base: Node) -> Layout:
    return follow(Layout.of(fake(base).shape), _between(node, base))


def _sliced_from(x: Node) -> Node:
    """Return the tensor that x is a slice of: tensor[:, :, P:], or an item of tensor.split(...)."""
    before: Any = first(x) if is_view(x) else x
    return first(before) if name_of(before) in ("split", "split_with_sizes") else before
