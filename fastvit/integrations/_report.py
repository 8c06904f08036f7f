"""What `accelerate` did with each module of a model, as data and as a table."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from fastvit.integrations._recognise import Part

Status = Literal["accelerated", "part of", "skipped", "as it was"]
FUSED_ALREADY = "fused already"


@dataclass(frozen=True)
class Entry:
    """name: as in model.named_modules(); kind: its class; detail: the ops that run, the accelerated module that a part
    belongs to, or the reason; part: "attention" or "MLP" where it is a transformer's."""

    name: str
    kind: str
    status: Status
    detail: str
    part: Part | None = None

    @property
    def fused(self) -> bool:
        """Whether ops of fastvit compute it."""
        return self.status in ("accelerated", "part of") or self.detail == FUSED_ALREADY


@dataclass(frozen=True)
class Report:
    """One entry for every module, in the order of model.named_modules(). `str(report)` is a table in which numbered
    modules to which the same happened share a row, and below it how much is fused and what to try next, if anything."""

    entries: tuple[Entry, ...]
    advice: tuple[str, ...] = ()

    def _with(self, status: Status) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.status == status)

    @property
    def accelerated(self) -> tuple[Entry, ...]:
        """Modules whose forward is fastvit's now."""
        return self._with("accelerated")

    @property
    def skipped(self) -> tuple[Entry, ...]:
        """Modules with work that the ops do elsewhere, and the reason why they could not here."""
        return self._with("skipped")

    def fused(self, part: Part) -> tuple[int, int]:
        """How many of the model's attention modules, or MLPs, are fused, and how many there are."""
        of_part = [entry.fused for entry in self.entries if entry.part == part]
        return sum(of_part), len(of_part)

    def __str__(self) -> str:
        lines = self._table()
        if any(entry.detail == FUSED_ALREADY for entry in self.entries):
            lines.append("fastvit's own modules are fused already")
        counts = {part: self.fused(part) for part in ("attention", "MLP")}
        told = [f"{part} in {fused} of {count}" for part, (fused, count) in counts.items() if count]
        lines += [f"fused: {', '.join(told)}"] if told else []
        return "\n".join([*(lines or ["no known ViT in this model"]), *self.advice])

    def _table(self) -> list[str]:
        rows = [("module", "class", "what", ""), *self._rows()]
        if len(rows) == 1:
            return []
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows]
        lines.insert(1, "-" * max(map(len, lines)))
        count = f"{len(self.accelerated)} modules accelerated, {len(self.skipped)} skipped"
        return [line.rstrip() for line in [*lines, count]]

    def _rows(self) -> Iterator[tuple[str, str, str, str]]:
        groups: dict[tuple[str, str, str, str], list[str]] = {}
        for entry in self.accelerated + self.skipped:
            pattern = re.sub(r"\d+", "*", entry.name)
            groups.setdefault((pattern, entry.kind, entry.status, entry.detail), []).append(entry.name)
        for (pattern, kind, status, detail), names in groups.items():
            name = names[0] or "(the model itself)"
            yield name if len(names) == 1 else f"{pattern} ({len(names)})", kind, status, detail
