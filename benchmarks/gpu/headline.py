"""Time the most important rows: fastvit against eager and PyTorch's attention kernels by name, in bfloat16.

    python -m benchmarks.gpu.headline --out FOLDER --part first

A provider has two figures: as called, in a steady loop, and of the GPU alone, from replays of a CUDA graph with a
cleared cache. In every round the providers run in random order (`timing.orders`); as many rounds run as fit into the
row's share of the time that is left. A row is recorded when it begins and when it ends: one that has ended its process
is left out by the next.
"""

from __future__ import annotations

import contextlib
import gc
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu import process, summary, verdict
from benchmarks.gpu.journal import BEGUN, DONE, Journal, words
from benchmarks.harness.draw import Draw
from benchmarks.harness.graphs import capture_all
from benchmarks.harness.timing import measured, orders, per_call, plan_rounds, warm
from benchmarks.harness.workloads import Workload, workloads
from fastvit.kernels import _tuned
from fastvit.tuning.clock import HOST_BOUND, Clock, Quantiles
from fastvit.tuning.tuner import difference

PARTS = {
    "first": ("attention", "block", "model"),
    "second": ("layer_norm", "add_layer_norm", "layer_norm_mlp", "patch_embed"),
}
SHARE = 4  # a quarter of a row's time goes into timed rounds; the rest builds, warms up and compares
LEAST, MOST = 0.4, 1.5  # seconds of timed rounds
CALLED_ROUNDS = 3
_BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
DTYPE = torch.bfloat16
Work = Callable[[], tuple[Tensor, ...]]


def rows(rehearse: bool, part: str = "") -> list[Workload]:
    """Return the workloads, the most important first; of all parts, unless one is named."""
    ops = [op for name, some in PARTS.items() if part in ("", name) for op in some]
    if rehearse:
        quick = workloads("quick", ops=("attention", "layer_norm"))
        return [w for w in quick if w.op in ops and not w.sizes.keys() & {"mask", "causal", "keys"}]
    found = workloads("headline", ops=tuple(ops))
    return sorted(found, key=lambda workload: ops.index(workload.op))


def named(rehearse: bool, part: str) -> list[tuple[Workload, str, str]]:
    """Return (workload, mode, name) of every row of the part."""
    return [(w, mode, f"{w.op} {w} {title}") for w in rows(rehearse, part) for mode, title in summary.MODES.items()]


def left(journal: Journal, rehearse: bool, part: str, since: float) -> list[tuple[Workload, str, str]]:
    """Return the rows of the part, (workload, mode, name), that are not done and were not begun since then."""
    known = {r["name"]: r for r in journal.records() if r["kind"] == "row"}

    def finished(name: str) -> bool:
        return name in known and (known[name]["status"] in DONE or known[name]["at"] >= since)

    return [row for row in named(rehearse, part) if not finished(row[2])]


@contextlib.contextmanager
def _using(provider: str) -> Iterator[None]:
    with sdpa_kernel(_BACKENDS[provider]) if provider in _BACKENDS else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _taken(names: set[str]) -> Iterator[None]:
    """Add to names the measured launch choices that are looked up within the context and found."""
    plain = _tuned.choice

    def choice(arch: str, table: str, *key: int) -> tuple[int, ...] | None:
        if (found := plain(arch, table, *key)) is not None:
            names.add(f"{table}[{','.join(map(str, map(int, key)))}]")
        return found

    with mock.patch.object(_tuned, "choice", choice):
        _tuned.clear_caches()  # choices that were looked up before must be seen again
        yield


def _within(provider: str, step: Work) -> Work:
    def work() -> tuple[Tensor, ...]:
        with _using(provider):
            return step()

    return work


