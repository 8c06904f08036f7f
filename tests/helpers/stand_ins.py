"""Stand-ins for the classes of libraries, or of their earlier versions, that are not installed."""

from collections.abc import Callable
from types import FunctionType


def defined_in(module: str, name: str | None = None) -> Callable[[type], type]:
    """A class decorator: the class, and the code of its forward, under the names that the library's own would have.
    The forward sees what its module holds at that moment. name: None for the class's own."""

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
