"""The rows that a user asks for first: fused against eager and PyTorch's own attention kernels by name, in bfloat16.

    python -m benchmarks.gpu.headline --out FOLDER --part first

A provider has two figures: as called, in a steady loop, and of the GPU alone, from replays of a CUDA graph with a
cleared cache. A row is written down when it begins and when it ends: one that ends the process is left out by the next.
"""

from __future__ import annotations

import contextlib
import gc
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu import summary
from benchmarks.gpu.journal import BEGUN, DONE, Journal, words
from benchmarks.harness.agreement import difference
from benchmarks.harness.draw import Draw
from benchmarks.harness.graphs import capture_all
from benchmarks.harness.timing import HOST_BOUND, Clock, Quantiles, measured, per_call, plan_rounds, warm
from benchmarks.harness.workloads import Workload, workloads

PARTS = {
    "first": ("attention", "block", "model"),
    "second": ("layer_norm", "add_layer_norm", "layer_norm_mlp", "patch_embed"),
}
_BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
DTYPE = torch.bfloat16
Work = Callable[[], tuple[Tensor, ...]]


def rows(rehearse: bool, part: str = "") -> list[Workload]:
    """In order of worth; of all parts, unless one is named."""
    ops = [op for name, some in PARTS.items() if part in ("", name) for op in some]
    if rehearse:
        quick = workloads("quick", ops=("attention", "layer_norm"))
        return [w for w in quick if w.op in ops and "mask" not in w.sizes]
    found = workloads("headline", ops=tuple(ops))
    return sorted(found, key=lambda workload: ops.index(workload.op))


def left(journal: Journal, rehearse: bool, part: str, since: float) -> list[tuple[Workload, str, str]]:
    """Rows of the part, (workload, mode, name), that are not done and were not begun since then."""
    wanted = [(w, mode, f"{w.op} {w} {title}") for w in rows(rehearse, part) for mode, title in summary.MODES.items()]
    known = {r["name"]: r for r in journal.records() if r["kind"] == "row"}

    def settled(name: str) -> bool:
        return name in known and (known[name]["status"] in DONE or known[name]["at"] >= since)

    return [row for row in wanted if not settled(row[2])]


@contextlib.contextmanager
def _using(provider: str) -> Iterator[None]:
    with sdpa_kernel(_BACKENDS[provider]) if provider in _BACKENDS else contextlib.nullcontext():
        yield


def _within(provider: str, step: Work) -> Work:
    def work() -> tuple[Tensor, ...]:
        with _using(provider):
            return step()

    return work


class Row:
    """One workload in one mode, all providers. seconds: of timed rounds."""

    def __init__(self, workload: Workload, mode: str, clock: Clock, seconds: float) -> None:
        self.workload, self.mode, self.clock, self.seconds = workload, mode, clock, seconds
        self.figures: dict[str, dict[str, Any]] = {}
        self.results: dict[str, tuple[Tensor, ...]] = {}

    def measure(self) -> str:
        """What is wrong with fused's results; empty if nothing is. Raises what fused raises."""
        names = [name for name in summary.PROVIDERS if name not in _BACKENDS or "sdpa" in self.workload.providers]
        steps = {name: step for name in names if (step := self._begin(name)) is not None}
        self._time(steps)
        return self._disagreement()

    def _disagreement(self) -> str:
        """That fused's results are not the first provider's, by more than other providers' are; empty if they are.
        At the timed sizes this sees what is grossly wrong; what is accurate, benchmarks/gpu/correct.py says."""
        baseline, *others = self.results
        apart = {name: difference(self.results[name], self.results[baseline]) for name in others}
        own = apart.pop("fused", 0.0)
        bound = max([summary.TOLERANCE, *(3 * value for value in apart.values())])
        return f"differs from {baseline} by {own:.2g} of the largest result, allowed {bound:.2g}" if own > bound else ""

    def _begin(self, name: str) -> Work | None:
        """The provider's step, after it was measured as it is called; None if it cannot run here."""
        figures = self.figures[name] = {}
        device = self.clock.device
        try:
            step, _ = self.workload.step("sdpa" if name in _BACKENDS else name, self.mode, Draw(DTYPE, device))
            with _using(name):
                self.results[name] = step()
                figures["called"] = asdict(Quantiles.of(per_call(step, device, seconds=self.seconds / 10)))
            return _within(name, step)
        except RuntimeError as error:  # too little memory, no such kernel
            if name == "fused":
                raise
            figures["skipped"] = words(error)
        self.results.pop(name, None)
        _recover(device)  # now that the error holds no tensors any more
        return None

    def _time(self, steps: dict[str, Work]) -> None:
        """Rounds of all providers in turn, A B C A B C."""
        runs: dict[str, Callable[[], object]] = {**steps}
        if self.clock.device.type == "cuda":
            for name, replay in capture_all(steps).items():
                if isinstance(replay, str):
                    self.figures[name]["remark"] = f"no graph: {replay}; "
                else:
                    runs[name] = replay
        else:
            for name in runs:
                self.figures[name]["remark"] = "no graph on a CPU"
        seconds = sum(warm(run, self.clock) for run in runs.values())
        samples: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(plan_rounds(seconds, self.seconds, most=30)):
            for name, run in runs.items():
                samples[name].append(self.clock.time(run))
        for name, values in samples.items():
            if good := measured(values):
                self.figures[name]["graph"] = asdict(Quantiles.of(good))
            else:
                self.figures[name]["remark"] = self.figures[name].get("remark", "") + HOST_BOUND


def measure(journal: Journal, clock: Clock, workload: Workload, mode: str, name: str, seconds: float) -> None:
    """Writes the row into the journal."""
    journal.add("row", name, BEGUN)
    gc.collect()
    gc.disable()  # for all alike
    row = Row(workload, mode, clock, seconds)
    try:
        reason = row.measure()
    except Exception as error:
        reason = words(error)
    finally:
        gc.enable()
    found = {"providers": row.figures, "reason": reason}
    journal.add("row", name, "failed" if reason else "passed", **found)
    del row
    _recover(clock.device)
    line = ", ".join(f"{value:.2f}x {key}" for key, value in summary.ratios(found, "graph").items())
    print(f"> {name}: {reason or line}", flush=True)


def _recover(device: torch.device) -> None:
    """Gives memory back, and raises where an error has ended the device's context."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def main(arguments: list[str] | None = None) -> int:
    parser = summary.arguments(__doc__)
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--since", type=float, default=0.0, help="rows that were begun after this are left alone")
    chosen = parser.parse_args(arguments)
    device = summary.device_of(chosen)
    journal, clock = summary.journal(chosen.out, device), Clock(device)
    for row in left(journal, chosen.rehearse, chosen.part, chosen.since):
        measure(journal, clock, *row, 0.02 if chosen.rehearse else 0.6)
    return int(bool(left(journal, chosen.rehearse, chosen.part, math.inf)))


if __name__ == "__main__":
    sys.exit(main())
