"""The epilogue of a linear layer, up to the residual stream, in one pass over its output:

    residual + row_scale * layer_scale * linear(...)        branch (B, ..., D)

becomes part of the op that ends in the layer, or `ops.linear`, if no other op takes the layer.

layer_scale: a factor (D,). row_scale: one factor a sample (B, 1, ..., 1), drawn by stochastic depth; some libraries
divide the branch by the probability of keeping it instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import Node

from fastvit import ops
from fastvit.blocks.submodules import CannotFuse
from fastvit.compiler.match.calls import name_of, scaled, user_of
from fastvit.compiler.match.layout import known_equal, same_shape
from fastvit.compiler.match.rewriter import Emitter, GraphRewriter
from fastvit.compiler.match.values import fake, other_tensor
from fastvit.compiler.rewrites.norm_linear import linear_of


@dataclass(frozen=True)
class Epilogue:
    """An epilogue of one length. root: its last node; matched: its other nodes."""

    root: Node
    matched: frozenset[Node] = field(default_factory=frozenset)
    layer_scale: Node | None = None
    row_scale: Node | None = None
    factor: float = 1.0  # of the row_scale
    residual: Node | None = None

    def arguments(self, emit: Emitter) -> dict[str, Any]:
        """Return the arguments for an op."""
        given: dict[str, Any] = {}
        if self.layer_scale is not None:
            flat = fake(self.layer_scale).dim() == 1
            given["layer_scale"] = self.layer_scale if flat else emit.method("flatten", self.layer_scale)
        if self.row_scale is not None:
            rows = emit.method("flatten", self.row_scale)
            given["row_scale"] = rows if self.factor == 1.0 else emit.method("mul", rows, self.factor)
        if self.residual is not None:
            given["residual"] = self.residual
        return given


def epilogues(branch: Node) -> Iterator[Epilogue]:
    """Yield the epilogues of the node `branch`, from the longest to none."""
    ending = [Epilogue(branch)]
    while (longer := _longer(ending[-1])) is not None:
        ending.append(longer)
    for epilogue in reversed(ending):
        if epilogue.factor == 1.0 or epilogue.row_scale is not None:
            yield epilogue


def _longer(e: Epilogue) -> Epilogue | None:
    at, user = e.root, user_of(e.root)
    if user is None or e.residual is not None:
        return None
    name = name_of(user)
    taken = replace(e, root=user, matched=e.matched | {at})
    if (factor := scaled(user)) is not None:
        return replace(taken, factor=e.factor * factor[1])
    other = other_tensor(user, at)
    if name not in ("mul", "add") or other is None:
        return None
    shape, of = fake(at).shape, fake(other)
    if name == "add":
        return replace(taken, residual=other) if same_shape(of.shape, shape) else None
    if _is_vector(of.shape, shape[-1]) and e.layer_scale is None:
        return replace(taken, layer_scale=other)
    rows = (
        of.dim() == len(shape) and known_equal(of.shape[0], shape[0]) and all(known_equal(s, 1) for s in of.shape[1:])
    )
    if rows and e.row_scale is None and not of.requires_grad:
        return replace(taken, row_scale=other)
    return None


def _is_vector(shape: Any, size: Any) -> bool:
    return len(shape) > 0 and known_equal(shape[-1], size) and all(known_equal(s, 1) for s in shape[:-1])


Build = Callable[[Emitter, dict[str, Any]], Node]


def replace_longest(rewriter: GraphRewriter, branch: Node, matched: set[Node], site: Node, build: Build) -> None:
    """Replace the matched nodes, up to branch, with the longest possible epilogue. Raises CannotFuse if none can be
    replaced, not even the empty one."""

    def replace_with(e: Epilogue) -> None:
        rewriter.replace(e.root, matched | e.matched, lambda emit: build(emit, e.arguments(emit)), site)

    *longer, none = epilogues(branch)
    for epilogue in longer:
        with contextlib.suppress(CannotFuse):
            replace_with(epilogue)
            return
    replace_with(none)


def rewrite(rewriter: GraphRewriter, node: Node) -> None:
    if name_of(node) != "linear" or next(epilogues(node)).root is node:
        return

    def build(emit: Emitter, epilogue: dict[str, Any]) -> Node:
        if not epilogue:
            raise CannotFuse("nothing after it that the op takes")
        return emit.call(ops.linear, linear.x, linear.weight, linear.bias, **epilogue)

    with rewriter.noting_refusals(node, "linear"):
        linear = linear_of(node)
        replace_longest(rewriter, node, {node}, node, build)
        rewriter.note(node, "linear", "linear")
