"""Spend the first seconds on a GPU: describe the machine, launch one kernel, measure the machine's limits."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict

import torch
import torch.nn.functional as F

from benchmarks.gpu import process
from benchmarks.harness.provenance import commit
from benchmarks.harness.record import environment
from benchmarks.harness.timing import measure_ceilings
from fastvit import ops
from fastvit.tuning.clock import Clock


def first_launches(device: torch.device) -> float:
    """Return the largest difference of two LayerNorms from torch's. Triton launches the first, our launcher the
    second."""
    x = torch.randn(197, 768, device=device)
    weight, bias = torch.randn(2, 768, device=device)
    expected = F.layer_norm(x, (768,), weight, bias, 1e-6)
    return float(torch.stack([ops.layer_norm(x, weight, bias, 1e-6) - expected for _ in range(2)]).abs().max())


def main(arguments: list[str] | None = None) -> int:
    chosen = process.arguments(__doc__).parse_args(arguments)
    device = process.device_of(chosen)
    found = process.journal(chosen.out, device)
    facts = {f"own_{k}" if k == "device" else k: v for k, v in environment(device, torch.bfloat16).items()}
    facts["strict"] = os.environ.get("FASTVIT_STRICT") == "1"  # then an unsupported call raises
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {"capability": [properties.major, properties.minor], "sms": properties.multi_processor_count}
        facts |= {"memory_bytes": properties.total_memory, "cuda": torch.version.cuda, "cpus": os.cpu_count()}
    found.add("environment", "machine", "passed", commit=commit(), **facts)
    print(f"> {facts['own_device']}, torch {facts['torch']}, triton {facts['triton']}, {facts['path']}", flush=True)
    difference = first_launches(device)
    right = difference < 1e-4
    found.add("environment", "first launches", "passed" if right else "failed", difference=difference)
    print(f"> first launches: differ from torch by {difference:.2g}", flush=True)
    # a rehearsal's product would take seconds in bfloat16, where the CPU has no instructions for it
    ceilings = measure_ceilings(Clock(device), torch.bfloat16 if device.type == "cuda" else torch.float32)
    found.add("environment", "ceilings", "passed", **asdict(ceilings))
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
