"""Arguments, device and journal of every process of the first minutes."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks.gpu.journal import REHEARSAL, Journal
from benchmarks.gpu.summary import markdown


def journal(folder: Path, device: torch.device) -> Journal:
    """Return the journal of a run in this folder, which writes table.md."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else REHEARSAL
    return Journal(folder, name, markdown)


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of a process of the first minutes."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--rehearse", action="store_true", help="in miniature on a CPU")
    return parser


def device_of(chosen: argparse.Namespace) -> torch.device:
    """Return the GPU; for a rehearsal the CPU, with one thread."""
    if chosen.rehearse:
        torch.set_num_threads(1)
    return torch.device("cpu" if chosen.rehearse else "cuda")
