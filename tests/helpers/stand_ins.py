"""Stand-ins for classes of libraries, or versions of libraries, that are not installed."""

from collections.abc import Callable
from types import FunctionType
from typing import Any


def defined_in(module: str, name: str | None = None) -> Callable[[type], type]:
    """Return a class decorator that gives a class, and the code of its forward, the names of the library's class. The
    forward sees the globals that its module has at that moment. name: None for the class's own."""

    def renamed(kind: type) -> type:
        qualname = name or kind.__name__
        kind.__module__, kind.__name__, kind.__qualname__ = module, qualname, qualname
        forward = kind.__dict__.get("forward")
        if forward is not None:
            code = forward.__code__.replace(co_qualname=f"{qualname}.forward")
            namespace = {**forward.__globals__, "__name__": module}
            kind.forward = FunctionType(code, namespace, "forward", forward.__defaults__, forward.__closure__)
            kind.forward.__kwdefaults__ = forward.__kwdefaults__
        return kind

    return renamed


def library_class(qualified: str, base: type, **attributes: Any) -> Any:
    """Make a subclass with the module and name of the library's class."""
    module, _, name = qualified.rpartition(".")
    return defined_in(module)(type(name, (base,), attributes))
