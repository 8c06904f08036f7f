"""Measure launch choices on the current GPU, and write those that are faster into tuned_<gpu>.json.

For every shape the shipped choice and the candidates run in turn, A B C A B C, timed by `harness/clock.py`. A choice
replaces the shipped one if it is more than 2 % faster, by the median of the rounds' ratios, and its results agree.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from torch import Tensor

from benchmarks.gpu.results_file import words
from benchmarks.harness.clock import HOST_BOUND
from benchmarks.harness.provenance import write_text
from fastvit.kernels import _tuned

Choice = tuple[int, ...]  # in the order of fastvit.kernels._tuned.FIELDS

# While a table is measured, these choices of other tables hold at every key, so that the table's own kernel runs.
_SPLIT = {"attention_bwd_short": (0, 64, 64, 4, 2)}
FIXED: dict[str, Mapping[str, Choice]] = {
    "attention_bwd_dq": _SPLIT,
    "attention_bwd_dkdv": _SPLIT,
    "activation_backward": {"use_triton_gemm": (0,)},
    "gemm": {"use_triton_gemm": (1,)},
}
_LISTS: dict[str, list[list[int]]] = tomllib.loads(Path(__file__).with_name("candidates.toml").read_text())
MARGIN = 1.02
TOLERANCE = 0.05  # relative to the largest result; bfloat16 sums in another order differ by about 0.01
ROUNDS = 25

Run = Callable[[], tuple[Tensor, ...]]
Key = tuple[int, ...]
Entries = dict[tuple[str, Key], Choice]
Timer = Callable[[Callable[[], object]], float]  # seconds of a call; NaN if the GPU waited for its host


def candidates(table: str, key: tuple[int, ...]) -> list[Choice]:
    """Return the choices to try in addition to the shipped one. Some may not compile or not fit the GPU."""
    if table == "layer_norm":
        width = max(1 << (key[0] - 1).bit_length(), 16)
        backward = bool(key[1])
        grids = ((2, 3), (3, 3), (2, 4), (3, 1)) if backward else ((8, 1), (4, 3))  # programs an SM, stages
        most = 16 if backward else 32  # elements a thread
        tiles = itertools.product((1, 2, 4, 8, 16), repeat=2)  # rows, warps
        fit = [(rows, warps) for rows, warps in tiles if 4 <= rows * width // (32 * warps) <= most]
        return [(*tile, *grid) for tile in fit for grid in grids]
    choices = [tuple(choice) for choice in _LISTS[table]]
    if table == "gemm":
        return [(*tile[:3], group, *tile[3:]) for tile in choices for group in (1, 8)]
    if table == "attention_bwd_short":
        short = key[0] <= _tuned.LONGEST_SHORT
        return [c for c in choices if short and (c[0] == 0 or key[0] <= c[1] <= 2 * key[0])]
    return choices


def difference(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """Return the largest max |got - expected| / max |expected| of the tensors; infinite if one is not finite."""
    worst = 0.0
    for a, b in zip(got, expected, strict=True):
        if not a.isfinite().all():
            return float("inf")
        worst = max(worst, float((a.float() - b.float()).abs().max() / b.float().abs().max().clamp_min(1e-30)))
    return worst


def decide(shipped: Sequence[float], tried: Mapping[Choice, Sequence[float]]) -> tuple[Choice | None, float]:
    """Return the choice that replaces the shipped one, or None, and how many times as fast it is. Sample i of each was
    taken in round i."""
    gains = {choice: float(np.median(np.asarray(shipped) / np.asarray(values))) for choice, values in tried.items()}
    faster = [choice for choice, gain in gains.items() if gain > MARGIN]
    if not faster:
        return None, 1.0
    best = max(faster, key=lambda choice: gains[choice])
    return best, gains[best]


@contextlib.contextmanager
def using(entries: Entries) -> Iterator[set[tuple[str, Key]]]:
    """Within the context, launches take these measured choices only. An entry with the key () holds at every key.
    Yields the set of (table, key) that launches look up."""
    asked: set[tuple[str, Key]] = set()

    def choice(arch: str, table: str, *key: int) -> Choice | None:
        integers = tuple(map(int, key))
        asked.add((table, integers))
        return entries.get((table, integers), entries.get((table, ())))

    with mock.patch.object(_tuned, "choice", choice):
        _tuned.clear_caches()
        try:
            yield asked
        finally:
            _tuned.clear_caches()


class Tuner:
    """Measures the tables, and writes the file at `path` after each key. Keys that the file has, measured with the same
    "sources" on the same kind of GPU, are not measured again.

    Args:
        about: "gpu", "arch", and "measured": date, versions and "sources".
        most: the largest number of candidates for a key.
    """

    def __init__(self, timer: Timer, path: Path, about: dict[str, Any], *, most: int = 99) -> None:
        self.timer, self.path, self.most = timer, path, most
        self.data: dict[str, Any] = {**about, "tables": {}, "samples": {}}
        if path.exists():  # only results of the same code count
            before = json.loads(path.read_text())
            if before["measured"]["sources"] == about["measured"]["sources"]:
                self.data["tables"], self.data["samples"] = before["tables"], before["samples"]

    def _entries(self, table: str) -> Entries:
        """Return the choices in use while `table` is measured: those in the file, and FIXED."""
        choices = _tuned.parse(self.data["tables"])
        entries = {(str(name), tuple(map(int, key))): choice for (name, *key), choice in choices.items()}
        fixed = FIXED.get(table, {})
        entries = {k: choice for k, choice in entries.items() if k[0] not in fixed}
        return entries | {(name, ()): choice for name, choice in fixed.items()}

    def tune(self, table: str, label: str, build: Callable[[], Run]) -> Iterator[str]:
        """Measure the keys of `table` that are missing, and yield a line for each. build: returns the call to time,
        whose launches look up choices of the table."""
        with using(self._entries(table)) as asked:  # another kernel's choice sets the rows of a sum
            run = build()
            asked.clear()
            run()
        keys = sorted(key for name, key in asked if name == table)
        if not keys:
            raise RuntimeError(f"{label}: no launch asked for a choice of {table}")
        for key in keys:
            name = f"{table}[{','.join(map(str, key))}]"
            if name not in self.data["samples"]:
                yield f"{name} {label}: {self._tune(table, label, run, key, name)}"

    def _tune(self, table: str, label: str, run: Run, key: Key, name: str) -> str:
        base = self._entries(table)
        base.pop((table, key), None)
        entries: dict[Choice | None, Entries] = {None: base}  # None: as shipped
        with using(base):
            expected = tuple(t.clone() for t in run())  # each call may write into the same memory
        unfit: dict[str, str] = {}
        for choice in candidates(table, key)[: self.most]:
            measured = base | {(table, key): choice}
            try:
                with using(measured):
                    apart = difference(run(), expected)
                if apart > TOLERANCE:
                    raise ArithmeticError(f"differs from the shipped choice's result by {apart:.3g}")
                entries[choice] = measured
            except Exception as error:  # does not compile or fit; reported with the result
                unfit[str(choice)] = words(error)
        samples: dict[Choice | None, list[float]] = {choice: [] for choice in entries}
        for _, tried in itertools.product(range(ROUNDS), entries):
            with using(entries[tried]):
                samples[tried].append(self.timer(run))
        seconds = {str(choice): float(np.median(values)) for choice, values in samples.items()}
        if math.isnan(seconds["None"]):
            return f"not tuned, {HOST_BOUND}"
        shipped = samples.pop(None)
        chosen, gain = decide(shipped, {choice: values for choice, values in samples.items() if choice})
        choices = self.data["tables"].setdefault(table, {})
        choices.pop(text := ",".join(map(str, key)), None)
        if chosen is not None:
            choices[text] = dict(zip(_tuned.FIELDS[table], chosen, strict=True))
        self.data["samples"][name] = {"work": label, "seconds": seconds, "unfit": unfit, "gain": gain}
        write_text(self.path, json.dumps(self.data, indent=1) + "\n")
        verdict = f"{chosen}, {gain:.3f}x" if chosen else "as shipped"
        times = f"shipped {1e6 * seconds['None']:.1f} us"
        return f"{times}; {verdict}; {len(samples)} tried, {len(unfit)} unfit"
