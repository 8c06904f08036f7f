"""A residual sum and the norm after it, s = residual + branch and norm(s), become `ops.add_layer_norm`: one pass over
the rows. A norm is a LayerNorm or an RMSNorm; s may be used elsewhere. `norm_linear.py` notes why others are left."""

from __future__ import annotations

import operator

from torch.fx import Node

from fastvit import ops
from fastvit.compiler.match.calls import first, operands
from fastvit.compiler.match.layout import same_shape
from fastvit.compiler.match.rewriter import Emitter, GraphRewriter
from fastvit.compiler.match.values import fake
from fastvit.compiler.rewrites.norm_linear import is_norm, norm_of, note_norm


def rewrite(rewriter: GraphRewriter, node: Node) -> None:
    if not is_norm(node) or not operands(total := first(node), "add"):
        return
    norm, (residual, branch) = norm_of(node), total.args
    if not same_shape(fake(residual).shape, fake(branch).shape):
        return

    def build(emit: Emitter) -> list[Node]:
        both = emit.call(ops.add_layer_norm, residual, branch, *norm.tensors[1:], **norm.options)
        return [emit.call(operator.getitem, both, i) for i in range(2)]

    rewriter.replace_all([total, node], {total, node}, build, node)
    note_norm(rewriter, node, "add_layer_norm")
