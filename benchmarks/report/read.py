"""Reads the result files of the benchmarks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.harness import conditions, table
from benchmarks.harness.clock import Quantiles
from benchmarks.harness.record import Provider, Record
from benchmarks.harness.timing import Ceilings


def read(paths: Sequence[Path]) -> tuple[list[Record], Ceilings, list[str]]:
    """Return the records of one run, the limits of its machine, and lines that say where and when it was.

    Raises:
        ValueError: no benchmark in the files, or several devices or dtypes.
    """
    runs = [json.loads(path.read_text()) for path in paths]
    info = [b["extra_info"] for run in runs for b in run["benchmarks"]]
    if not info:
        raise ValueError(f"{', '.join(map(str, paths)) or 'no file'}: no benchmark in it")
    devices = {(i["environment"]["device"], i["environment"]["dtype"]) for i in info}
    if len(devices) > 1:
        raise ValueError(f"one table of several devices or dtypes: {sorted(devices)}")
    # older files have no conditions
    during = [conditions.Conditions.read(run["conditions"]) for run in runs if "conditions" in run]
    ceilings = conditions.best([*(Ceilings(**i["ceilings"]) for i in info), *(found.end for found in during)])
    records = [record(i) for i in info]
    commit = runs[0]["commit_info"]
    dirty = " with local changes" * commit["dirty"]
    when = f"{runs[0]['datetime'][:10]}, commit {commit['id'][:10]}{dirty}"
    where = [*table.header(info[0]["environment"], ceilings), when]
    where += [line for found in during for line in conditions.lines(found, records, ceilings)]
    return records, ceilings, where


def record(data: dict[str, Any]) -> Record:
    """Return the record that `Record.as_dict` has written; older files may lack fields."""
    known = {f.name: data[f.name] for f in fields(Record) if f.name in data}
    known["providers"] = {name: _provider(p) for name, p in known["providers"].items()}
    return Record(**known)


def _provider(data: dict[str, Any]) -> Provider:
    times = {name: Quantiles(**data[name]) for name in ("time", "called") if data.get(name)}
    intervals = {name: tuple(data[name]) for name in ("over_fastvit", "called_over_fastvit") if data.get(name)}
    return Provider(**{**data, **times, **intervals})
