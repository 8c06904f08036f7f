"""Patch embedding, a convolution whose stride is its kernel, of images or of videos:

    conv2d or conv3d -> flatten and transpose to (B, N, D) -> cat after CLS and registers -> + positions

becomes `ops.patch_embed`, which writes the token buffer in one pass. Calls in another order end the pattern.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from fastvit import ops
from fastvit.blocks.submodules import CannotFuse
from fastvit.compiler.match.calls import arguments, first, name_of, user_of
from fastvit.compiler.match.layout import Layout, known_equal, same_shape
from fastvit.compiler.match.rewriter import Emitter, GraphRewriter
from fastvit.compiler.match.values import fake, other_tensor, value_of
from fastvit.compiler.match.views import follow, is_view


@dataclass(frozen=True)
class _Tokens:
    """The pattern up to `root`, which holds the tokens, and the parts that they are made of."""

    root: Node
    matched: frozenset[Node]
    prefix: tuple[Node, ...] = ()
    positions: Node | None = None
    positions_cover_prefix: bool = False


def rewrite(rewriter: GraphRewriter, node: Node) -> None:
    if name_of(node) not in ("conv2d", "conv3d"):
        return
    parts, tokens = _parts_of(node), _flattened(node)
    for longest in reversed(list(_longer(tokens))):
        with rewriter.noting_refusals(node, "patch embedding"):
            _rewrite(rewriter, node, *parts, longest)
            rewriter.note(node, "patch embedding", "patch_embed")
            return


def _parts_of(node: Node) -> tuple[Node, Node, Node | None]:
    """Return image, weight and bias of a convolution. Raises CannotFuse unless it is one of disjoint patches."""
    image, weight, bias, stride, padding, dilation, groups = arguments(
        node, input=None, weight=None, bias=None, stride=1, padding=0, dilation=1, groups=1
    )
    kernel = tuple(fake(weight).shape[2:])
    stride, padding, dilation = (
        tuple(t) if isinstance(t, tuple | list) else t if isinstance(t, str) else (t,) * len(kernel)
        for t in (stride, padding, dilation)
    )
    whole = padding == "valid" or set(padding) == {0}
    if stride != kernel or not whole or set(dilation) != {1} or groups != 1 or max(kernel) == 1:
        raise CannotFuse("a convolution of other patches")
    if fake(node).dim() != fake(weight).dim():
        raise CannotFuse("an image without a batch")
    return image, weight, bias


def _flattened(node: Node) -> _Tokens:
    """Follow the views of the convolution's output to (B, N, D), row by row."""
    B, D, *grid = fake(node).shape
    n = math.prod(grid)
    want = Layout.of((B, n, D), (D * n, 1, n))
    at, layout, matched = node, Layout.of((B, D, *grid)), frozenset[Node]()
    while not layout.is_same(want):
        if (user := user_of(at)) is None or not is_view(user):
            raise CannotFuse("an image")
        layout, matched = follow(layout, [user]), matched | {at}
        at = user
    return _Tokens(at, matched)


def _longer(tokens: _Tokens) -> Iterator[_Tokens]:
    while True:
        yield tokens
        user = user_of(tokens.root)
        if user is None:
            return
        grown = replace(tokens, root=user, matched=tokens.matched | {tokens.root})
        if name_of(user) == "add" and tokens.positions is None:
            other = other_tensor(user, tokens.root)
            if other is None or not _is_one_sample(other, tokens.root):
                return
            tokens = replace(grown, positions=other, positions_cover_prefix=bool(tokens.prefix))
        elif name_of(user) == "cat" and not tokens.prefix and (before := _before(user, tokens.root)) is not None:
            tokens = replace(grown, prefix=before)
        else:
            return


def _is_one_sample(positions: Node, tokens: Node) -> bool:
    """Return whether positions are (1, N, D) or (N, D), the same for every sample."""
    shape = fake(positions).shape
    same = same_shape(shape[-2:], fake(tokens).shape[-2:])
    return same and (len(shape) == 2 or same_shape(shape[:-2], (1,)))


def _before(cat: Node, tokens: Node) -> tuple[Node, ...] | None:
    """Return the tensors before the tokens in a cat along N, if they are the same for every sample, otherwise None."""
    try:
        tensors, dim = arguments(cat, tensors=None, dim=0)
    except CannotFuse:
        return None
    if dim not in (1, -2) or not isinstance(tensors, tuple | list) or tensors[-1] is not tokens:
        return None
    before = tuple(map(_one_sample, tensors[:-1]))
    return before if before and None not in before and tokens not in tensors[:-1] else None  # type: ignore[return-value]


def _one_sample(node: Node) -> Node | None:
    """Return the tensor (1, P, D) that is expanded to all samples, or that has one sample; otherwise None."""
    if name_of(node) in ("expand", "expand_as"):
        node = first(node)
    value = value_of(node)
    return node if value is not None and value.dim() == 3 and known_equal(value.shape[0], 1) else None


def _rewrite(
    rewriter: GraphRewriter, conv: Node, image: Node, weight: Node, bias: Node | None, tokens: _Tokens
) -> None:
    def build(emit: Emitter) -> Node:
        pos = tokens.positions
        if pos is not None and fake(pos).dim() == 3:
            pos = emit.method("select", pos, 0, 0)
        prefix = None
        if tokens.prefix:
            rows = [emit.method("select", node, 0, 0) for node in tokens.prefix]
            prefix = rows[0] if len(rows) == 1 else emit.call(torch.cat, rows)
            if pos is not None and tokens.positions_cover_prefix:
                P = fake(prefix).shape[0]
                prefix = emit.call(operator.add, prefix, emit.method("narrow", pos, 0, 0, P))
                pos = emit.method("narrow", pos, 0, P, fake(pos).shape[0] - P)
        return emit.call(ops.patch_embed, image, weight, bias, pos_embed=pos, prefix=prefix)

    rewriter.replace(tokens.root, tokens.matched, build, conv)
