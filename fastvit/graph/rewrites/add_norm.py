"""A residual sum and the norm after it, s = residual + branch and norm(s), become `ops.add_layer_norm`: one pass over
the rows. A norm is a LayerNorm or an RMSNorm; s may be used elsewhere."""

from __future__ import annotations

import contextlib
import operator

from torch.fx import Node

from fastvit import ops
from fastvit.blocks.submodules import CannotFuse
from fastvit.graph.match.calls import first, operands
from fastvit.graph.match.layout import same_shape
from fastvit.graph.match.rewriter import Emitter, GraphRewriter
from fastvit.graph.match.values import fake, value_of
from fastvit.graph.rewrites.norm_linear import is_norm, norm_of, note_norm


def rewrite(rewriter: GraphRewriter) -> None:
    for node in list(rewriter.graph.nodes):
        if not is_norm(node) or not operands(total := first(node), "add"):
            continue
        with contextlib.suppress(CannotFuse):  # norm_linear has noted why the norm was left
            _rewrite(rewriter, node, total)
            note_norm(rewriter, node, True, "add_layer_norm")


def _rewrite(rewriter: GraphRewriter, node: Node, total: Node) -> None:
    norm, (residual, branch) = norm_of(node), total.args
    terms = [t for t in (residual, branch) if isinstance(t, Node) and value_of(t) is not None]
    if len(terms) != 2 or not same_shape(fake(terms[0]).shape, fake(terms[1]).shape):
        raise CannotFuse("a sum of other shapes before it")

    def build(emit: Emitter) -> list[Node]:
        of_norm = norm.weight, norm.bias
        both = emit.call(ops.add_layer_norm, residual, branch, *of_norm, eps=norm.eps, norm=norm.kind)
        return [emit.call(operator.getitem, both, i) for i in range(2)]

    rewriter.replace_all([total, node], {total, node}, build, node)
