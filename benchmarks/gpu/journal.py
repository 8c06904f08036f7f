"""Keep the results of a run on a GPU in results.jsonl, a JSON object a line, written at once.

However the run ends, at most the last line is broken, and reading leaves it out. Several processes may write. A result
counts only for the device and the sources that it was made with.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.harness.provenance import ROOT, sources, write_text

Record = dict[str, Any]  # kind, name, status, device, sources, at (seconds since 1970), and the results
Page = Callable[[list[Record]], str]
DONE = ("passed", "skipped")
REHEARSAL = "rehearsal"  # the device of a run in miniature, which measures nothing
BEGUN = "begun"


class Journal:
    """The results in a folder. page: makes the text of table.md from all records; it is written with every new
    record."""

    def __init__(self, folder: Path, device: str, page: Page | None = None, *, code: str | None = None) -> None:
        self.folder, self.device, self.page = folder, device, page
        self.code = code or sources()
        self.path = folder / "results.jsonl"
        self._lock = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, kind: str, name: str, status: str, **found: Any) -> None:
        record = {"kind": kind, "name": name, "status": status, "device": self.device, "sources": self.code}
        line = json.dumps(_finite(record | {"at": time.time()} | found)) + "\n"
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            os.write(descriptor, ("\n" * torn + line).encode())  # one call: lines of several processes do not mix
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if self.page is not None:
            with self._lock:
                write_text(self.folder / "table.md", self.page(self.records()))

    def records(self) -> list[Record]:
        """Return the last record of each kind and name, in the order of their first."""
        return last(r for r in read(self.path) if (r["device"], r["sources"]) == (self.device, self.code))

    def get(self, kind: str, name: str) -> Record | None:
        return next((r for r in self.records() if (r["kind"], r["name"]) == (kind, name)), None)

    def done(self, kind: str, name: str) -> bool:
        record = self.get(kind, name)
        return record is not None and record["status"] in DONE

    def status(self, step: str) -> str:
        """Return what became of a step, or "to do"."""
        record = self.get("step", step)
        return "to do" if record is None else str(record["status"])


def read(path: Path) -> list[Record]:
    """Return every whole line of a file, of any device and sources."""
    found = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:  # the process was killed as it wrote
            continue
        if isinstance(record, dict) and {"kind", "name", "status", "device", "sources"} <= record.keys():
            found.append(record)
    return found


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


def _finite(value: Any) -> Any:
    """Replace infinity and NaN, which JSON does not have, by None."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
