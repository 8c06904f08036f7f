"""Rewrites the measured tables of README.md from the result files that they name.

    pytest benchmarks --benchmark-only --benchmark-json benchmarks/results/cpu/all.json
    python -m benchmarks.readme

A table stands between `<!-- results: FILE -->` and `<!-- end -->`; an optional `ops=a,b` after FILE keeps those ops.
"""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks import table
from benchmarks.record import Provider, Record
from benchmarks.timing import Ceilings, Quantiles

ROOT = Path(__file__).resolve().parent.parent
_SECTION = re.compile(r"(<!-- results: (?P<file>\S+)(?: ops=(?P<ops>\S+))? -->\n).*?(<!-- end -->)", re.DOTALL)


def _provider(data: dict[str, Any]) -> Provider:
    time = data.pop("time")
    return Provider(time=None if time is None else Quantiles(**time), **data)


def _record(data: dict[str, Any]) -> Record:
    known = {f.name: data[f.name] for f in fields(Record)}
    known["providers"] = {name: _provider(p) for name, p in known["providers"].items()}
    return Record(**known)


def render(path: Path, ops: tuple[str, ...] = ()) -> str:
    """The run's table and notes as a fenced block, with commit and date."""
    run = json.loads(path.read_text())
    info = [b["extra_info"] for b in run["benchmarks"]]
    if not info:
        raise ValueError(f"{path} holds no benchmark")
    records = [_record(i) for i in info]
    if ops:
        records = [r for r in records if r.op in ops]
    ceilings = Ceilings(**info[0]["ceilings"])
    commit = run["commit_info"]
    lines = [
        f"{run['datetime'][:10]}, commit {commit['id'][:10]}{' (with local changes)' if commit['dirty'] else ''}",
        *table.header(info[0]["environment"], ceilings),
        "",
        *table.render(records, ceilings),
        *table.notes(records),
        *table.growth_lines([r for r in records if r.op.startswith("memory")]),
    ]
    return "\n".join(["```text", *lines, "```", ""])


def rewrite(text: str) -> str:
    """README's text with every results section made anew."""

    def section(match: re.Match[str]) -> str:
        ops = tuple(match["ops"].split(",")) if match["ops"] else ()
        return match[1] + render(ROOT / match["file"], ops) + match[4]

    return _SECTION.sub(section, text)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(rewrite(readme.read_text()))
