"""Rewrites the measured tables of README.md from the result files that they name.

    pytest benchmarks --benchmark-only --benchmark-json benchmarks/results/cpu/all.json
    python -m benchmarks.harness.results

A table stands between `<!-- results: FILES -->` and `<!-- end -->`; FILES is a path or a pattern (attention_*.json: the
steps of one run, whose best ceilings count); an optional `ops=a,b` after it keeps those ops. Between
`<!-- families: FILE -->` or `<!-- dispatch: FILE -->` and `<!-- end -->` stands the table of that module.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.harness import dispatch, families, table
from benchmarks.harness.record import Provider, Record
from benchmarks.harness.timing import Ceilings, Quantiles

ROOT = Path(__file__).resolve().parents[2]
_SECTION = re.compile(r"(<!-- results: (?P<file>\S+)(?: ops=(?P<ops>\S+))? -->\n).*?(<!-- end -->)", re.DOTALL)
_OTHER = re.compile(r"(<!-- (?P<table>families|dispatch): (?P<file>\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
_RENDER = {"families": families.render, "dispatch": dispatch.render}


def _provider(data: dict[str, Any]) -> Provider:
    time = data.pop("time")
    return Provider(time=None if time is None else Quantiles(**time), **data)


def _record(data: dict[str, Any]) -> Record:
    known = {f.name: data[f.name] for f in fields(Record)}
    known["providers"] = {name: _provider(p) for name, p in known["providers"].items()}
    return Record(**known)


def _step(path: Path) -> tuple[str, int]:
    """Sorts attention_2of12.json before attention_10of12.json."""
    name, _, part = path.stem.rpartition("_")
    step = part.partition("of")[0]
    return (name, int(step)) if step.isdigit() else (path.stem, 0)


def render(paths: Sequence[Path], ops: tuple[str, ...] = ()) -> str:
    """The run's table and notes as a fenced block, with commit and date."""
    runs = [json.loads(path.read_text()) for path in sorted(paths, key=_step)]
    # step i of n ran every n-th benchmark: taken in turn they are in order again
    turns = itertools.zip_longest(*([b["extra_info"] for b in run["benchmarks"]] for run in runs))
    info = [i for turn in turns for i in turn if i is not None]
    if not info:
        raise ValueError(f"{', '.join(map(str, paths)) or 'no file'}: no benchmark in it")
    devices = {(i["environment"]["device"], i["environment"]["dtype"]) for i in info}
    if len(devices) > 1:
        raise ValueError(f"one table of several devices or dtypes: {sorted(devices)}")
    records = [_record(i) for i in info]
    if ops:
        records = [r for r in records if r.op in ops]
    if len(runs) > 1:
        order = list(dict.fromkeys(r.op for r in records))
        records.sort(key=lambda r: order.index(r.op))
    ceilings = Ceilings(*(max(i["ceilings"][f.name] for i in info) for f in fields(Ceilings)))
    commit = runs[0]["commit_info"]
    lines = [
        f"{runs[0]['datetime'][:10]}, commit {commit['id'][:10]}{' (with local changes)' if commit['dirty'] else ''}",
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
        return match[1] + render(sorted(ROOT.glob(match["file"])), ops) + match[4]

    def other(match: re.Match[str]) -> str:
        return f"{match[1]}\n{_RENDER[match['table']](ROOT / match['file'])}\n{match[4]}"

    return _OTHER.sub(other, _SECTION.sub(section, text))


def unused(text: str, results: Path) -> list[str]:
    """Result files in a folder that no section of README's text names."""
    named = {path for match in _SECTION.finditer(text) for path in ROOT.glob(match["file"])}
    return [path.name for path in sorted(results.resolve().glob("*_*of*.json")) if path not in named]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--to", type=Path, default=ROOT / "README.md", help="where the new text goes")
    parser.add_argument("--results", type=Path, help="says which files of this folder no section names")
    chosen = parser.parse_args(arguments)
    text = (ROOT / "README.md").read_text()
    chosen.to.write_text(rewrite(text))
    for name in unused(text, chosen.results) if chosen.results else []:
        print(f"README.md has no section with {name}")


if __name__ == "__main__":
    main()
