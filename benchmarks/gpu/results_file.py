"""Keep the results of a run on a GPU in results.jsonl, a JSON object a line, written at once.

However the run ends, at most the last line is broken, and reading leaves it out. Several processes may write. A result
counts only for the device and the sources that it was made with.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.provenance import ROOT, sources
from fastvit.study.machine import cpu_name

Record = dict[str, Any]  # kind, name, status, device, sources, at (seconds since 1970), and the results
MODES = {"inference": "forward", "training": "forward + backward"}  # in the names of results
DONE = ("passed", "skipped")
REHEARSAL = "rehearsal"  # the device of a run in miniature, which measures nothing


class ResultsFile:
    """The results in a folder."""

    def __init__(self, folder: Path, device: str, *, code: str | None = None) -> None:
        self.folder, self.device = folder, device
        self.code = code or sources()
        self.path = folder / "results.jsonl"
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, kind: str, name: str, status: str, **about: Any) -> None:
        record = {"kind": kind, "name": name, "status": status, "device": self.device, "sources": self.code}
        line = json.dumps(record | {"at": time.time()} | about) + "\n"
        with self.path.open("a+b", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            torn = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
            file.write(("\n" * torn + line).encode())  # one call: lines of several processes do not mix
            os.fsync(file.fileno())

    def records(self) -> list[Record]:
        """Return the last record of each kind and name, in the order of their first."""
        return last(r for r in read(self.path) if (r["device"], r["sources"]) == (self.device, self.code))

    def status(self, kind: str, name: str) -> str:
        """Return what became of a result or a step, or "to do"."""
        found = (str(r["status"]) for r in self.records() if (r["kind"], r["name"]) == (kind, name))
        return next(found, "to do")


def device_name(rehearse: bool) -> str:
    """Return the name under which results are kept."""
    if rehearse:
        return REHEARSAL
    return torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()


def read(path: Path) -> list[Record]:
    """Return every whole line of a file, of any device and sources."""
    records = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:  # the process was killed as it wrote
            continue
        if isinstance(record, dict) and "kind" in record:  # else the file is another one
            records.append(record)
    return records


def last(records: Iterable[Record]) -> list[Record]:
    """Return the last record of each kind and name, in the order of their first."""
    return list({(record["kind"], record["name"]): record for record in records}.values())


def results_folder(device: str) -> Path:
    """Return the folder for the results of a device."""
    name = re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_")
    return ROOT / ("out" if device == REHEARSAL else "benchmarks/results") / name


def words(error: Exception) -> str:
    """Return the error's class and message on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
