"""Summarise the mutants of each file: a table, and the survivors."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

OUTCOMES = ("killed", "timeout", "survived", "equivalent")
_HEAD = f"""\
| file | mutants | {" | ".join(OUTCOMES)} |
|---|---|{"---|" * len(OUTCOMES)}"""
_PAGE = """\
# Mutants

Made by `make mutants`, from mutants.json in this folder: {about}.
Tests ran with one case each, so that a test with all its cases may notice some of the survivors.

{table}

## Survivors

{survivors}
"""


class Outcome(NamedTuple):
    path: str
    kind: str
    line: str  # what was there
    becomes: str  # the mutant
    outcome: str  # one of OUTCOMES but the last


def read_equivalents(root: Path) -> tuple[dict[tuple[str, ...], str], list[str]]:
    """Read equivalent.toml. Returns reasons by (file, kind, line, becomes), and entries that match no line any more."""
    entries = tomllib.loads(Path(__file__).with_name("equivalent.toml").read_text()).get("mutant", [])
    known, stale = {}, []
    for entry in entries:
        path = root / entry["file"]
        if path.is_file() and entry["line"] in " ".join(path.read_text().split()):
            known[entry["file"], entry["kind"], entry["line"], entry["becomes"]] = entry["reason"]
        else:
            stale.append(f"{entry['file']}: {entry['line']}")
    return known, stale


def count(outcomes: Iterable[Outcome], equivalents: dict[tuple[str, ...], str]) -> dict[str, dict[str, Any]]:
    """Counts and survivors by file."""
    files: dict[str, dict[str, Any]] = {}
    for found in outcomes:
        file = files.setdefault(found.path, {"mutants": 0, **dict.fromkeys(OUTCOMES, 0), "survivors": []})
        outcome = found.outcome
        if outcome == "survived" and found[:4] in equivalents:
            outcome = "equivalent"
        file["mutants"] += 1
        file[outcome] += 1
        if outcome == "survived":
            file["survivors"].append({"kind": found.kind, "line": found.line, "becomes": found.becomes})
    return files


def table(files: dict[str, dict[str, Any]]) -> str:
    columns = ("mutants", *OUTCOMES)
    rows = [(f"`{path}`", *(file[c] for c in columns)) for path, file in sorted(files.items())]
    total = ("all", *(sum(file[c] for file in files.values()) for c in columns))
    return "\n".join([_HEAD, *(f"| {' | '.join(map(str, row))} |" for row in [*rows, total])])


def page(data: dict[str, Any]) -> str:
    """The readable form of mutants.json."""
    survivors = [
        f"- `{path}`, {mutant['kind']}: `{mutant['line']}` -> `{mutant['becomes']}`"
        for path, file in sorted(data["files"].items())
        for mutant in file["survivors"]
    ]
    about = ", ".join(f"{name} {value}" for name, value in data["about"].items())
    return _PAGE.format(about=about, table=table(data["files"]), survivors="\n".join(survivors) or "None.")
