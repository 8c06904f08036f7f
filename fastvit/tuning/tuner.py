"""Measures launch choices on the current GPU, and writes those that are faster into tuned_<gpu>.json.

For every shape the shipped choice and the candidates run in turn, A B C A B C, timed by `clock.Clock`: three rounds for
all, then 25 for the shipped one and the best three. A choice replaces the shipped one if it is more than 2 % faster, by
the median of the rounds' ratios, and its results agree.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from fastvit._output import write_file
from fastvit.kernels import _tuned
from fastvit.ops.runtime import backend as backends
from fastvit.ops.runtime import device as devices
from fastvit.tuning.candidates import FIXED, Choice, candidates
from fastvit.tuning.clock import HOST_BOUND, Clock, Quantiles

MARGIN = 1.02
TOLERANCE = 0.05  # relative to the largest result; bfloat16 sums in another order differ by about 0.01
ROUNDS, FINALISTS = (3, 25), 3

Run = Callable[[], tuple[Tensor, ...]]
Key = tuple[int, ...]
Entries = dict[tuple[str, Key], Choice]
Samples = dict[Choice | None, list[float]]  # seconds; None: as shipped
Timer = Callable[[Callable[[], object]], float]


@dataclass(frozen=True)
class Work:
    """One op at one shape. `build(device)` returns the call to time, whose launches look up choices of `table`."""

    table: str
    label: str
    build: Callable[[torch.device], Run]


class HostBound(RuntimeError):
    """A work cannot be timed, because the GPU waits for the host."""


def timer_of(device: torch.device) -> Timer:
    """Return a function that times a call in seconds, or raises HostBound."""
    clock = Clock(device)

    def timer(run: Callable[[], object]) -> float:
        seconds = clock.time(run)
        if math.isnan(seconds):
            raise HostBound(HOST_BOUND)
        return seconds

    return timer


def difference(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """Return the largest max |got - expected| / max |expected| of the tensors; infinite if one is not finite."""
    worst = 0.0
    for a, b in zip(got, expected, strict=True):
        if not a.isfinite().all():
            return float("inf")
        worst = max(worst, float((a.float() - b.float()).abs().max() / b.float().abs().max().clamp_min(1e-30)))
    return worst


def decide(shipped: Sequence[float], tried: Mapping[Choice, Sequence[float]]) -> Choice | None:
    """Return the choice that replaces the shipped one, or None. Sample i of each was taken in round i."""
    if len(shipped) < 3:
        raise ValueError(f"three or more rounds decide, got {len(shipped)}")
    gains = {choice: float(np.median(np.asarray(shipped) / np.asarray(values))) for choice, values in tried.items()}
    best = max(gains, key=lambda choice: gains[choice], default=None)
    return best if best is not None and gains[best] > MARGIN else None


@contextlib.contextmanager
def using(entries: Entries) -> Iterator[set[tuple[str, str, Key]]]:
    """Within the context, launches take these measured choices only. An entry with the key () holds at every key.
    Yields the set of (arch, table, key) that launches look up."""
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


def base_entries(table: str, entries: Entries) -> Entries:
    """Return the entries in use while `table` is measured: FIXED replaces those of some other tables."""
    fixed = FIXED.get(table, {})
    return {k: choice for k, choice in entries.items() if k[0] not in fixed} | {(t, ()): c for t, c in fixed.items()}


def keys_of(run: Callable[[], object], table: str, entries: Entries) -> list[tuple[str, Key]]:
    """Return the (arch, key) that a call looks up in one table, with these entries, sorted."""
    with using(base_entries(table, entries)) as asked:
        run()
    return sorted((arch, key) for arch, name, key in asked if name == table)


def run_candidates(work: Work, entries: Entries | None = None, most: int = 99) -> None:
    """Run the work on meta tensors with every choice that tuning tries, to record its launches. The tuner reports
    choices that cannot be launched."""
    base = base_entries(work.table, entries or {})
    with using(base):
        run = work.build(torch.device("meta"))
    for _, key in keys_of(run, work.table, entries or {}):
        for choice in candidates(work.table, key)[:most]:
            with using(base | {(work.table, key): choice}), contextlib.suppress(backends.KernelUnsupported):
                run()


@dataclass(frozen=True)
class Result:
    """One key of a table, measured.

    Attributes:
        work: the label of the timed work.
        shipped: seconds of the shipped choice, the median of its last rounds.
        chosen: the choice that replaces it, or None.
        gain: the median of the rounds' ratios, shipped over chosen; 1 if none is chosen.
        tried, unfit: numbers of candidates that were timed, and that do not compile, fit or agree.
    """

    table: str
    key: Key
    work: str
    shipped: float
    chosen: Choice | None
    gain: float
    tried: int
    unfit: int

    @property
    def seconds(self) -> float:
        """Seconds of the better choice, by the rounds' ratios."""
        return self.shipped / self.gain

    def __str__(self) -> str:
        verdict = f"{self.chosen}, {self.gain:.3f}x" if self.chosen else "as shipped"
        name, shipped = name_of(self.table, self.key), self.shipped * 1e6
        return f"{name} {self.work}: shipped {shipped:.1f} us; {verdict}; {self.tried} tried, {self.unfit} unfit"


def entries_of(table: _tuned.Table | None) -> Entries:
    """Return the choices of a table that was read from a file; none for None."""
    choices = {} if table is None else table.choices
    return {(str(name), tuple(map(int, key))): choice for (name, *key), choice in choices.items()}


def name_of(table: str, key: Key) -> str:
    """Write a key as "attention_fwd[197,64,2,0,0]"."""
    return f"{table}[{','.join(map(str, key))}]"


