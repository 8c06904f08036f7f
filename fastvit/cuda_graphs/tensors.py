"""Tensors that stand for others while a model is captured or computed again: copies, leaves, static inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from fastvit.ops.runtime.torch_private import foreach_clone


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of tensors, by few kernels."""
    if foreach_clone is None or not tensors:
        return [t.clone() for t in tensors]
    return list(foreach_clone(tensors))


def put_back(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Give tensors earlier values. Autograd does not count it as a change."""
    for t, value in zip(tensors, values, strict=True):
        t.data.copy_(value)


def leaves_of(outputs: Sequence[Tensor]) -> dict[int, int]:
    """Return the ids of the leaf tensors that gradients of outputs flow to, each with a number of the node of autograd
    that its gradient comes from: the last on the way that computes more than one."""
    found = {id(t): 0 for t in outputs if t.grad_fn is None and t.requires_grad}
    left: list[tuple[Any, int]] = [(t.grad_fn, 0) for t in outputs]
    seen = set[Any]()
    while left:
        node, source = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if hasattr(node, "variable"):
                found[id(node.variable)] = source
            number = len(seen) if len(node.next_functions) > 1 else source
            left += [(function, number) for function, _ in node.next_functions]
    return found


def static_copy(t: Tensor) -> Tensor:
    """Return a copy of a tensor, with its strides unless they overlap."""
    if any(stride == 0 and size > 1 for stride, size in zip(t.stride(), t.shape, strict=True)):
        static = t.detach().clone(memory_format=torch.contiguous_format)
    else:
        static = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t.detach())
    return static.requires_grad_(t.requires_grad)


def as_leaf(t: Tensor) -> Tensor:
    """Return a stand-in for a parameter, or an input, that autograd finds in its place: of what is cast, autocast keeps
    only copies of leaves."""
    return Parameter(t.detach()) if isinstance(t, Parameter) else t.detach().requires_grad_()


def as_argument(t: Tensor, is_leaf: bool) -> Tensor:
    """Return what stands for an input that was, or was not, a leaf of autograd's graph."""
    return t if is_leaf or not t.requires_grad else t.view_as(t)


@contextlib.contextmanager
def replaced(model: nn.Module, make: Callable[[Parameter], Tensor]) -> Iterator[list[Tensor]]:
    """Replace the parameters that require gradients by make(parameter) within the context. Yield what they became."""
    made: dict[Parameter, Tensor] = {p: make(p) for p in model.parameters() if p.requires_grad}
    places: Any = [(m._parameters, name, p) for m in model.modules() for name, p in m._parameters.items() if p in made]
    try:
        for parameters, name, p in places:
            parameters[name] = made[p]
        yield list(made.values())
    finally:
        for parameters, name, p in places:
            parameters[name] = p