class Row:
    """One workload in one mode, with all providers. seconds: of timed rounds of the GPU; calls get half as many."""

    def __init__(self, workload: Workload, mode: str, clock: Clock, seconds: float) -> None:
        self.workload, self.mode, self.clock, self.seconds = workload, mode, clock, seconds
        self.name = f"{workload.op} {workload} {mode}"  # seed of the orders: rows have different ones
        self.figures: dict[str, dict[str, Any]] = {}
        self.results: dict[str, tuple[Tensor, ...]] = {}
        self.tuned: set[str] = set()  # measured choices that fastvit's launches take, "table[key]"

    def measure(self) -> str:
        """Time all providers. Returns how fastvit's results are wrong, or "". Raises what fastvit raises."""
        names = [name for name in summary.PROVIDERS if name not in _BACKENDS or "sdpa" in self.workload.providers]
        steps = {name: step for name in names if (step := self._begin(name)) is not None}
        self._time_calls(steps)
        self._time({name: _within(name, step) for name, step in steps.items()})
        return self._disagreement()

    def _disagreement(self) -> str:
        """Say by how much fastvit's results differ from the first provider's, if that is more than other providers' do,
        or "". This finds gross errors at the timed sizes; benchmarks/gpu/correct.py checks accuracy."""
        baseline, *others = self.results
        apart = {name: difference(self.results[name], self.results[baseline]) for name in others}
        own = apart.pop("fastvit", 0.0)
        bound = max([summary.TOLERANCE, *(3 * value for value in apart.values())])
        return f"differs from {baseline} by {own:.2g} of the largest result, allowed {bound:.2g}" if own > bound else ""

    def _begin(self, name: str) -> Work | None:
        """Return the provider's step, after it has run once; None if it cannot run here."""
        figures = self.figures[name] = {}
        device = self.clock.device
        try:
            step, _ = self.workload.step("sdpa" if name in _BACKENDS else name, self.mode, Draw(DTYPE, device))
            with _using(name), _taken(self.tuned):
                self.results[name] = step()
            return step
        except RuntimeError as error:  # too little memory, no such kernel
            if name == "fastvit":
                raise
            figures["skipped"] = words(error)
        self.results.pop(name, None)
        _recover(device)  # after the error, which held tensors
        return None

    def _time_calls(self, steps: dict[str, Work]) -> None:
        """Time calls. A provider's context is entered once a loop: that takes longer than a launch."""
        seconds = self.seconds / 2 / CALLED_ROUNDS / max(len(steps), 1)
        options: dict[str, Any] = {"seconds": seconds, "rounds": CALLED_ROUNDS, "seed": self.name, "within": _using}
        for name, values in per_call(steps, self.clock.device, **options).items():
            self.figures[name]["called"] = asdict(Quantiles.of(values))

    def _time(self, steps: dict[str, Work]) -> None:
        """Time the GPU alone."""
        if self.clock.device.type == "cuda":
            replays, remarks = capture_all(steps)
        else:
            replays, remarks = {}, dict.fromkeys(steps, "no graph on a CPU")
        runs = {**steps, **replays}
        for name, remark in remarks.items():
            self.figures[name]["remark"] = remark
        seconds = sum(warm(run, self.clock) for run in runs.values())
        samples: dict[str, list[float]] = {name: [] for name in runs}
        for names in orders(runs, plan_rounds(seconds, self.seconds), self.name):
            for name in names:
                samples[name].append(self.clock.time(runs[name]))
        for name, values in samples.items():
            if good := measured(values):
                self.figures[name]["graph"] = asdict(Quantiles.of(good))
            else:
                self.figures[name]["remark"] = self.figures[name].get("remark", "") + HOST_BOUND


def measure(journal: Journal, clock: Clock, workload: Workload, mode: str, name: str, seconds: float) -> None:
    """Writes the row into the journal."""
    journal.add("row", name, BEGUN)
    gc.collect()
    gc.disable()  # for all providers
    row, start, wrong = Row(workload, mode, clock, seconds), time.time(), False
    try:
        reason = row.measure()
        wrong = bool(reason)
    except Exception as error:
        reason = words(error)
    finally:
        gc.enable()
    found = {
        "op": workload.op, "mode": mode, "providers": row.figures, "reason": reason, "wrong": wrong,
        "tuned": sorted(row.tuned), "timed": [start, time.time()],
    }  # fmt: skip
    journal.add("row", name, "failed" if reason else "passed", **found)
    del row
    _recover(clock.device)
    line = ", ".join(f"{value:.2f}x {key}" for key, value in verdict.ratios(found, "graph").items())
    print(f"> {name}: {reason or line}", flush=True)


def seconds_for(rows: int, until: float) -> float:
    """Return the seconds of timed rounds for the next of so many rows. until: seconds since 1970 by which all are
    done."""
    return min(max((until - time.time()) / max(rows, 1) / SHARE, LEAST), MOST)


def _recover(device: torch.device) -> None:
    """Give memory back, and raise where an error has ended the device's context."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def main(arguments: list[str] | None = None) -> int:
    parser = process.arguments(__doc__)
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--since", type=float, default=0.0, help="rows that were begun after this are left alone")
    parser.add_argument("--until", type=float, default=math.inf, help="seconds since 1970 by which to be done")
    chosen = parser.parse_args(arguments)
    device = process.device_of(chosen)
    journal, clock = process.journal(chosen.out, device), Clock(device)
    rows_left = left(journal, chosen.rehearse, chosen.part, chosen.since)
    for i, row in enumerate(rows_left):
        measure(journal, clock, *row, 0.02 if chosen.rehearse else seconds_for(len(rows_left) - i, chosen.until))
    return int(bool(left(journal, chosen.rehearse, chosen.part, math.inf)))


if __name__ == "__main__":
    sys.exit(main())
