"""Read the result files of the benchmarks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import conditions, table
from benchmarks.harness.record import Record
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
    ceilings = conditions.best([*(Ceilings(**i["ceilings"]) for i in info), *(state.end for state in during)])
    records = [Record.read(i) for i in info]
    commit = runs[0]["commit_info"]
    dirty = " with local changes" * commit["dirty"]
    when = f"{runs[0]['datetime'][:10]}, commit {commit['id'][:10]}{dirty}"
    where = [*table.header(info[0]["environment"], ceilings), when]
    where += [line for state in during for line in conditions.lines(state, records, ceilings)]
    return records, ceilings, where
