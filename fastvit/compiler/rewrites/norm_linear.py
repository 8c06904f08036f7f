"""A LayerNorm or RMSNorm whose output only linear layers read becomes one op with them, `ops.layer_norm_linear` or
`layer_norm_linears`, which saves x and the row statistics."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from fastvit import ops
from fastvit.blocks.submodules import CannotFuse
from fastvit.compiler.match.calls import arguments, first, is_number, name_of, words
from fastvit.compiler.match.rewriter import Emitter, GraphRewriter
from fastvit.compiler.match.values import fake
from fastvit.ops.block.norm_linear import layer_norm_linears
from fastvit.report import Kind


class LinearCall(NamedTuple):
    """A call of F.linear: x (..., in), weight (out, in), bias (out,) or None."""

    node: Node
    x: Node
    weight: Node
    bias: Node | None

    @property
    def out_features(self) -> Any:
        return fake(self.weight).shape[0]


class NormCall(NamedTuple):
    """A call of F.layer_norm or F.rms_norm over the last dimension of x; an RMSNorm has no bias."""

    node: Node
    x: Node
    norm: ops.Norm  # of nodes

    @property
    def tensors(self) -> tuple[Any, Any, Any]:
        """The first arguments of an op that begins with the norm."""
        return self.x, self.norm.weight, self.norm.bias

    @property
    def options(self) -> dict[str, Any]:
        """The op's keywords for it."""
        return {"eps": self.norm.eps, "norm": self.norm.kind}


_KINDS: dict[str, Kind] = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}


def is_norm(node: Any) -> bool:
    return name_of(node) in _KINDS


def linear_of(node: Node) -> LinearCall:
    if name_of(node) != "linear":
        raise CannotFuse(f"no linear layer but {words(node)}")
    x, weight, bias = arguments(node, input=None, weight=None, bias=None)
    if not isinstance(x, Node) or not isinstance(weight, Node) or fake(weight).dim() != 2:
        raise CannotFuse("a linear layer without a matrix")
    return LinearCall(node, x, weight, bias)


def norm_of(node: Node) -> NormCall:
    """Return the norm that a node calls. Raises CannotFuse if the ops have no such norm."""
    if not is_norm(node):
        raise CannotFuse(f"no norm before it but {words(node)}")
    bias: Any = None
    if name_of(node) == "layer_norm":
        x, shape, weight, bias, eps, _ = arguments(
            node, input=None, normalized_shape=None, weight=None, bias=None, eps=1e-5, cudnn_enable=True
        )
    else:
        x, shape, weight, eps = arguments(node, input=None, normalized_shape=None, weight=None, eps=None)
        eps = _default_eps(fake(x).dtype) if eps is None else eps
    called = "a LayerNorm" if name_of(node) == "layer_norm" else "an RMSNorm"
    if not isinstance(shape, tuple | list) or len(shape) != 1:
        raise CannotFuse(f"{called} over more than the last dimension")
    if weight is None:
        raise CannotFuse(f"{called} without weight")
    if not is_number(eps):
        raise CannotFuse(f"{called} whose eps is a tensor")
    return NormCall(node, x, ops.Norm(weight, bias, float(eps), "layer" if name_of(node) == "layer_norm" else "rms"))


def _default_eps(dtype: torch.dtype) -> float:
    """Return F.rms_norm's default eps. In 16 bits PyTorch 2.13 computes with another one than it documents."""
    if dtype not in (torch.float32, torch.float64):
        raise CannotFuse(f"an RMSNorm of {dtype} without eps")
    return torch.finfo(dtype).eps


def note_norm(rewriter: GraphRewriter, node: Node, op: str) -> None:
    rewriter.note(node, _KINDS[name_of(node)], op)


def rewrite(rewriter: GraphRewriter, node: Node) -> None:
    if is_norm(node):
        with rewriter.noting_refusals(node, _KINDS[name_of(node)]):
            _rewrite(rewriter, node)


def _rewrite(rewriter: GraphRewriter, node: Node) -> None:
    norm = norm_of(node)
    users = sorted(node.users)  # as they stand in the graph
    others = [words(user) for user in users if name_of(user) != "linear" or first(user) is not node]
    if others or not users:
        raise CannotFuse(f"{', '.join(sorted(set(others))[:3]) or 'nothing'} after it")
    layers = [linear_of(user) for user in users]
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]

    def build(emit: Emitter) -> list[Node]:
        if len(layers) == 1:
            return [emit.call(ops.layer_norm_linear, *norm.tensors, *weights, *biases, **norm.options)]
        outputs = emit.call(layer_norm_linears, *norm.tensors, weights, biases, **norm.options)
        return [emit.call(operator.getitem, outputs, i) for i in range(len(layers))]

    rewriter.replace_all(users, {node}, build, node)
    note_norm(rewriter, node, "layer_norm_linear" if len(layers) == 1 else "layer_norm_linears")
