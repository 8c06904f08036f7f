"""What `accelerate` did with each module of a model, as data and as a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from fastvit._table import table
from fastvit.integrations.recognise import Part

Status = Literal["accelerated", "part of", "skipped", "as it was"]
FUSED_ALREADY = "fused already"
_IN_PLACE = (
    "accelerate changes the model in place and returns a report. Write `report = fastvit.accelerate(model)`, not "
    "`model = ...`, and go on with `model`"
)


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

    if not TYPE_CHECKING:  # for which a report has neither

        def __call__(self, *_: Any, **__: Any) -> NoReturn:
            raise TypeError(f"a report was called as if it were the model: {_IN_PLACE}")

        def __getattr__(self, name: str) -> NoReturn:
            own = f"a report has no attribute {name!r}"
            raise AttributeError(own if name.startswith("_") else f"{own}: {_IN_PLACE}")

    def __str__(self) -> str:
        rows = ((e.name, e.kind, e.status, e.detail) for e in self.accelerated + self.skipped)
        lines = table(("module", "class", "what", ""), rows)
        if lines:
            lines.append(f"{len(self.accelerated)} modules accelerated, {len(self.skipped)} skipped")
        if any(entry.detail == FUSED_ALREADY for entry in self.entries):
            lines.append("fastvit's own modules are fused already")
        counts = {part: self.fused(part) for part in ("attention", "MLP")}
        told = [f"{part} in {fused} of {count}" for part, (fused, count) in counts.items() if count]
        lines += [f"fused: {', '.join(told)}"] if told else []
        return "\n".join([*(lines or ["no known ViT in this model"]), *self.advice])
