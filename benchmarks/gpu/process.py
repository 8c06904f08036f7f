"""What every process of a run on a GPU begins with: arguments, device, and the journal, which names the machine."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

from benchmarks.gpu.journal import REHEARSAL, Journal
from benchmarks.gpu.summary import markdown
from benchmarks.harness.provenance import commit
from benchmarks.harness.record import environment


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of a process that writes results."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--rehearse", action="store_true", help="in miniature on a CPU")
    return parser


def device_of(chosen: argparse.Namespace) -> torch.device:
    """Return the GPU; for a rehearsal the CPU, with one thread."""
    if chosen.rehearse:
        torch.set_num_threads(1)
    return torch.device("cpu" if chosen.rehearse else "cuda")


def journal(folder: Path, device: torch.device) -> Journal:
    """Return the journal of a run in this folder. It writes table.md, and describes the machine once."""
    gpu = device.type == "cuda"
    opened = Journal(folder, torch.cuda.get_device_name(device) if gpu else REHEARSAL, markdown)
    if opened.get("environment", "machine") is None:
        facts = {f"own_{k}" if k == "device" else k: v for k, v in environment(device, torch.bfloat16).items()}
        if gpu:
            properties = torch.cuda.get_device_properties(device)
            facts |= {"capability": [properties.major, properties.minor], "sms": properties.multi_processor_count}
            facts |= {"memory_bytes": properties.total_memory, "cuda": torch.version.cuda, "cpus": os.cpu_count()}
        opened.add("environment", "machine", "passed", commit=commit(), **facts)
    return opened
