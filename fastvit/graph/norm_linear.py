"""LayerNorm -> linear, nothing else reading the normalised rows, becomes `ops.layer_norm_linear`, which saves x and the
row statistics. Of several layers only those of attention are one op: the op's output would be theirs side by side."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.fx import Node

from fastvit import ops
from fastvit.graph._calls import Refused, arguments, first, is_number, name_of, words
from fastvit.graph._subject import Emitter, Subject
from fastvit.graph._values import fake


class LinearCall(NamedTuple):
    """A call of F.linear: x (..., in), weight (out, in), bias (out,) or None."""

    node: Node
    x: Node
    weight: Node
    bias: Node | None

    @property
    def out_features(self) -> Any:
        return fake(self.weight).shape[0]


class Norm(NamedTuple):
    """A call of F.layer_norm over the last dimension."""

    x: Node
    weight: Node
    bias: Node
    eps: float


def linear_of(node: Node) -> LinearCall:
    if name_of(node) != "linear":
        raise Refused(f"no linear layer but {words(node)}")
    x, weight, bias = arguments(node, input=None, weight=None, bias=None)
    if not isinstance(x, Node) or not isinstance(weight, Node) or fake(weight).dim() != 2:
        raise Refused("a linear layer without a matrix")
    return LinearCall(node, x, weight, bias)


def norm_of(node: Node) -> Norm:
    """Raises Refused for what is no LayerNorm that the ops have."""
    if name_of(node) != "layer_norm":
        raise Refused(f"no LayerNorm before it but {words(node)}")
    x, shape, weight, bias, eps, _ = arguments(
        node, input=None, normalized_shape=None, weight=None, bias=None, eps=1e-5, cudnn_enable=True
    )
    if not isinstance(shape, tuple | list) or len(shape) != 1:
        raise Refused("a LayerNorm over more than the last dimension")
    if weight is None or bias is None:
        raise Refused("a LayerNorm without weight or bias")
    if not is_number(eps):
        raise Refused("a LayerNorm whose eps is a tensor")
    return Norm(x, weight, bias, float(eps))


def rewrite(subject: Subject) -> None:
    for node in list(subject.graph.nodes):
        if name_of(node) != "layer_norm":
            continue
        try:
            _rewrite(subject, node)
        except Refused as reason:
            subject.note(node, "LayerNorm", False, str(reason))
        else:
            subject.note(node, "LayerNorm", True, "layer_norm_linear")


def _rewrite(subject: Subject, node: Node) -> None:
    norm = norm_of(node)
    users = list(node.users)
    others = [words(user) for user in users if name_of(user) != "linear" or first(user) is not node]
    if others or not users:
        raise Refused(f"{', '.join(sorted(set(others))[:3])} behind it")
    if len(users) > 1:
        raise Refused("several linear layers behind it, not those of attention")
    linear = linear_of(users[0])

    def build(emit: Emitter) -> Node:
        of_norm = norm.x, norm.weight, norm.bias
        return emit.call(ops.layer_norm_linear, *of_norm, linear.weight, linear.bias, eps=norm.eps)

    subject.replace(users[0], {node}, build, node)
