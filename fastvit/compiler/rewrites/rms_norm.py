"""RMSNorm written out (Zhang & Sennrich 2019) becomes torch's own call, which later rewrites know:

    weight * (x * rsqrt(mean(x**2, -1, keepdim=True) + eps))        x (..., D), weight (D,)

It may be computed in any dtypes that are not narrower than x's, the output's and float32: torch, like the ops, computes
in float32 and rounds once. The weight may be computed, such as 1 + weight. If no op takes the call, it still saves less
than its parts: x and a number a row.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from fastvit.blocks.submodules import CannotFuse
from fastvit.compiler.match.calls import arguments, first, is_number, name_of, only_user, operands, user_of, words
from fastvit.compiler.match.layout import known_equal, same_shape
from fastvit.compiler.match.rewriter import Emitter, GraphRewriter
from fastvit.compiler.match.values import CASTS, fake, other_tensor, value_of

_WIDE = (torch.float32, torch.float64)


def rewrite(rewriter: GraphRewriter, node: Node) -> None:
    if operation := _root_of(node):
        with rewriter.noting_refusals(node, "RMSNorm"):
            if squares := _mean_square(first(node)):
                _rewrite(rewriter, node, operation, *squares)


def _root_of(node: Node) -> str:
    """Return how x is combined with this root of a mean square: "mul" with 1 / sqrt(...), "div" by sqrt(...), "" for
    any other node."""
    name = name_of(node)
    exponent = node.args[1] if name == "pow" and len(node.args) == 2 and not node.kwargs else None
    if name == "rsqrt" or exponent == -0.5:
        return "mul"
    return "div" if name == "sqrt" or exponent == 0.5 else ""


def _mean_square(total: Any) -> tuple[Node, set[Node], float] | None:
    """Return x, the nodes that compute mean(x * x, -1, keepdim=True) + eps, and eps; None for any other node."""
    sums = [pair for pair in operands(total, "add") if name_of(pair[0]) == "mean"]
    if not sums or (x := _squared(first(sums[0][0]))) is None:
        return None
    mean, eps = sums[0]
    if isinstance(eps, Node) and isinstance(value_of(eps), torch.SymFloat):
        eps = float(value_of(eps))  # of a dynamic graph, which is then for this value only, as with torch's norms
    if not is_number(eps):
        raise CannotFuse("an RMSNorm whose eps is a tensor")
    _, dim, keepdim, _ = arguments(mean, input=None, dim=None, keepdim=False, dtype=None)
    dims = list(dim) if isinstance(dim, tuple | list) else [dim]
    if dims not in ([-1], [fake(x).dim() - 1]) or keepdim is not True:
        raise CannotFuse("an RMSNorm over another dimension")
    return x, {first(mean), mean, total}, float(eps)


def _squared(node: Any) -> Node | None:
    """x of x * x, x**2 or x.square()"""
    name = name_of(node)
    if not name or node.kwargs or not node.args:
        return None
    x, *rest = node.args
    square = name == "square" or (name == "pow" and rest == [2]) or (name == "mul" and rest == [x])
    return x if square and isinstance(x, Node) else None


def _rewrite(
    rewriter: GraphRewriter, root: Node, operation: str, squared: Node, matched: set[Node], eps: float
) -> None:
    """Replace the norm. root: of the mean square; squared: x, or a cast of it; matched: the mean square's nodes."""
    at, user = root, only_user(root)
    matched.add(root)
    while name_of(user) in CASTS and first(user) is at:
        at, user = user, only_user(user)
        matched.add(at)
    other = other_tensor(user, at)
    if name_of(user) != operation or other is None or (operation == "div" and first(user) is at):
        raise CannotFuse(f"{words(user)} after the root of a mean of squares")
    of_product = _with_cast_inputs(other)
    of_square = _with_cast_inputs(squared)
    inputs = [node for node in of_product if node in of_square]
    if not inputs:
        raise CannotFuse("a mean of squares of another tensor")
    products = _weighted(user, frozenset(matched))
    if not products:
        raise CannotFuse("an RMSNorm without weight")
    refused: CannotFuse | None = None
    for x in reversed(inputs):
        casts = {*of_product[: of_product.index(x)], *of_square[: of_square.index(x)]}
        rounded = {fake(node).dtype for node in inputs[inputs.index(x) :]}
        for end, weight, nodes in reversed(products):
            try:
                _put_in(rewriter, x, end, weight, nodes | casts, rounded, eps)
                return
            except CannotFuse as reason:
                refused = refused or reason
    assert refused is not None
    raise refused


def _with_cast_inputs(node: Any) -> list[Node]:
    """Return the node and the nodes that it was cast from, step by step."""
    casts = [node]
    while name_of(node) in CASTS and same_shape(fake(node).shape, fake(first(node)).shape):
        node = first(node)
        casts.append(node)
    return casts


def _weighted(normalized: Node, matched: frozenset[Node]) -> list[tuple[Node, Node, frozenset[Node]]]:
    """Return the product of x / sqrt(...) with a vector, and its casts, from the first to the last: the node, the
    vector, and the nodes from the root of the mean square to it."""
    found: list[tuple[Node, Node, frozenset[Node]]] = []
    at = normalized
    weight: Node | None = None
    while True:
        if weight is not None:
            found.append((at, weight, matched))
        user = user_of(at)
        if user is None:
            return found
        if name_of(user) == "mul" and weight is None:
            weight = other_tensor(user, at)
            if weight is None or fake(weight).dim() != 1:
                return found
        elif name_of(user) not in CASTS or first(user) is not at:
            return found
        matched, at = matched | {at}, user


def _put_in(
    rewriter: GraphRewriter, x: Node, end: Node, weight: Node, matched: Set[Node], rounded: Set[torch.dtype], eps: float
) -> None:
    """Replace the matched nodes, up to `end`. rounded: the dtypes that x was rounded to before."""
    dtype, size = fake(x).dtype, fake(weight).shape[0]
    if any(fake(node).dtype not in (*rounded, fake(end).dtype, *_WIDE) for node in matched):
        raise CannotFuse("an RMSNorm that is rounded on the way")
    if name_of(weight) in CASTS and fake(weight).dtype in _WIDE and fake(first(weight)).dtype == dtype:
        weight = first(weight)
    if fake(weight).dtype != dtype:
        raise CannotFuse(f"an RMSNorm of {dtype} by a weight of {fake(weight).dtype}")
    if not isinstance(size, int) or not known_equal(fake(x).shape[-1], size):
        raise CannotFuse("an RMSNorm with a weight of another size")

    def build(emit: Emitter) -> Node:
        return emit.call(F.rms_norm, x, (size,), weight, eps)

    rewriter.replace(end, matched, build, end)
