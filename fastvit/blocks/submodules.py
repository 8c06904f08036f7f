"""Check that a fused op may replace the call of a submodule: it is exactly of a known class, without hooks, and has the
forward that the class was defined with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from torch import nn

T = TypeVar("T")
# Exact classes: torch's as types, ours and other libraries' by qualified name, so that they need not be imported
Classes = set[type | str]


class CannotFuse(Exception):
    """No fused op replaces this module or this call: the module's own forward has to run. The message says why."""


def read_or_none(read: Callable[..., T], *args: Any, **classes: Collection[type | str]) -> T | None:
    """Return read(*args, **classes), or None if it raises CannotFuse."""
    try:
        return read(*args, **classes)
    except CannotFuse:
        return None


def qualified_name(module: nn.Module) -> str:
    """Return the name of its class, "package.module.Class"."""
    kind = type(module)
    return f"{kind.__module__}.{kind.__qualname__}"


def class_name(kind: type, known: Collection[type | str] = ()) -> str:
    """Return a class's name for a message: "nn.Mish", "timm.layers.mlp.GluMlp", or "open_clip.transformer.LayerNorm, a
    subclass of nn.LayerNorm". known: classes that are named as a base in addition to PyTorch's layers."""
    names = [f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__]
    own, *bases = [f"nn.{name.split('.')[-1]}" if name.startswith("torch.nn.modules.") else name for name in names]
    for base, short, name in zip(kind.__mro__[1:], bases, names[1:], strict=True):
        is_layer = short.startswith("nn.") and name.split(".")[3] not in ("module", "container")
        if is_layer or base in known or name in known:
            return f"{own}, a subclass of {short}"
    return own


class_name._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as integrations/forward.py's _warn: not traced


_own_forwards: dict[type, Any] = {}  # cache: the forward that a class was defined with


def has_own_forward(kind: type, forward: Any) -> bool:
    """Return whether `forward`, which a class has now, is the one that it was defined with, and not one that was
    assigned later, as by `timm.layers.Attention.forward = mine`."""
    return _own_forwards.get(kind) is forward or _is_defined_in(kind, forward)


has_own_forward._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as class_name: not traced


def _is_defined_in(kind: type, forward: Any) -> bool:
    """Compare the module and the name under which the function was compiled with those of the class.

    Attributes such as `__qualname__` prove nothing, because functools.wraps copies them. A wrapper of the class's own
    library counts as its own, as around the checkpointed layers of transformers."""
    owner = next(base for base in kind.__mro__ if "forward" in base.__dict__)
    library = owner.__module__.split(".")[0]
    function = forward
    while hasattr(function, "__wrapped__") and function.__globals__["__name__"].split(".")[0] == library:
        function = function.__wrapped__
    code = getattr(function, "__code__", None)
    if code is None or code.co_qualname != f"{owner.__qualname__}.forward":
        return False
    namespace = function.__globals__
    # our classes are defined in another module than the public one that they name
    if namespace["__name__"] != owner.__module__ and namespace.get(owner.__name__) is not owner:
        return False
    _own_forwards[kind] = forward
    return True


def submodules(
    module: nn.Module, known: Mapping[str, Collection[type | str]] | None = None, /, **classes: Collection[type | str]
) -> list[Any]:
    """Return the submodules of these names. Raises CannotFuse unless each is exactly of one of its classes, without
    hooks, with its class's own forward.

    known: the same mapping as a dictionary, which saves building one in every call. Hooks registered globally for all
    modules do not count: they belong to profilers and counters, which see the modules that really run.
    """
    result: list[Any] = []
    checked = None  # the class of the submodule before, which is often the same
    children = module._modules  # a dict costs a tenth of an nn.Module's attribute look-up
    for name, allowed in (known or classes).items():
        child = children.get(name)
        if child is None:
            raise CannotFuse(f"it has no {name}")
        kind = type(child)
        if kind not in allowed and f"{kind.__module__}.{kind.__qualname__}" not in allowed:  # a call would take 60 ns
            raise CannotFuse(f"{name} is {class_name(kind)}")
        if kind is not checked:
            if not has_own_forward(kind, kind.forward):
                raise CannotFuse(f"{name} is {class_name(kind)}, whose forward was replaced")
            checked = kind
        own = child.__dict__
        if (
            own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
            or "forward" in own
        ):
            raise CannotFuse(f"{name} has hooks or a forward of its own")
        result.append(child)
    return result
