"""Find the tests whose outcome differs with fastvit, and those of them that are meant to differ."""

from __future__ import annotations

import json
import re
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

DELIBERATE = Path(__file__).with_name("deliberate.toml")


@dataclass(frozen=True)
class Deliberate:
    """runs: "suite run"; tests: a pattern of ids; error: a regular expression, searched in what the test says."""

    runs: Sequence[str] = ()
    tests: str = ""
    error: str = ""
    reason: str = ""

    def __post_init__(self) -> None:
        for name in ("runs", "tests", "error", "reason"):
            if not getattr(self, name):
                raise ValueError(f"a deliberate difference needs its {name}: {self}")

    def fits(self, run: str, row: Mapping[str, Any]) -> bool:
        return run in self.runs and fnmatchcase(row["id"], self.tests) and bool(re.search(self.error, row["error"]))


def read_deliberate(path: Path = DELIBERATE) -> list[Deliberate]:
    return [Deliberate(**entry) for entry in tomllib.loads(path.read_text())["difference"]]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the last outcome of each test. The first line of the file is the digest of the code."""
    rows = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    return list({row["id"]: row for row in rows}.values())


def compare(
    run: str,
    own: Sequence[Mapping[str, Any]],
    plain: Mapping[str, Mapping[str, Any]],
    meant: Sequence[Deliberate] | None = None,
) -> dict[str, Any]:
    """Compare one run. own: outcomes with fastvit; plain: without it, by id, of the tests that did not pass."""
    meant = [entry for entry in (read_deliberate() if meant is None else meant) if run in entry.runs]
    touched = [row for row in own if row["models"]]
    suspects = [row for row in touched if row["outcome"] != "passed"]
    without = [plain.get(row["id"], {"outcome": "unknown"})["outcome"] for row in suspects]
    differ = [row for row, other in zip(suspects, without, strict=True) if other not in ("failed", row["outcome"])]
    counts = [sum(entry.fits(run, row) for row in differ) for entry in meant]
    return {
        "run": run,
        "tests": len(touched),
        "passed": len(touched) - len(suspects),
        "same": len(suspects) - len(differ),  # skipped, or fail without fastvit, too
        "differences": [
            {key: row[key] for key in ("id", "outcome", "error")}
            for row in differ
            if not any(entry.fits(run, row) for entry in meant)
        ],
        "deliberate": [
            {"tests": entry.tests, "count": count, "reason": entry.reason}
            for entry, count in zip(meant, counts, strict=True)
            if count
        ],
        "unmet": [entry.tests for entry, count in zip(meant, counts, strict=True) if not count],
    }


def lines(result: Mapping[str, Any]) -> list[str]:
    """Format a run for the terminal and the page of results."""
    deliberate = sum(entry["count"] for entry in result["deliberate"])
    counts = f"{result['tests']} tests, {result['passed']} pass, {result['same']} end as without fastvit"
    found = [f"{result['run']}: {counts}, {deliberate} differ on purpose, {len(result['differences'])} differ"]
    found += [f"  {entry['count']} {entry['tests']}: {entry['reason']}" for entry in result["deliberate"]]
    found += [f"  differs: {row['id']}: {row['outcome']}: {row['error']}" for row in result["differences"]]
    return found + [f"  deliberate, but not met: {tests}" for tests in result["unmet"]]


def render(path: Path) -> list[str]:
    """Format the file of results, in lines of at most 100 characters."""
    data = json.loads(path.read_text())
    chosen, where = data["models"], data["environment"]
    kinds = sum(map(len, chosen["transformers"].values()))
    found = [
        *(line for result in data["runs"] for line in lines(result)),
        "",
        f"timm: {len(chosen['timm'])} models, {len(chosen['shared'])} of them fastvit's too, that stand for the "
        f"{chosen['accelerated']} in which accelerate fuses something",
        f"left out as too large: {', '.join(chosen['too_large']) or 'none'}",
        f"transformers: {kinds} classes of {len(chosen['transformers'])} configurations",
        f"{', '.join(where['suites'])}, torch {where['torch']}",
    ]
    return [part for line in found for part in textwrap.wrap(line, 100, subsequent_indent=" " * 6) or [""]]
