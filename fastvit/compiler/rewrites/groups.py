"""Keys and values that are repeated for the heads of q that share them (grouped queries):

    repeat_interleave(k, n, dim)
    k[:, :, None].expand(...).reshape(...)        k (B, heads, N, d), or (B, N, heads, d) turned afterwards

`ops.attention` takes k and v as they are before the repetition.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from fastvit.blocks.submodules import CannotFuse
from fastvit.compiler.match.calls import arguments, first, name_of
from fastvit.compiler.match.layout import Layout, Size, known_equal
from fastvit.compiler.match.rewriter import Emitter
from fastvit.compiler.match.values import fake
from fastvit.compiler.match.views import follow, strip_views


@dataclass(frozen=True)
class Repeated:
    """A repetition. x: the tensor that is repeated, (B, heads, N, d) after dimension `extra` of size 1 is squeezed and,
    if `turned`, dimensions 1 and 2 are swapped; nodes: the repetition and the views after it."""

    x: Node
    extra: int | None
    turned: bool
    heads: Size
    nodes: tuple[Node, ...]

    def emit(self, emit: Emitter) -> Node:
        x = self.x if self.extra is None else emit.method("squeeze", self.x, self.extra)
        return emit.method("transpose", x, 1, 2) if self.turned else x

    def unused(self, matched: set[Node]) -> set[Node]:
        """Return the nodes that have no users but the matched ones."""
        gone: set[Node] = set()
        for node in reversed(self.nodes):
            if (matched | gone).issuperset(node.users):
                gone.add(node)
        return gone


def repeated(t: Node, *, transposed: bool = False) -> Repeated | None:
    """Return the repetition that made k or v (B, H, N, d), or k (B, H, d, N), with the copies of a head next to each
    other, or None."""
    node, chain = strip_views(t)
    if name_of(node) not in ("expand", "repeat_interleave"):
        return None
    x = first(node)
    try:
        base = Layout.of(fake(x).shape)
        spread, dim, n = _repetition(base, node)
        layout = follow(spread, chain)
        if len(layout.dims) != 4:
            return None
        layout = layout.permute((0, 1, 3, 2)) if transposed else layout
        extra = dim if len(base.dims) == 5 else None
        plain = base if extra is None else base.select(extra, 0)
        for turned in (False, True):
            heads = plain.permute((0, 2, 1, 3)) if turned else plain
            if layout.is_same(_with_copies(heads, 1, n)):
                return Repeated(x, extra, turned, heads.size(1), (node, *chain))
    except CannotFuse:
        pass
    return None


def _repetition(base: Layout, node: Node) -> tuple[Layout, int, Size]:
    """Return the layout after a node that repeats along one dimension, which dimension, and how many times."""
    if name_of(node) == "repeat_interleave":
        _, n, dim, _ = arguments(node, input=None, repeats=None, dim=None, output_size=None)
        if not isinstance(n, int) or not isinstance(dim, int):
            raise CannotFuse("a repetition of other numbers")
        dim %= len(base.dims)
        return _with_copies(base, dim, n), dim, n
    shape = fake(node).shape
    grown = [i for i in range(len(base.dims)) if not known_equal(base.size(i), shape[i])]
    if len(shape) != len(base.dims) or len(grown) != 1 or not known_equal(base.size(grown[0]), 1):
        raise CannotFuse("an expansion of several dimensions")
    return _with_copies(base, grown[0], shape[grown[0]]), grown[0], shape[grown[0]]


def _with_copies(base: Layout, dim: int, n: Size) -> Layout:
    return Layout((*base.dims[:dim], (*base.dims[dim], (n, 0)), *base.dims[dim + 1 :]), base.offset)
