"""Put what stands for a method on a module's instance, so that shallow copies of the module do not have it.

A stand-in is an attribute of the instance: it knows its module and has no `self`. copy.copy, and nn.DataParallel for
its replicas, copy a module's attributes as they are, and a copy would run the original's parts. So both leave the
stand-ins out. Deep copies and pickles have stand-ins of their own.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from torch import nn

_REPLICATE = "_replicate_for_data_parallel"
_copiers: dict[type, Any] = getattr(copy, "_copy_dispatch", {})  # what copy.copy calls for objects of a class


def put_on(module: nn.Module, stand_in: Any, name: str = "forward") -> None:
    """Let a partial stand for a method. It gets what the instance has under that name as `before`, or None."""
    stand_in.before = vars(module).get(name)
    vars(module).update({name: stand_in, _REPLICATE: partial(_Replicas(type(module)), module)})


def take_off(module: nn.Module, name: str = "forward") -> None:
    """Undo the last `put_on`."""
    own = vars(module)
    before = own.pop(name).before
    if before is not None:
        own[name] = before
    if not any(map(_is_stand_in, own.values())):
        own.pop(_REPLICATE, None)


def _is_stand_in(value: Any) -> bool:
    # functools.update_wrapper gives another library's wrapper of a stand-in the attribute, too
    return isinstance(value, partial) and hasattr(value, "before") and value.func.__module__.startswith("fastvit.")


class _Replicas:
    """Makes replicas of a class's modules. Pickles of modules hold it, so that copy.copy knows of their classes too."""

    def __init__(self, kind: type[nn.Module]) -> None:
        self.kind = kind
        _copiers.setdefault(kind, _copied)

    def __call__(self, module: nn.Module) -> nn.Module:
        return _without_stand_ins(self.kind._replicate_for_data_parallel(module))

    def __reduce__(self) -> tuple[Any, ...]:
        return _Replicas, (self.kind,)


def _copied(module: Any) -> nn.Module:
    own = getattr(type(module), "__copy__", None)
    reconstruct: Any = vars(copy)["_reconstruct"]  # what copy.copy does with objects of other classes
    return _without_stand_ins(reconstruct(module, None, *module.__reduce_ex__(4)) if own is None else own(module))


def _without_stand_ins(module: nn.Module) -> nn.Module:
    own = vars(module)
    for name, value in list(own.items()):
        before = value
        while _is_stand_in(before):
            before = before.before
        if before is None and value is not None:
            del own[name]
        else:
            own[name] = before
    own.pop(_REPLICATE, None)
    return module
