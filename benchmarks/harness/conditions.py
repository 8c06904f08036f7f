"""Compare the machine's limits at the start and at the end of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from benchmarks.harness.record import Record
from benchmarks.harness.timing import Ceilings

SHARE = 1.05  # of the limits: with more than this, the limits were measured while something else ran
MARK = "BUSY"  # begins the line that marks a run
DRIFT = 0.10  # of a limit, between start and end
_LIMITS = {"bytes_per_second": "large copy", "flops_per_second": "matmul", "cached_bytes_per_second": "cached copy"}


@dataclass(frozen=True)
class Conditions:
    start: Ceilings
    end: Ceilings

    @staticmethod
    def read(data: dict[str, Any]) -> Conditions:
        """Read the conditions of a result file."""
        return Conditions(Ceilings(**data["start"]), Ceilings(**data["end"]))


def best(several: Sequence[Ceilings]) -> Ceilings:
    """Return the most that the machine reached in any of several measurements."""
    known = {f.name: [v for c in several if (v := getattr(c, f.name)) is not None] for f in fields(Ceilings)}
    return Ceilings(**{name: max(values) for name, values in known.items() if values})


def lines(state: Conditions, records: Sequence[Record], ceilings: Ceilings) -> Iterator[str]:
    """Yield reasons to distrust the run: a limit that moved, a share of the limits that cannot be."""
    reasons = []
    for field, name in _LIMITS.items():
        start, end = getattr(state.start, field), getattr(state.end, field)
        if start and end and abs(end / start - 1) > DRIFT:
            reasons.append(f"{name} at the end {end / start - 1:+.0%} against the start")
    shares = [
        (share, f"{r.op} {r.case}, {r.mode}, {name}")
        for r in records
        for name in r.providers
        if (share := r.share_of_ceiling(name, ceilings)) is not None and share > SHARE
    ]
    if shares:
        most, what = max(shares)
        reasons.append(f"{what} at {most:.0%} of the limits" + f", and {len(shares) - 1} more" * (len(shares) > 1))
    if reasons:
        yield f"{MARK}: the machine ran something else, or changed its speed; do not cite times"
        yield from (f"      {reason}" for reason in reasons)
