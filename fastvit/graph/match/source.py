"""Where in the model and its source a node of Dynamo's graph comes from."""

from __future__ import annotations

import re
from pathlib import PurePath

from torch.fx import Node


def module_of(node: Node) -> str:
    """Return the name of the innermost module that calls it, as in model.named_modules(), or "" if it is not known."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = list(stack.values())[-1][0]
    path = re.sub(r"^L\['\w+'\]\.?|^L\[\"\w+\"\]\.?", "", path)
    return re.sub(r"_modules\['?(\w+)'?\]", r"\1", path).removeprefix("_orig_mod.")


def line_of(node: Node) -> str:
    """Return file and line of the call itself, "file.py:119", or "" if they are not known."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    if not frames:
        return ""
    path, line = frames[-1]  # the innermost frame
    return f"{PurePath(path).name}:{line}"
