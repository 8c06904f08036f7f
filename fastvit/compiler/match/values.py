"""The results of nodes as Dynamo's fake tensors, which have shapes, dtypes, strides and storages."""

from __future__ import annotations

import types
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.multiprocessing.reductions import StorageWeakRef

from fastvit.blocks.submodules import CannotFuse
from fastvit.compiler.match.calls import own_name_of

VIEWS = frozenset(
    ("reshape", "view", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as", "permute", "transpose",
     "movedim", "t", "mT", "T", "unbind", "chunk", "split", "split_with_sizes", "narrow", "select", "getitem", "expand",
     "expand_as", "contiguous", "detach", "alias")
)  # fmt: skip
CASTS = ("to", "type_as", "float", "double", "half", "bfloat16")  # return the input itself if it has that dtype


def value_of(node: Node) -> Any:
    return node.meta.get("example_value")


def fake(node: Any) -> Tensor:
    value = value_of(node) if isinstance(node, Node) else None
    if not isinstance(value, Tensor):
        raise CannotFuse(f"nothing is known about the shape of {node}")
    return value


def other_tensor(node: Node, one: Node) -> Node | None:
    """Return b of a call with the arguments (one, b) or (b, one) only, if it is another tensor, otherwise None."""
    others = [other for other in node.args if isinstance(other, Node) and other is not one]
    alone = len(node.args) == 2 and len(others) == 1 and not node.kwargs
    return others[0] if alone and isinstance(value_of(others[0]), Tensor) else None


def evaluate(node: Node, other: Mapping[Node, Any] = MappingProxyType({})) -> Any:
    """Run a node on the fake values of its inputs; `other` replaces some of them."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda used: other[used] if used in other else value_of(used))
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def storages(value: Any) -> set[StorageWeakRef]:
    if isinstance(value, Tensor):
        return {StorageWeakRef(value.untyped_storage())}
    return set().union(*map(storages, value)) if isinstance(value, tuple | list) else set()


def mutated(node: Node) -> set[StorageWeakRef]:
    """Return the storages that a node writes into: those that it returns again, or that convention or schema name. A
    function of another library, or of higher order, may write into all of its inputs."""
    if node.op not in ("call_function", "call_method"):
        return set()
    name = own_name_of(node)
    inputs = [storages(value_of(used)) for used in node.all_input_nodes]
    into: set[StorageWeakRef] = set().union(*inputs)
    if node.op == "call_function" and not name and _may_write(node.target):
        return into
    if name == "dropout" and not (node.kwargs.get("inplace") or True in node.args[3:4]):
        return set()  # PyTorch 2.15 returns the input itself where nothing is dropped
    if name == "setitem" or (node.op == "call_method" and name.endswith("_") and not name.endswith("__")):
        return inputs[0] if inputs else set()
    return set() if name in VIEWS or name in CASTS else into & storages(value_of(node))


def _may_write(target: Any) -> bool:
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    if isinstance(target, torch._ops.OpOverloadPacket):
        return any(getattr(target, name)._schema.is_mutable for name in target.overloads())
    if isinstance(target, types.BuiltinFunctionType | types.MethodDescriptorType | type):
        return False  # functions of torch and operator return what they write into
    module = getattr(target, "__module__", None) or ""
    return isinstance(target, torch._ops.HigherOrderOperator) or module.split(".")[0] not in (
        "torch",
        "math",
        "_operator",
    )
