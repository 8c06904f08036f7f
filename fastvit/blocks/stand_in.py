"""Put what stands for a method on a module's instance, so that shallow copies of the module do not have it.

A stand-in is an attribute of the instance: it knows its module and has no `self`. copy.copy, and nn.DataParallel for
its replicas, copy a module's attributes as they are, and a copy would run the original's parts. So the module leaves
the stand-ins out of what these two copy. Deep copies and pickles have stand-ins of their own.
"""

from __future__ import annotations

import copy
import sys
from functools import partial
from typing import Any

from torch import nn

_HELPERS = "__getstate__", "_replicate_for_data_parallel"


def put_on(module: nn.Module, stand_in: Any, name: str = "forward") -> None:
    """Let a partial stand for a method. It gets what the instance has under that name as `before`, or None."""
    stand_in.before = vars(module).get(name)
    functions = partial(_state, module), partial(_replica, module)
    vars(module).update({name: stand_in, **dict(zip(_HELPERS, functions, strict=True))})


def take_off(module: nn.Module, name: str = "forward") -> None:
    """Undo the last `put_on`."""
    own = vars(module)
    before = own.pop(name).before
    if before is not None:
        own[name] = before
    if not any(map(_is_stand_in, own.values())):
        for helper in _HELPERS:
            del own[helper]


def _is_stand_in(value: Any) -> bool:
    return isinstance(value, partial) and hasattr(value, "before")


def _without_stand_ins(attributes: dict[str, Any]) -> dict[str, Any]:
    left = {name: value for name, value in attributes.items() if name not in _HELPERS}
    for name, value in attributes.items():
        while _is_stand_in(value):
            left[name] = value = value.before
    return {name: value for name, value in left.items() if value is not None or attributes[name] is None}


def _state(module: nn.Module) -> Any:
    """Return what copies and pickles of a module have: its attributes, for copy.copy without stand-ins."""
    state: Any = type(module).__getstate__(module)
    is_shallow = sys._getframe(1).f_code is copy.copy.__code__  # nothing else tells it from copy.deepcopy
    return _without_stand_ins(state) if is_shallow else state


def _replica(module: nn.Module) -> nn.Module:
    replica: nn.Module = type(module)._replicate_for_data_parallel(module)
    replica.__dict__ = _without_stand_ins(vars(replica))
    return replica
