"""Measure the launch tables of fastvit/kernels on the GPU at hand, and write kernels/tuned_<gpu>.json.

    python -m benchmarks.gpu.tune                                   # every table; continues where it was stopped
    python -m benchmarks.gpu.tune --table attention_fwd

How a choice is measured and made: benchmarks/gpu/tuner.py. What is measured: benchmarks/gpu/tables.py.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from pathlib import Path
from typing import Any

if "--rehearse" in sys.argv and __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch

from benchmarks.gpu.tables import works
from benchmarks.gpu.tuner import Tuner
from benchmarks.harness.clock import HOST_BOUND, Clock
from benchmarks.harness.provenance import commit, now, sources
from benchmarks.harness.record import environment
from fastvit.kernels import _tuned
from fastvit.ops.runtime import backend as backends


def measured(device: torch.device) -> dict[str, Any]:
    """Return where, with which versions and with which kernels the table is measured."""
    return environment(device, torch.bfloat16) | {"when": now(), "commit": commit(), "sources": sources("kernels")}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--table", action="append", choices=sorted(_tuned.FIELDS), help="default: all")
    parser.add_argument("--out", type=Path, default=_tuned.FOLDER, help="folder of tuned_<gpu>.json")
    parser.add_argument("--rehearse", action="store_true", help="two candidates at tiny shapes in the interpreter")
    chosen = parser.parse_args(arguments)
    if chosen.rehearse and chosen.out == _tuned.FOLDER:
        parser.error("--rehearse measures nothing: give it an --out of its own")
    if not chosen.rehearse and not torch.cuda.is_available():
        parser.error("no GPU; --rehearse runs the steps without one")
    torch.manual_seed(0)
    device = torch.device("cpu" if chosen.rehearse else "cuda")
    gpu = "interpreter" if chosen.rehearse else torch.cuda.get_device_name()
    path = chosen.out / _tuned.path_of(gpu).name
    host_bound = False
    with backends.use_backend("triton", strict=True):
        state = functools.partial(measured, device)
        tuner = Tuner(device, Clock(device).time, path, gpu, state, most=2 if chosen.rehearse else 99)
        for work in works(tiny=chosen.rehearse):
            if work.table not in (chosen.table or _tuned.FIELDS):
                continue
            for line in tuner.tune(work):
                host_bound |= HOST_BOUND in line
                print(line, flush=True)
    print(f"> {path.name}: {len(tuner.entries)} choices differ from the shipped ones")
    return int(host_bound)


if __name__ == "__main__":
    sys.exit(main())
