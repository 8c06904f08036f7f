"""Choose the order of the benchmarks, and leave out those for which there is no time."""

from __future__ import annotations

import math
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness.columns import WIDTH
from benchmarks.harness.families import VIT_B_16
from benchmarks.harness.providers import OPS
from benchmarks.harness.workloads import Workload

Case = tuple[Workload, str]  # and "inference" or "training"

# The most important case of each op, on a CPU and on a GPU, and the sizes that an exponent is fitted to.
FIRST = {
    "attention": ("B1 N1025 H12 d64", "B32 N197 H16 d64"),
    "attention_varlen": ("B4 N256 H12 d64", "B32 N1024 H16 d64"),
    "attention_windows": ("B1 grid56 window7 H3 d32 shift3", "B32 grid56 window7 H3 d32 shift3"),
    "rotary": ("B8 N197 H12 d64 halves", "B32 N197 H12 d64 halves"),
    "qk_norm": ("halves layer B8 N197 H12 d64", "halves layer B32 N197 H12 d64"),
    "layer_norm": ("B8 N197 D768", "B256 N197 D768"),
    "add_layer_norm": ("B8 N197 D768", "B256 N197 D768"),
    "linear": ("B1 N197 D768 out3072 gelu", "B32 N197 D768 out3072 gelu"),
    "layer_norm_linear": ("B1 N197 D768 out2304", "B32 N197 D768 out2304"),
    "layer_norm_attention": ("B1 N197 D768 H12", "B32 N197 D768 H12"),
    "mlp": ("B1 N197 D768", "B32 N197 D768"),
    "layer_norm_mlp": ("B1 N197 D768", "B32 N197 D768"),
    "patch_embed": ("B8 px224 patch16 D768", "B32 px224 patch16 D768"),
    "block": ("B1 N1025 D768 H12", "B32 N197 D768 H12"),
    "model": ("vit_small_patch16_224 B1 px224", "vit_base_patch16_224 B32 px224"),
    "image list": ("vit_tiny_patch16_224 crops", "vit_base_patch16_224 crops B32"),
    "accelerate": tuple(f"{library} B{B}" for library in VIT_B_16 for B in (1, 32)),
    "memory, attention": tuple(f"B1 N{N} H12 d64" for N in (4097, 2305, 1025)),
    "memory, block": tuple(f"B1 N{N} D768 H12" for N in (4097, 2305, 1025)),
}


class OutOfTime(Exception):
    """The time of the run is over, within a case."""


def turns(workloads: Iterable[Workload]) -> dict[str, tuple[int, int]]:
    """Return sort keys by id: the cases FIRST of all ops, then the next case of every op, and so on. Blocks and models,
    which take longest, come last each time."""
    ops = sorted(OPS, key=lambda op: op in ("block", "model", "image list", "accelerate"))
    seen = Counter[str]()
    found = {}
    for workload in workloads:
        other = str(workload) not in FIRST[workload.op]
        seen[workload.op] += other
        found[workload.id] = (seen[workload.op] if other else 0), ops.index(workload.op)
    return found


STEPS = 200  # bound of a case's time in steps of eager at the machine's limits; an idle machine takes fewer


@dataclass
class Schedule:
    """The time of a run. A case begins only if it is likely to end before the deadline, judged by the time that others
    took for their work. Work is counted in seconds that a step of eager needs at the machine's limits."""

    deadline: float  # of perf_counter()
    case_seconds: float  # of timed rounds, for each case
    total: int = 0
    done: int = 0
    taken: list[tuple[str, float, float]] = field(default_factory=list)  # op, work, seconds in addition to timed rounds
    left_out: list[tuple[Case, float]] = field(default_factory=list)  # and its work

    def left(self) -> float:
        return max(0.0, self.deadline - time.perf_counter())

    def check(self) -> None:
        """Raise OutOfTime once the time is over: on a busy machine a case takes longer than estimated."""
        if time.perf_counter() > self.deadline:
            raise OutOfTime

    def budget(self) -> float:
        """Return the seconds of timed rounds for the next case: half of the time left, spread evenly. The other half
        goes into agreement and memory."""
        return min(self.case_seconds, self.left() / (2 * max(1, self.total - self.done - len(self.left_out))))

    def estimate(self, op: str, work: float) -> float:
        """Estimate the seconds of a case: a constant, and a part in proportion to its work. That part comes from the
        op's largest case so far, or else the largest of all; it is bounded where it is the smaller part, and so
        uncertain."""
        if not self.taken:
            return self.case_seconds
        every = min(seconds for _, _, seconds in self.taken)
        known = [row for row in self.taken if row[0] == op] or self.taken
        _, its_work, seconds = max(known, key=lambda row: row[1])
        steps = (seconds - every) / its_work
        return self.case_seconds + every + work * (steps if seconds > 2 * every else min(steps, STEPS))

    def admits(self, case: Case, work: float) -> bool:
        """Return whether there is time for the case; if not, note that it is left out."""
        if self.estimate(case[0].op, work) <= self.left():
            return True
        self.left_out.append((case, work))
        return False

    def finish(self, op: str, work: float, seconds: float) -> None:
        self.done += 1
        self.taken.append((op, work, max(0.0, seconds - self.case_seconds)))

    def minutes(self) -> int:
        """Return the minutes that the cases left out would take, with a third added."""
        seconds = sum(self.estimate(workload.op, work) for (workload, _), work in self.left_out)
        return math.ceil(4 / 3 * seconds / 60)


def selection(left_out: Sequence[Case], ran: Iterable[str]) -> str:
    """Return an expression for pytest's -k that selects these cases. An op of which no case ran is named as a whole."""
    whole = {workload.op for workload, _ in left_out} - {*ran}
    words = (
        f"[{workload.op.replace(', ', '-')}-" if workload.op in whole else f"[{workload.id}-{mode}]"
        for workload, mode in left_out
    )
    return " or ".join(dict.fromkeys(words))


def counted(ops: Iterable[str]) -> list[str]:
    """Return lines that say how many cases each op has."""
    text = "; ".join(f"{op} {count}".replace(" ", "\0") for op, count in Counter(ops).items())
    lines = textwrap.wrap(text, WIDTH, initial_indent="    ", subsequent_indent="    ")
    return [line.replace("\0", " ") for line in lines]


def command(*options: str) -> list[str]:
    """Return the command that runs the benchmarks from here, on lines that a shell joins, between double quotes too."""
    python, here = Path(sys.executable), Path.cwd()
    python = python.relative_to(here) if python.is_relative_to(here) else python
    words = f"{python} -m pytest benchmarks --benchmark-only {' '.join(options)}"
    lines = textwrap.wrap(words, WIDTH - 6, break_long_words=False, break_on_hyphens=False)
    return [f"    {line} \\" for line in lines[:-1]] + [f"    {lines[-1]}"]
