"""Measure the host's time to queue a call on a GPU: eager, SDPA and fastvit, at batch 1.

    python -m benchmarks.host.queueing | tee benchmarks/results/nvidia_h200/host.txt

The clock stops when the last call is queued, whatever the GPU still has to do. Rounds have random orders. `least` is
Python's and PyTorch's work; `median` is what a program sees on this machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import torch

from benchmarks.harness.columns import make
from benchmarks.harness.draw import Draw
from benchmarks.harness.provenance import commit
from benchmarks.harness.timing import Steps, orders
from benchmarks.harness.workloads import Workload, workloads

OPS = ("layer_norm", "attention", "layer_norm_mlp", "block", "model")
ROUNDS = 60
QUEUED = 600  # launches, about, between two waits: CUDA's queue holds about 1,000, and then the host waits
LAUNCHES = {"block": 60, "model": 800}  # of a call in training, at least; of an op 20
MODES = {"inference": "forward", "training": "both passes"}


def rows() -> Iterator[Workload]:
    """Yield the headline's workloads at batch 1 and 197 tokens; of models the first."""
    found = [w for w in workloads("headline", ops=OPS) if w.sizes["B"] == 1 and w.sizes.get("N", 197) == 197]
    for op in OPS:
        yield next(w for w in found if w.op == op)


def queue(steps: Steps, calls: int, device: torch.device) -> dict[str, list[float]]:
    """Return by name the microseconds of the host for one call, a value a round, of so many calls each."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for names in orders(steps, ROUNDS):
        for name in names:
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            for _ in range(calls):
                steps[name]()
            found[name].append(1e6 * (time.perf_counter() - start) / calls)
    return found


def table(device: torch.device) -> Iterator[tuple[str, ...]]:
    """Yield the rows: workload, passes, and of each provider the least and the median."""
    for workload in rows():
        for mode, title in MODES.items():
            providers: list[str] = [name for name in ("eager", "sdpa", "fastvit") if name in workload.providers]
            steps = {name: workload.step(name, mode, Draw(torch.bfloat16, device))[0] for name in providers}
            for step in steps.values():
                for _ in range(3):
                    step()
            calls = max(1, QUEUED // LAUNCHES.get(workload.op, 20))
            found = queue(steps, calls, device)
            cells = [
                f"{min(found[name]):,.0f} / {statistics.median(found[name]):,.0f}" if name in found else "-"
                for name in ("eager", "sdpa", "fastvit")
            ]
            yield f"{workload.op} {workload}", title, *cells


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("needs a GPU; benchmarks.host.launch measures Python's part without one")
    device = torch.device("cuda")
    columns = ("us of the host, least / median", "", "eager", "SDPA", "fastvit")
    print(*make(columns, list(table(device)), left=2), sep="\n")
    print(f"\n{torch.cuda.get_device_name()}, bfloat16, torch {torch.__version__}, commit {commit()[:10]}")


if __name__ == "__main__":
    main()
