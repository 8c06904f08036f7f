"""One name for all spellings of a call in Dynamo's graph: torch.add(a, b), a + b, a += b and a.add_(b) are "add".

Patterns need not tell calls in place apart, because `GraphRewriter.replace` refuses writes that anything else reads.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from fastvit.blocks.submodules import CannotFuse

_SPACES = (torch, F, torch.Tensor, torch.special, operator)
_NAMES = """
    layer_norm rms_norm linear scaled_dot_product_attention softmax matmul bmm einsum conv2d conv3d dropout gelu relu
    silu sigmoid tanh add iadd mul imul multiply div truediv true_divide divide pow square mean sqrt rsqrt neg cat
    concat stack setitem getitem reshape flatten unflatten squeeze unsqueeze permute transpose swapaxes swapdims
    movedim moveaxis t unbind chunk split narrow select clone expand repeat_interleave masked_fill where full tensor
"""
_ALIASES = {
    "bmm": "matmul", "__matmul__": "matmul", "truediv": "div", "true_divide": "div", "divide": "div", "multiply": "mul",
    "iadd": "add_", "imul": "mul_", "swapaxes": "transpose", "swapdims": "transpose", "moveaxis": "movedim",
    "__getitem__": "getitem", "concat": "cat", "__neg__": "neg",
}  # fmt: skip
_FUNCTIONS: dict[Any, str] = {}
for _name in _NAMES.split():
    for _space in _SPACES:
        if (_function := getattr(_space, _name, None)) is not None:
            _FUNCTIONS[_function] = _ALIASES.get(_name, _name)
_FUNCTIONS |= {torch.ops.aten.mT: "mT", torch.ops.aten.numpy_T: "T"}  # x.mT and x.T, as PyTorch 2.15 traces them
_WITH_IN_PLACE = "add mul div pow sqrt rsqrt neg square relu sigmoid tanh masked_fill"
_IN_PLACE = {f"{name}_": name for name in _WITH_IN_PLACE.split()}


def name_of(node: Any) -> str:
    """Return the one name of the function or method that a node calls, or "" if it calls none that is known."""
    name = own_name_of(node)
    return _IN_PLACE.get(name, name)


def own_name_of(node: Any) -> str:
    """Return the name of what a node calls, which for a call in place is another one: "add_"."""
    if not isinstance(node, Node):
        return ""
    if node.op == "call_method":
        return _ALIASES.get(str(node.target), str(node.target))
    if node.op == "call_function":
        if node.target is getattr:  # x.mT, as earlier versions do
            return str(node.args[1])
        return _FUNCTIONS.get(node.target, "")
    return ""


def words(node: Node) -> str:
    """Return a name of what a node does, for the reasons in a report."""
    if node.op in ("placeholder", "output"):
        return "an input" if node.op == "placeholder" else "the graph's output"
    return own_name_of(node) or getattr(node.target, "__name__", str(node.target))


def arguments(node: Node, **defaults: Any) -> list[Any]:
    """Return a call's arguments in the order of `defaults`, which name all parameters and give the values of missing
    ones. Raises CannotFuse for an argument of another name."""
    bound = dict(zip(defaults, node.args, strict=False)) | node.kwargs
    if len(node.args) > len(defaults) or not bound.keys() <= defaults.keys():
        raise CannotFuse(f"unknown arguments of {name_of(node)}")
    return [bound.get(name, default) for name, default in defaults.items()]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def scaled(node: Any) -> tuple[Node, float] | None:
    """Return tensor and factor of tensor * number, number * tensor or tensor / number, or None for another call."""
    for a, b in operands(node, "mul"):
        if isinstance(a, Node) and is_number(b):
            return a, float(b)
    for a, b in operands(node, "div")[:1]:  # not number / tensor
        if isinstance(a, Node) and is_number(b) and b:
            return a, 1.0 / b
    return None


def dropout_of(node: Node) -> float:
    """Return the probability with which a call of F.dropout drops."""
    _, p, training, _ = arguments(node, input=None, p=0.5, training=True, inplace=False)
    if training is False:
        return 0.0
    if not is_number(p) or training is not True:
        raise CannotFuse("a dropout probability that is a tensor")
    if p >= 1.0:
        raise CannotFuse("a dropout of everything")
    return float(p)


def operands(node: Any, name: str) -> list[tuple[Any, Any]]:
    """Return the two arguments of a call of that name in both orders; for another call, or with keywords, nothing."""
    if name_of(node) != name or node.kwargs or len(node.args) != 2:
        return []
    a, b = node.args
    return [(a, b), (b, a)]


def user_of(node: Node) -> Node | None:
    """Return the only node that uses a node's output, or None if there are none or several."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def only_user(node: Node) -> Node:
    user = user_of(node)
    if user is None:
        raise CannotFuse(f"the output of its {words(node)} is used {len(node.users)} times")
    return user


def first(node: Node) -> Any:
    """Return a call's first argument: the tensor that is viewed, cast or scaled."""
    return node.args[0] if node.args else node.kwargs.get("input")
