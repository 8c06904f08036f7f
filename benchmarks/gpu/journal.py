"""Keep the results of a run on a GPU in results.jsonl, a JSON object a line, written at once.

However the run ends, at most the last line is broken, and reading leaves it out. Several processes may write. A result
counts only for the device and the sources that it was made with. Every process of a run begins with the arguments and
the journal from here.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.provenance import ROOT, commit, sources
from benchmarks.harness.record import environment

Record = dict[str, Any]  # kind, name, status, device, sources, at (seconds since 1970), and the results
DONE = ("passed", "skipped")
REHEARSAL = "rehearsal"  # the device of a run in miniature, which measures nothing
BEGUN = "begun"


class Journal:
    """The results in a folder."""

    def __init__(self, folder: Path, device: str, *, code: str | None = None) -> None:
        self.folder, self.device = folder, device
        self.code = code or sources()
        self.path = folder / "results.jsonl"
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, kind: str, name: str, status: str, **about: Any) -> None:
        record = {"kind": kind, "name": name, "status": status, "device": self.device, "sources": self.code}
        line = json.dumps(_finite(record | {"at": time.time()} | about)) + "\n"
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            os.write(descriptor, ("\n" * torn + line).encode())  # one call: lines of several processes do not mix
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

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


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of a process that writes results."""
    made = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    made.add_argument("--out", type=Path, required=True, help="folder of the results")
    made.add_argument("--rehearse", action="store_true", help="in miniature on a CPU")
    return made


def device_of(chosen: argparse.Namespace) -> torch.device:
    """Return the GPU; for a rehearsal the CPU, with one thread."""
    if chosen.rehearse:
        torch.set_num_threads(1)
    return torch.device("cpu" if chosen.rehearse else "cuda")


def open_journal(folder: Path, device: torch.device) -> Journal:
    """Return the journal of a run in this folder, which describes the machine once."""
    gpu = device.type == "cuda"
    journal = Journal(folder, torch.cuda.get_device_name(device) if gpu else REHEARSAL)
    if journal.get("environment", "machine") is None:
        facts = {f"own_{k}" if k == "device" else k: v for k, v in environment(device, torch.bfloat16).items()}
        if gpu:
            properties = torch.cuda.get_device_properties(device)
            facts |= {"capability": [properties.major, properties.minor], "sms": properties.multi_processor_count}
            facts |= {"memory_bytes": properties.total_memory, "cuda": torch.version.cuda, "cpus": os.cpu_count()}
        journal.add("environment", "machine", "passed", commit=commit(), **facts)
    return journal


def read(path: Path) -> list[Record]:
    """Return every whole line of a file, of any device and sources."""
    records = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:  # the process was killed as it wrote
            continue
        if isinstance(record, dict) and {"kind", "name", "status", "device", "sources"} <= record.keys():
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


def _finite(value: Any) -> Any:
    """Replace infinity and NaN, which JSON does not have, by None."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
