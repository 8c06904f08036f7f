"""Reports of `accelerate` and `compile`: what each did with a model, as data and as a table."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args

from fastvit._base.output import wrapped

Kind = Literal["attention", "MLP", "LayerNorm", "RMSNorm", "patch embedding", "linear"]
Status = Literal["accelerated", "part of", "skipped", "as it was"]
FUSED_ALREADY = "fused already"
_Row = tuple[str, str, str, str]


@dataclass(frozen=True)
class Entry:
    """One module for `accelerate`, or one place in a graph for `compile`.

    Attributes:
        name: the module's name, as in model.named_modules(); for `compile` as far as the graph knows it.
        kind: the module's class; for `compile` what is computed there: "attention", "MLP", "LayerNorm", ...
        status: "accelerated", "part of" another module, "skipped" or "as it was"; `compile` has the first and third.
        detail: the ops that run, the accelerated module that a part belongs to, or the reason why it was skipped.
        part: "attention" or "MLP" for such a module of a transformer, otherwise None; for `compile` the kind.
        line: `compile` only, the line of the model's source, "file.py:119".
    """

    name: str
    kind: str
    status: Status
    detail: str
    part: Kind | None = None
    line: str = ""

    @property
    def fused(self) -> bool:
        """Whether ops of fastvit compute it."""
        return self.status in ("accelerated", "part of") or self.detail == FUSED_ALREADY

    @property
    def module(self) -> str:
        """The name, under which the reports of `compile` have it."""
        return self.name


class NotTheModel:
    """Base class of reports, whose errors say so if one is taken for the model."""

    if not TYPE_CHECKING:  # a type checker is to refuse both

        def __call__(self, *_: Any, **__: Any) -> NoReturn:
            raise TypeError(f"a report was called as if it were the model{self._hint()}")

        def __getattr__(self, name: str) -> NoReturn:
            hint = "" if name.startswith("_") else self._hint()
            raise AttributeError(f"a report has no attribute {name!r}{hint}")

    def _made_by(self) -> str:
        raise NotImplementedError

    def _hint(self) -> str:
        name = self._made_by()
        if name == "compile":
            return ""
        return (
            f": {name} changes the model in place and returns a report. Write `report = fastvit.{name}(model)`, not "
            "`model = ...`, and go on with `model`"
        )


@dataclass(frozen=True, repr=False)
class Report(NotTheModel):
    """The report of `accelerate`, or of one graph of `compile`, shown as a table.

    Numbered modules with the same outcome share a row of the table. Below it stands how much is fused.

    Attributes:
        entries: for `accelerate` one for every module, in the order of model.named_modules(); for `compile` one for
            every place that the ops are for, in the order in which they run, those of checkpointed parts last.
        advice: `accelerate` only, what to try next.
        route: which of the two made it.
        seconds: `compile` only, how long the rewriting took.
        left: `compile` only, why the graph, or a checkpointed part of it, was left as a whole.
    """

    entries: tuple[Entry, ...]
    advice: tuple[str, ...] = ()
    route: Literal["accelerate", "compile"] = "accelerate"
    seconds: float = 0.0
    left: tuple[str, ...] = ()

    def _with(self, status: Status) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.status == status)

    @property
    def accelerated(self) -> tuple[Entry, ...]:
        """Modules whose forward is fastvit's now, or places in a graph where its ops run."""
        return self._with("accelerated")

    @property
    def skipped(self) -> tuple[Entry, ...]:
        """Modules or places that the ops are for, with the reason why they could not be used there."""
        return self._with("skipped")

    def fused(self, part: Kind) -> tuple[int, int]:
        """Return how many entries of that part are fused, and how many there are."""
        of_part = [entry.fused for entry in self.entries if entry.part == part]
        return sum(of_part), len(of_part)

    def _made_by(self) -> str:
        return self.route

    def __repr__(self) -> str:
        return wrapped(self._graph_lines() if self.route == "compile" else self._model_lines())

    def _model_lines(self) -> list[str]:
        rows = ((e.name, e.kind, e.status, e.detail) for e in self.accelerated + self.skipped)
        lines = _table(("module", "class", "what", ""), rows)
        if lines:
            lines.append(f"{len(self.accelerated)} modules accelerated, {len(self.skipped)} skipped")
        if any(entry.detail == FUSED_ALREADY for entry in self.entries):
            lines.append("fastvit's own modules are fused already")
        counts = [f"{part} in {fused} of {count}" for part, fused, count in self._counts()]
        lines += [f"fused: {', '.join(counts)}"] if counts else []
        return [*(lines or ["no known ViT in this model"]), *self.advice]

    def _graph_lines(self) -> list[str]:
        rows = ((e.name, e.line, e.kind if e.fused else f"{e.kind}, left", e.detail) for e in self.entries)
        lines = _table(("module", "line", "what", ""), rows)
        whole = [f"left as it was: {reason}" for reason in self.left]
        if not lines:
            return whole or ["nothing in this graph for fastvit"]
        counts = [f"{kind} {fused} of {count}" for kind, fused, count in self._counts()]
        return [*lines, *whole, f"fused: {', '.join(counts)}; {self.seconds:.2f} s"]

    def _counts(self) -> list[tuple[Kind, int, int]]:
        """Every part that the model has: how many are fused, and how many there are."""
        return [(part, *counts) for part in get_args(Kind) if (counts := self.fused(part))[1]]


def _table(header: _Row, rows: Iterable[_Row]) -> list[str]:
    """Return the lines of a table, none if there are no rows. A row begins with a module's name: numbered modules whose
    rows are otherwise equal share one, blocks.* (12)."""
    groups: dict[_Row, list[str]] = {}
    for name, first, second, third in rows:
        groups.setdefault((re.sub(r"\d+", "*", name), first, second, third), []).append(name)
    if not groups:
        return []
    shown = [header]
    for (pattern, first, second, third), names in groups.items():
        name = f"{pattern} ({len(names)})" if len(names) > 1 else names[0] or "(the model itself)"
        shown.append((name, first, second, third))
    widths = [max(len(row[i]) for row in shown) for i in range(3)]
    return ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in shown]
