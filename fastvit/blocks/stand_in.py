"""Put what stands for a method on a module's instance, so that shallow copies of the module do not have it.

A stand-in is an attribute of the instance: it knows its module and has no `self`. copy.copy, and nn.DataParallel for
its replicas, copy a module's attributes as they are, and a copy would run the original's parts. So the module leaves
the stand-ins out of what these two copy, and the copy has its class's method. Deep copies and pickles have stand-ins of
their own.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

# Of an instance: what it had itself, or None, by the names of the methods that something stands for
_HELD = "fastvit_stand_ins"
_HELPERS = ("__getstate__", "_replicate_for_data_parallel")


def put_on(module: nn.Module, stand_in: Callable[..., Any], name: str = "forward") -> None:
    """Let a callable stand for a method, in the place of what the instance has under that name."""
    own = vars(module)
    own[_HELD] = {name: own.get(name), **own.get(_HELD, {})}
    functions = _state, _replica
    own |= {name: stand_in, **{helper: partial(f, module) for helper, f in zip(_HELPERS, functions, strict=True)}}


def take_off(module: nn.Module, before: Any = None, name: str = "forward") -> None:
    """Undo `put_on`. before: what the instance had under that name then, or None."""
    own = vars(module)
    if before is own[_HELD][name]:  # no other stand-in
        own[_HELD] = {other: value for other, value in own[_HELD].items() if other != name}
    if before is None:
        del own[name]
    else:
        own[name] = before
    if not own[_HELD]:
        for helper in (_HELD, *_HELPERS):
            del own[helper]


def _without_stand_ins(attributes: dict[str, Any]) -> dict[str, Any]:
    held = {name: own for name, own in attributes[_HELD].items() if _is_ours(attributes.get(name))}
    left = {name: value for name, value in attributes.items() if name not in (_HELD, *_HELPERS, *held)}
    return left | {name: own for name, own in held.items() if own is not None}


def _is_ours(value: Any) -> bool:  # not what a user has put in its place
    return isinstance(value, partial) and value.func.__module__.startswith("fastvit.")


def _state(module: nn.Module) -> Any:
    """Return what copies and pickles of a module have: its attributes, for copy.copy without stand-ins."""
    state: Any = type(module).__getstate__(module)
    is_shallow = sys._getframe(1).f_code is copy.copy.__code__  # nothing else tells it from copy.deepcopy
    return _without_stand_ins(state) if is_shallow else state


def _replica(module: nn.Module) -> nn.Module:
    replica: nn.Module = type(module)._replicate_for_data_parallel(module)
    replica.__dict__ = _without_stand_ins(vars(replica))
    return replica
