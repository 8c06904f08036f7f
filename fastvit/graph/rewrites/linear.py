"""linear -> LayerScale, DropPath, residual becomes `ops.linear`, in one pass over the output."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from fastvit import ops
from fastvit.blocks.submodules import CannotFuse
from fastvit.graph.match.calls import name_of
from fastvit.graph.match.rewriter import Emitter, GraphRewriter
from fastvit.graph.rewrites.epilogue import epilogues, replace_longest
from fastvit.graph.rewrites.norm_linear import linear_of


def rewrite(rewriter: GraphRewriter) -> None:
    for node in list(rewriter.graph.nodes):
        if name_of(node) != "linear" or next(epilogues(node)).root is node:
            continue
        try:
            linear = linear_of(node)

            def build(emit: Emitter, epilogue: dict[str, Any], linear: Any = linear) -> Node:
                if not epilogue:
                    raise CannotFuse("nothing after it that the op takes")
                return emit.call(ops.linear, linear.x, linear.weight, linear.bias, **epilogue)

            replace_longest(rewriter, node, {node}, node, build)
            rewriter.note(node, "linear", True, "linear")
        except CannotFuse as reason:
            rewriter.note(node, "linear", False, str(reason))
