"""How one module of another library gets a fused forward, and when its own forward runs instead."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastvit.fuse import Unsupported

# The ops that run, for the report
FUSED_ATTENTION = "attention_qkvpacked, linear"
FUSED_BLOCK = "layer_norm_attention, layer_norm_mlp"


def only_input(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The argument of a forward that has one, by position or under whatever name."""
    if len(args) + len(kwargs) != 1:
        raise Unsupported("other arguments than its input")
    return args[0] if args else next(iter(kwargs.values()))


@dataclass(frozen=True)
class Plan:
    """What `accelerate` does with instances of one class.

    read: module -> its description as `run` takes it: tensors, numbers and tuples of them. Called anew for every call.
    run: (input, description) -> what the module's own forward returns.
    ops: the names of the ops that run, for the report.
    check_call: (module, *args, **kwargs), the arguments of a call -> its input.
    ndim: of the input, or None for any.

    `read` and `check_call` raise `Unsupported` with the reason why the module's own forward has to run.
    """

    read: Callable[[Any], Any]
    run: Callable[[Tensor, Any], Any]
    ops: str
    check_call: Callable[..., Any] = only_input
    ndim: int | None = 3


def fused_forward(plan: Plan, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Takes the place of module.forward."""
    try:
        x = plan.check_call(module, *args, **kwargs)
        description = plan.read(module)
        check_input(x, description, plan.ndim)
    except Unsupported as reason:
        return own_forward(module, reason, *args, **kwargs)
    return plan.run(x, description)


_warned: set[tuple[str, str]] = set()


def own_forward(module: nn.Module, reason: Unsupported, *args: Any, **kwargs: Any) -> Any:
    """The forward of the module's class, with one warning for each class and reason."""
    _warn(type(module).__name__, reason.args[0])  # not str(reason), which torch.compile of 2.11 does not trace
    return type(module).forward(module, *args, **kwargs)


def _warn(name: str, reason: str) -> None:
    if (name, reason) not in _warned:
        _warned.add((name, reason))
        warnings.warn(f"{name} runs its own forward instead of fastvit's: {reason}", stacklevel=5)


# What torch.compiler.assume_constant_result sets, without importing the compiler, which then calls the function as it
# traces: a warning itself cannot be traced by torch 2.11.
_warn._dynamo_marked_constant = True  # type: ignore[attr-defined]


def check_input(x: Any, description: Any, ndim: int | None) -> None:
    """Whether a call's input can go into the ops: what they would refuse is left to the module's own forward."""
    if not isinstance(x, Tensor) or x.is_nested:
        raise Unsupported(f"its input is no plain tensor but {type(x).__name__}")
    if ndim is not None and x.dim() != ndim:
        raise Unsupported(f"its input has {x.dim()} dimensions, not {ndim}")
    autocast = torch.is_autocast_enabled(x.device.type)
    for tensor in _tensors((x, description)):
        if hasattr(type(tensor), "__tensor_flatten__"):  # made of other tensors, as DTensor
            raise Unsupported(f"a {type(tensor).__name__}")
        if x.dtype != tensor.dtype and not autocast:
            raise Unsupported(f"its input is {x.dtype} and its parameters are {tensor.dtype}")


def _tensors(description: Any) -> list[Tensor]:
    if isinstance(description, Tensor):
        return [description]
    return [t for part in description for t in _tensors(part)] if isinstance(description, tuple) else []
