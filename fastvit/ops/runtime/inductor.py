"""Keep `torch.compile` of a deep model from taking minutes with torch 2.9 to 2.12."""

from __future__ import annotations

import sys
from typing import Any

import torch

_EXC = "torch._inductor.exc"
_SHOWS_LATER = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
_done: set[int] = set()


def keep_messages_short() -> None:
    """Let Inductor name our ops in its messages without their arguments. Called by the fake implementations, which run
    once Inductor is imported and before it lowers a graph.

    For every custom op, these versions compose a message that is never shown, with the arguments written out, and
    theirs: 2^depth lines in a residual network. At 12 blocks that took over two minutes; from 2.13 on, only a message
    that is shown is composed.
    """
    if _SHOWS_LATER or (module := sys.modules.get(_EXC)) is None or id(module) in _done:
        return
    _done.add(id(module))
    issue = getattr(module, "OperatorIssue", None)
    if (plain := getattr(issue, "operator_str", None)) is None:
        return

    def operator_str(target: Any, args: Any, kwargs: Any) -> str:
        if getattr(target, "namespace", None) == "fastvit":
            return f"  target: {target}"
        return str(plain(target, args, kwargs))

    issue.operator_str = staticmethod(operator_str)  # type: ignore[union-attr]
