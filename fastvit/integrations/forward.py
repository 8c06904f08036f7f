"""The fused forward of one module of another library, and the checks that let the module's own forward run instead."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from fastvit.blocks.recompute import recompute_of
from fastvit.blocks.submodules import CannotFuse, class_name, has_own_forward
from fastvit.blocks.unchanged import read_once

T = TypeVar("T")
Call = tuple[Any, dict[str, Any]]  # the input of a call, and what else of it `ClassHandler.run` takes, by name


def only_input(module: nn.Module, *args: Any, **kwargs: Any) -> Call:
    """Read a call with one argument, given by position or by any name."""
    if len(args) + len(kwargs) != 1:
        raise CannotFuse("other arguments than its input")
    return args[0] if args else next(iter(kwargs.values())), {}


@dataclass(frozen=True)
class ClassHandler:
    """How `accelerate` reads and runs modules of one class.

    `read` and `read_call` raise `CannotFuse` with the reason why the module's own forward has to run.

    Attributes:
        read: function (module) that returns the description for `run`: tensors, numbers and tuples of them. What it
            looks at outside of the module is in no class of `blocks/unchanged.py`.
        run: function (input, description, and by name what `read_call` returns and recompute, if `takes_recompute`)
            that returns what the module's own forward returns.
        read_call: function (module, *args, **kwargs) that reads the arguments of a call: the input, and for example
            rotary positions and a mask. It names its arguments as the class's forward does, because a call may pass any
            of them by name.
        ndim: number of dimensions of the input, or None for any.
        takes_pixels: whether the input may be uint8 for parameters of any dtype.
        takes_lists: whether the input, and with it the rotary positions, may be a list.
        takes_recompute: whether the module is a block that can compute again what its backward pass needs, as
            `blocks/recompute.py` describes.
        checkpoint: function (module) that returns the function with which the module's own forward checkpoints its
            activations in this call, or None if it does not; None if it never does.
        op: names of the ops for the report, if the description does not determine them.
    """

    read: Callable[[Any], Any]
    run: Callable[..., Any]
    read_call: Callable[..., Call] = only_input
    ndim: int | None = 3
    takes_pixels: bool = False
    takes_lists: bool = False
    takes_recompute: bool = False
    checkpoint: Callable[[Any], Callable[..., Any] | None] | None = None
    op: str = ""


def reason_of(error: Exception) -> str:
    """Return why a module is left alone. Any error of a reader or a check is a reason, because other libraries may have
    changed the module in any way."""
    if isinstance(error, CannotFuse):
        return str(error.args[0])  # not str(error), which torch.compile of 2.11 does not trace
    return f"it is not as its class makes it: {type(error).__name__}: {error}"


def check_forward(module: nn.Module, kind: type[nn.Module]) -> None:
    """Check that the module still runs the forward that the class `kind` was defined with. Subclasses that inherit it
    pass, as `torch.nn.utils.parametrize` and FSDP2 make them."""
    forward = kind.forward
    if type(module).forward is not forward:
        raise CannotFuse(f"it is {class_name(type(module))} now")
    if not has_own_forward(kind, forward):
        raise CannotFuse(f"the forward of {class_name(kind)} was replaced")


def _check_not_traced(*args: Any, **kwargs: Any) -> None:
    """Refuse the proxies of torch.fx, which have no shape or dtype that a check could read."""
    for argument in args or kwargs.values():
        if isinstance(argument, Proxy):
            raise CannotFuse(f"its input is no plain tensor but {type(argument).__name__}")


def fused_forward(
    handler: ClassHandler, module: nn.Module, kind: type[nn.Module], name: str, /, *args: Any, **kwargs: Any
) -> Any:
    """Run a module as fused ops, in place of module.forward. kind: the module's class when it was accelerated; name:
    its name in the model, for warnings."""
    try:
        check_forward(module, kind)
        _check_not_traced(*args, **kwargs)
        x, options = handler.read_call(module, *args, **kwargs)
        description = read_once(handler.read, module)
        for one in x if handler.takes_lists and isinstance(x, list) else (x,):
            check_input(one, description, handler)
        if handler.takes_recompute:
            options["recompute"] = recompute_of(module)
        checkpoint = None if handler.checkpoint is None else handler.checkpoint(module)
    except Exception as error:
        _warn(name, type(module).__name__, reason_of(error))
        return type(module).forward(module, *args, **kwargs)
    if checkpoint is not None:
        return checkpoint(lambda x: handler.run(x, description, **options), x)
    return handler.run(x, description, **options)


# Libraries between a user's line and a module's forward
_LIBRARIES = {"fastvit", "torch", "timm", "torchvision", "transformers", "open_clip", "peft", "contextlib", "functools"}
_warned: set[tuple[str, str]] = set()


def _warn(name: str, kind: str, reason: str) -> None:
    """Warn once for each class and reason, at the line that called the model."""
    if (kind, reason) in _warned:
        return
    _warned.add((kind, reason))
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    where = f"{name}: " if name else ""
    warnings.warn(f"{where}{kind} runs its own forward instead of fastvit's: {reason}", stacklevel=level)


# torch 2.11 cannot trace a warning. With this attribute, which torch.compiler.assume_constant_result sets, the compiler
# calls the function while it traces; setting it here does not import the compiler.
_warn._dynamo_marked_constant = True  # type: ignore[attr-defined]


def checked_mask(mask: Any, queries: int, keys: int | None = None) -> Tensor | None:
    """Return a mask of the scores, or None for None. Raises CannotFuse if the ops do not take it. keys: None for as
    many as queries."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or not (mask.dtype is torch.bool or mask.is_floating_point()):
        raise CannotFuse("an attention mask of another kind")
    keys = queries if keys is None else keys
    pairs = zip(mask.shape[-2:], (queries, keys), strict=True)
    # not `in`, which torch.compile of 2.13 finds false for equal symbolic sizes
    if mask.dim() not in (2, 4) or not all([own == 1 or own == size for own, size in pairs]):
        raise CannotFuse(f"an attention mask of shape {tuple(mask.shape)}")
    return mask


def check_input(x: Any, description: Any, handler: ClassHandler) -> None:
    """Check that the ops take a call's input. Raises CannotFuse where they would refuse it."""
    if not isinstance(x, Tensor) or x.is_nested:
        raise CannotFuse(f"its input is no plain tensor but {type(x).__name__}")
    if handler.ndim is not None and x.dim() != handler.ndim:
        raise CannotFuse(f"its input has {x.dim()} dimensions, not {handler.ndim}")
    pixels = handler.takes_pixels and x.dtype is torch.uint8
    if not x.is_floating_point() and not pixels:
        raise CannotFuse(f"its input is {x.dtype}")
    any_dtype = pixels or (not x.is_meta and torch.is_autocast_enabled(x.device.type))  # an error for meta
    for tensor in parts_of((x, description), Tensor):
        if hasattr(type(tensor), "__tensor_flatten__"):  # made of other tensors, like DTensor
            raise CannotFuse(f"a {type(tensor).__name__}")
        if x.dtype != tensor.dtype and not any_dtype:
            raise CannotFuse(f"its input is {x.dtype} and its parameters are {tensor.dtype}")


def parts_of(description: Any, kind: type[T]) -> list[T]:
    """Return what a description has of a class, at any depth."""
    if isinstance(description, kind):
        return [description]
    return [found for part in description for found in parts_of(part, kind)] if isinstance(description, tuple) else []
