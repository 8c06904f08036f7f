"""What the graph route found in a model and what became of it, as data and as a table."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal, get_args

from torch.fx import Node

from fastvit._table import table

Kind = Literal["attention", "MLP", "LayerNorm", "RMSNorm", "patch embedding", "linear"]


@dataclass(frozen=True)
class Entry:
    """A place in a graph that the ops are for. module: its name in the model, as in model.named_modules(), as far as
    the graph knows; line: of the source, "file.py:119"; detail: the op that runs there, or the reason why it was
    left."""

    kind: Kind
    module: str
    line: str
    fused: bool
    detail: str


@dataclass(frozen=True)
class Report:
    """One graph's entries in the order in which they run, those of checkpointed parts last. `str(report)` is a table in
    which numbered modules to which the same happened share a row, and below it how much is fused. seconds: that the
    rewriting took; left: why the graph, or a checkpointed part of it, was left as a whole."""

    entries: tuple[Entry, ...]
    seconds: float = 0.0
    left: tuple[str, ...] = ()

    def fused(self, kind: Kind) -> tuple[int, int]:
        """How many places of that kind are fused, and how many there are."""
        of_kind = [entry.fused for entry in self.entries if entry.kind == kind]
        return sum(of_kind), len(of_kind)

    def __str__(self) -> str:
        rows = ((e.module, e.line, e.kind if e.fused else f"{e.kind}, left", e.detail) for e in self.entries)
        lines = table(("module", "line", "what", ""), rows)
        whole = [f"left as it was: {reason}" for reason in self.left]
        if not lines:
            return "\n".join(whole or ["nothing in this graph for fastvit"])
        counts = {kind: self.fused(kind) for kind in get_args(Kind)}
        told = [f"{kind} {fused} of {count}" for kind, (fused, count) in counts.items() if count]
        return "\n".join([*lines, *whole, f"fused: {', '.join(told)}; {self.seconds:.2f} s"])


def entry_of(node: Node, kind: Kind, fused: bool, detail: str) -> Entry:
    return Entry(kind, _module(node), _line(node), fused, detail)


def _module(node: Node) -> str:
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = list(stack.values())[-1][0]
    path = re.sub(r"^L\['\w+'\]\.?|^L\[\"\w+\"\]\.?", "", path)
    return re.sub(r"_modules\['?(\w+)'?\]", r"\1", path).removeprefix("_orig_mod.")


def _line(node: Node) -> str:
    """Of the innermost frame: where the function is called."""
    found = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    if not found:
        return ""
    path, line = found[-1]
    return f"{PurePath(path).name}:{line}"
