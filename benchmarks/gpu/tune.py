"""Measures the launch tables of fastvit/kernels on the GPU at hand: writes kernels/tuned_<gpu>.json.

    python -m benchmarks.gpu.tune                                   # every table; goes on where it was stopped
    python -m benchmarks.gpu.tune --table attention_fwd
    python -m benchmarks.gpu.tune --headline                        # what the rows of the first minutes ask for

For every shape the shipped choice and the candidates run in turn, A B C A B C, by the clock of harness/timing.py:
three rounds for all, then 25 for the shipped one and the best three. A choice replaces the shipped one if it is more
than 2 % faster in the median of the rounds' ratios and its results agree with the shipped one's.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

if "--rehearse" in sys.argv and __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.tables import Choice, Work, candidates, works
from benchmarks.harness.agreement import difference
from benchmarks.harness.provenance import commit, now, sources, write_json
from benchmarks.harness.record import environment
from benchmarks.harness.timing import HOST_BOUND, Clock, Quantiles
from fastvit.kernels import _tuned
from fastvit.ops import _library

MARGIN = 1.02
TOLERANCE = 0.05  # of the largest result; bfloat16 sums in another order differ by about 0.01
FIRST_ROUNDS, LAST_ROUNDS, FINALISTS = 3, 25, 3

Key = tuple[int, ...]
Entries = dict[tuple[str, Key], Choice]
Samples = dict[Choice | None, list[float]]  # seconds; None: as shipped
Timer = Callable[[Callable[[], object]], float]


class HostBound(RuntimeError):
    """A work whose time on the GPU cannot be told from its host's."""


def timer_of(device: torch.device) -> Timer:
    clock = Clock(device)

    def timer(run: Callable[[], object]) -> float:
        seconds = clock.time(run)
        if math.isnan(seconds):
            raise HostBound(HOST_BOUND)
        return seconds

    return timer


def decide(shipped: Sequence[float], tried: Mapping[Choice, Sequence[float]]) -> Choice | None:
    """The choice that replaces the shipped one, or None. Sample i of all was taken in round i."""
    if len(shipped) < 3:
        raise ValueError(f"three or more rounds decide, got {len(shipped)}")
    gains = {choice: float(np.median(np.asarray(shipped) / np.asarray(values))) for choice, values in tried.items()}
    best = max(gains, key=lambda choice: gains[choice], default=None)
    return best if best is not None and gains[best] > MARGIN else None


@contextlib.contextmanager
def using(entries: Entries) -> Iterator[set[tuple[str, str, Key]]]:
    """Launches take these choices, one without a key at every key, and no other measured ones. Yields what they ask
    for: (arch, table, key)."""
    asked: set[tuple[str, str, Key]] = set()

    def choice(arch: str, table: str, *key: int) -> Choice | None:
        integers = tuple(map(int, key))
        asked.add((arch, table, integers))
        return entries.get((table, integers), entries.get((table, ())))

    with mock.patch.object(_tuned, "choice", choice):
        _tuned.clear_caches()
        try:
            yield asked
        finally:
            _tuned.clear_caches()


