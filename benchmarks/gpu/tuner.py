"""Measure launch choices on the current GPU, and write those that are faster into tuned_<gpu>.json.

For every shape the shipped choice and the candidates run in turn, A B C A B C, timed by `harness/clock.py`: three
rounds for all, then 25 for the shipped one and the best three. A choice replaces the shipped one if it is more than 2 %
faster, by the median of the rounds' ratios, and its results agree.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness.clock import HOST_BOUND, Quantiles
from fastvit._output import write_file
from fastvit.kernels import _tuned
from fastvit.ops.runtime import device as devices

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
ROUNDS, FINALISTS = (3, 25), 3

Run = Callable[[], tuple[Tensor, ...]]
Key = tuple[int, ...]
Entries = dict[tuple[str, Key], Choice]
Samples = dict[Choice | None, list[float]]  # seconds; None: as shipped
Timer = Callable[[Callable[[], object]], float]  # seconds of a call; NaN if the GPU waited for its host


@dataclass(frozen=True)
class Work:
    """One op at one shape. `build(device)` returns the call to time, whose launches look up choices of `table`."""

    table: str
    label: str
    build: Callable[[torch.device], Run]


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


def decide(shipped: Sequence[float], tried: Mapping[Choice, Sequence[float]]) -> Choice | None:
    """Return the choice that replaces the shipped one, or None. Sample i of each was taken in round i."""
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


def keys_of(run: Callable[[], object], table: str, entries: Entries) -> list[Key]:
    """Return the keys that a call looks up in one table, with these entries, sorted."""
    with using(base_entries(table, entries)) as asked:
        run()
    return sorted({key for _, name, key in asked if name == table})


def name_of(table: str, key: Key) -> str:
    """Write a key as "attention_fwd[197,64,2,0,0]"."""
    return f"{table}[{','.join(map(str, key))}]"


class Tuner:
    """Measures works, and writes the table at `path` after each key. Keys that the file has, measured with the same
    "sources", are not measured again.

    Args:
        measured: returns date, versions and "sources" of the measurement.
        most: the largest number of candidates for a key.
    """

    def __init__(
        self, device: torch.device, timer: Timer, path: Path, gpu: str, measured: Callable[[], dict[str, Any]],
        *, most: int = 99,
    ) -> None:  # fmt: skip
        self.device, self.timer, self.path, self.measured, self.most = device, timer, path, measured, most
        self.arch = devices.arch(torch.empty(0, device=device))
        where = measured()
        self.data: dict[str, Any] = {"gpu": gpu, "arch": self.arch, "measured": where}
        self.data |= {"tables": {}, "samples": {}}
        if path.exists():  # only results of the same code on the same GPU count
            before = json.loads(path.read_text())
            if before["measured"]["sources"] == where["sources"]:
                self.data["tables"], self.data["samples"] = before["tables"], before["samples"]

    @property
    def entries(self) -> Entries:
        """The choices in the file."""
        choices = _tuned.parse(self.data["tables"])
        return {(str(table), tuple(map(int, key))): choice for (table, *key), choice in choices.items()}

    def tune(self, work: Work) -> list[str]:
        """Measure the work's keys that are missing. Return a line for each."""
        with using(base_entries(work.table, self.entries)):
            run = work.build(self.device)
        # with the entries: another kernel's choice sets the rows of a sum
        keys = keys_of(run, work.table, self.entries)
        if not keys:
            raise RuntimeError(f"{work.label}: no launch asked for a choice of {work.table}")
        measured = self.data["samples"]
        return [self._tune(work, run, key) for key in keys if name_of(work.table, key) not in measured]

    def _tune(self, work: Work, run: Run, key: Key) -> str:
        base = base_entries(work.table, self.entries)
        base.pop((work.table, key), None)

        def with_choice(choice: Choice | None) -> Entries:
            return base | ({} if choice is None else {(work.table, key): choice})

        def rounds(choices: list[Choice | None], count: int) -> Samples:
            samples: Samples = {choice: [] for choice in choices}
            for _, choice in itertools.product(range(count), choices):
                with using(with_choice(choice)):
                    samples[choice].append(self.timer(run))
            return samples

        with using(base):
            expected = tuple(t.clone() for t in run())  # each call may write into the same memory
        tried: list[Choice] = []
        unfit: dict[str, str] = {}
        for choice in candidates(work.table, key)[: self.most]:
            try:
                with using(with_choice(choice)):
                    apart = difference(run(), expected)
                if apart > TOLERANCE:
                    raise ArithmeticError(f"differs from the shipped choice's result by {apart:.3g}")
                tried.append(choice)
            except Exception as error:  # does not compile or fit; reported with the result
                unfit[str(choice)] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        samples = rounds([None, *tried], ROUNDS[0])
        finalists = sorted(tried, key=lambda choice: float(np.median(samples[choice])))[:FINALISTS]
        final = rounds([None, *finalists], ROUNDS[1])
        chosen = decide(final[None], {choice: final[choice] for choice in finalists})
        gain = float(np.median(np.asarray(final[None]) / np.asarray(final[chosen])))
        if math.isnan(gain):
            return f"{name_of(work.table, key)} {work.label}: not tuned, {HOST_BOUND}"
        choices = self.data["tables"].setdefault(work.table, {})
        choices.pop(text := ",".join(map(str, key)), None)
        if chosen is not None:
            choices[text] = dict(zip(_tuned.FIELDS[work.table], chosen, strict=True))
        quantiles = {choice: asdict(Quantiles.of(values)) for choice, values in (samples | final).items()}
        self.data["samples"][name_of(work.table, key)] = {
            "work": work.label, "shipped": quantiles.pop(None), "tried": {str(c): q for c, q in quantiles.items()},
            "unfit": unfit, "chosen": chosen, "gain": gain,
        }  # fmt: skip
        self.data["measured"] |= self.measured()  # the current date and state
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_file(self.path, json.dumps(self.data, indent=1) + "\n")
        shipped = f"{work.label}: shipped {1e6 * float(np.median(final[None])):.1f} us"
        verdict = f"{chosen}, {gain:.3f}x" if chosen else "as shipped"
        return f"{name_of(work.table, key)} {shipped}; {verdict}; {len(tried)} tried, {len(unfit)} unfit"