class Tuner:
    """Measures works, and writes the table at `path` after each key. Keys that the file has, measured with the same
    "sources", are not measured again.

    Args:
        measured: returns date, versions and "sources" of the measurement.
        shipped: choices to improve on that differ from the configs' own rules.
        most: the largest number of candidates for a key.
        rounds: how often all candidates are timed, and then the best ones, at least three times.
        prepare: called with a work and the choices in use, before its candidates run.
    """

    def __init__(
        self, device: torch.device, timer: Timer, path: Path, gpu: str, measured: Callable[[], dict[str, Any]],
        *, shipped: Entries | None = None, most: int = 99, rounds: tuple[int, int] = ROUNDS,
        prepare: Callable[[Work, Entries], None] = lambda work, entries: None,
    ) -> None:  # fmt: skip
        self.device, self.timer, self.path, self.measured, self.most = device, timer, path, measured, most
        self.shipped, self.rounds, self.prepare = shipped or {}, rounds, prepare
        self.arch = devices.arch(torch.empty(0, device=device))
        where = measured()
        self.data: dict[str, Any] = {
            "format": _tuned.FORMAT, "gpu": gpu, "arch": self.arch, "measured": where, "tables": {}, "samples": {}
        }  # fmt: skip
        if path.exists():  # only results of the same code on the same GPU count
            before = json.loads(path.read_text())
            _tuned.parse(before, self.arch, gpu)
            if before["measured"]["sources"] == where["sources"]:
                self.data["tables"], self.data["samples"] = before["tables"], before["samples"]

    @property
    def chosen(self) -> Entries:
        """The choices in the file."""
        return {
            (table, tuple(map(int, key.split(",")))): tuple(fields[name] for name in _tuned.FIELDS[table])
            for table, found in self.data["tables"].items()
            for key, fields in found.items()
        }

    @property
    def entries(self) -> Entries:
        """The choices in use: those in the file, then the shipped ones."""
        return self.shipped | self.chosen

    def has(self, table: str, key: Key) -> bool:
        """Tell whether a key is measured already."""
        return name_of(table, key) in self.data["samples"]

    def tune(self, work: Work) -> list[Result]:
        """Measure the work's keys that are missing."""
        with using(base_entries(work.table, self.entries)):
            run = work.build(self.device)
        keys = keys_of(
            run, work.table, self.entries
        )  # with the entries: another kernel's choice sets the rows of a sum
        if any(arch != self.arch for arch, _ in keys):
            raise RuntimeError(f"{work.table} is looked up without the target: no measured choice could reach it")
        if not keys:
            raise RuntimeError(f"{work.label}: no launch asked for a choice of {work.table}")
        missing = [key for _, key in keys if not self.has(work.table, key)]
        if missing:
            self.prepare(work, self.entries)
        return [self._tune(work, run, key) for key in missing]

    def _tune(self, work: Work, run: Run, key: Key) -> Result:
        base = base_entries(work.table, self.entries)
        base.pop((work.table, key), None)
        if (work.table, key) in self.shipped:
            base[work.table, key] = self.shipped[work.table, key]

        def rounds(choices: list[Choice | None], count: int) -> Samples:
            samples: Samples = {choice: [] for choice in choices}
            for _, choice in itertools.product(range(count), choices):
                with using(base | ({} if choice is None else {(work.table, key): choice})):
                    samples[choice].append(self.timer(run))
            return samples

        rejected: dict[Choice, str] = {}
        with using(base):
            expected = tuple(t.clone() for t in run())  # each call may write into the same memory
        tried: list[Choice] = []
        for choice in candidates(work.table, key)[: self.most]:
            try:
                _tuned.check(work.table, key, dict(zip(_tuned.FIELDS[work.table], choice, strict=True)))
                with using(base | {(work.table, key): choice}):
                    got = run()
                if (error := difference(got, expected)) > TOLERANCE:
                    raise ArithmeticError(f"differs from the shipped choice's result by {error:.3g}")
                tried.append(choice)
            except Exception as error:  # does not compile or fit; reported with the result
                rejected[choice] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        samples = rounds([None, *tried], self.rounds[0])
        finalists = sorted(tried, key=lambda choice: float(np.median(samples[choice])))[:FINALISTS]
        final = rounds([None, *finalists], self.rounds[1])
        chosen = decide(final[None], {choice: final[choice] for choice in finalists})
        gain = float(np.median(np.asarray(final[None]) / np.asarray(final[chosen])))
        self._record(work, key, samples | final, rejected, chosen, gain)
        shipped = float(np.median(final[None]))
        return Result(work.table, key, work.label, shipped, chosen, gain, len(tried), len(rejected))

    def _record(
        self, work: Work, key: Key, samples: Samples, rejected: dict[Choice, str], chosen: Choice | None, gain: float
    ) -> None:
        found = self.data["tables"].setdefault(work.table, {})
        found.pop(text := ",".join(map(str, key)), None)
        if chosen is not None:
            found[text] = dict(zip(_tuned.FIELDS[work.table], chosen, strict=True))
        self.data["samples"][name_of(work.table, key)] = {
            "work": work.label,
            "shipped": asdict(Quantiles.of(samples[None])),
            "tried": {str(choice): asdict(Quantiles.of(v)) for choice, v in samples.items() if choice is not None},
            "unfit": {str(choice): reason for choice, reason in rejected.items()},
            "chosen": chosen,
            "gain": gain,
        }
        self.data["measured"] |= self.measured()  # the current date and state
        _tuned.parse(self.data, self.arch, self.data["gpu"])
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_file(self.path, json.dumps(self.data, indent=1) + "\n")