class Tuner:
    def __init__(self, device: torch.device, timer: Timer, path: Path, gpu: str, *, most: int = 99) -> None:
        self.device, self.timer, self.path, self.most = device, timer, path, most
        self.arch = _library.arch(torch.empty(0, device=device))
        where = environment(device, torch.bfloat16) | {"when": now(), "commit": commit(), "sources": sources()}
        self.data: dict[str, Any] = {
            "format": _tuned.FORMAT, "gpu": gpu, "arch": self.arch, "measured": where, "tables": {}, "samples": {}
        }  # fmt: skip
        if path.exists():  # results of the same code on the same GPU count; those of other code are measured again
            before = json.loads(path.read_text())
            _tuned.parse(before, self.arch, gpu)
            if before["measured"]["sources"] == where["sources"]:
                self.data["tables"], self.data["samples"] = before["tables"], before["samples"]

    @property
    def entries(self) -> Entries:
        return {
            (table, tuple(map(int, key.split(",")))): tuple(fields[name] for name in _tuned.FIELDS[table])
            for table, found in self.data["tables"].items()
            for key, fields in found.items()
        }

    def tune(self, work: Work) -> list[str]:
        """Measures what is missing of the work's keys; a line for each."""
        base: Entries = {(table, ()): choice for table, choice in work.fixed.items()}
        with using(base):
            run = work.build(self.device)
        with using(base) as asked:
            run()
        if any(arch != self.arch for arch, table, _ in asked if table == work.table):
            raise RuntimeError(f"{work.table} is looked up without the target: no measured choice could reach it")
        keys = sorted(key for _, table, key in asked if table == work.table)
        if not keys:
            raise RuntimeError(f"{work.label}: no launch asked for a choice of {work.table}")
        return [
            self._tune(work, run, key, base) for key in keys if self._name(work.table, key) not in self.data["samples"]
        ]

    @staticmethod
    def _name(table: str, key: Key) -> str:
        return f"{table}[{','.join(map(str, key))}]"

    def _tune(self, work: Work, run: Callable[[], tuple[Tensor, ...]], key: Key, fixed: Entries) -> str:
        base = {**self.entries, **fixed}
        base.pop((work.table, key), None)

        def rounds(choices: list[Choice | None], count: int) -> Samples:
            samples: Samples = {choice: [] for choice in choices}
            for _, choice in itertools.product(range(count), choices):
                with using(base | ({} if choice is None else {(work.table, key): choice})):
                    samples[choice].append(self.timer(run))
            return samples

        rejected: dict[Choice, str] = {}
        with using(base):
            expected = run()
        tried: list[Choice] = []
        for choice in candidates(work.table, key)[: self.most]:
            try:
                _tuned.check(work.table, key, dict(zip(_tuned.FIELDS[work.table], choice, strict=True)))
                with using(base | {(work.table, key): choice}):
                    got = run()
                if (error := difference(got, expected)) > TOLERANCE:
                    raise ArithmeticError(f"differs from the shipped choice's result by {error:.3g}")
                tried.append(choice)
            except Exception as error:  # does not compile, or does not fit: reported with the result
                rejected[choice] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        samples = rounds([None, *tried], FIRST_ROUNDS)
        finalists = sorted(tried, key=lambda choice: float(np.median(samples[choice])))[:FINALISTS]
        final = rounds([None, *finalists], LAST_ROUNDS)
        chosen = decide(final[None], {choice: final[choice] for choice in finalists})
        self._record(work, key, samples | final, rejected, chosen)
        gain = float(np.median(np.asarray(final[None]) / np.asarray(final[chosen])))
        verdict = f"{chosen}, {gain:.3f}x" if chosen else "as shipped"
        shipped = float(np.median(final[None])) * 1e6
        counts = f"{len(tried)} tried, {len(rejected)} unfit"
        return f"{self._name(work.table, key)} {work.label}: shipped {shipped:.1f} us; {verdict}; {counts}"

    def _record(
        self, work: Work, key: Key, samples: Samples, rejected: dict[Choice, str], chosen: Choice | None
    ) -> None:
        found = self.data["tables"].setdefault(work.table, {})
        found.pop(text := ",".join(map(str, key)), None)
        if chosen is not None:
            found[text] = dict(zip(_tuned.FIELDS[work.table], chosen, strict=True))
        self.data["samples"][self._name(work.table, key)] = {
            "work": work.label,
            "shipped": asdict(Quantiles.of(samples[None])),
            "tried": {str(choice): asdict(Quantiles.of(v)) for choice, v in samples.items() if choice is not None},
            "unfit": {str(choice): reason for choice, reason in rejected.items()},
            "chosen": chosen,
        }
        self.data["measured"] |= environment(self.device, torch.bfloat16) | {"when": now()}  # clocks and power of now
        _tuned.parse(self.data, self.arch, self.data["gpu"])
        write_json(self.path, self.data)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--table", action="append", choices=sorted(_tuned.FIELDS), help="default: all")
    parser.add_argument("--headline", action="store_true", help="only what the rows of the first minutes ask for")
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
    path = chosen.out / _tuned.file_name(gpu)
    host_bound = 0
    with _library.use_backend("triton", strict=True):
        tuner = Tuner(device, timer_of(device), path, gpu, most=2 if chosen.rehearse else 99)
        for work in works(tiny=chosen.rehearse, headline=chosen.headline):
            if work.table not in (chosen.table or _tuned.FIELDS):
                continue
            try:
                for line in tuner.tune(work):
                    print(line, flush=True)
            except HostBound as reason:
                host_bound += 1
                print(f"{work.label}: not tuned, {reason}", flush=True)
    print(f"> {path.name}: {sum(map(len, tuner.data['tables'].values()))} choices differ from the shipped ones")
    return int(host_bound > 0)


if __name__ == "__main__":
    sys.exit(main())
