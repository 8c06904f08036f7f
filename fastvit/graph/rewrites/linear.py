"""linear -> LayerScale, DropPath, residual becomes `ops.linear`, in one pass over the output."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from fastvit import ops
from fastvit.graph.match.calls import Refused, name_of
from fastvit.graph.match.rewriter import Emitter, Subject
from fastvit.graph.rewrites.epilogue import epilogues, replace_longest
from fastvit.graph.rewrites.norm_linear import linear_of


def rewrite(subject: Subject) -> None:
    for node in list(subject.graph.nodes):
        if name_of(node) != "linear" or next(epilogues(node)).root is node:
            continue
        try:
            linear = linear_of(node)

            def build(emit: Emitter, epilogue: dict[str, Any], linear: Any = linear) -> Node:
                if not epilogue:
                    raise Refused("nothing behind it that the op takes")
                return emit.call(ops.linear, linear.x, linear.weight, linear.bias, **epilogue)

            replace_longest(subject, node, {node}, node, build)
            subject.note(node, "linear", True, "linear")
        except Refused as reason:
            subject.note(node, "linear", False, str(reason))
