"""The steps of a run after its first minutes, in order of worth: tuning, all tests, sanitizers, the full grid of
benchmarks, the results page."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu import sanitize
from benchmarks.gpu.journal import DONE, Journal, read
from benchmarks.gpu.runner import Step, StepRunner, duration
from benchmarks.gpu.tables import TABLES
from benchmarks.harness.provenance import ROOT

# Limits in seconds, by the first word of a step's name
LIMITS = {"compile": 600.0, "tune": 1200.0, "tests": 1800.0, "sanitize": 900.0, "bench": 7200.0, "page": 60.0}
REHEARSED = 120.0  # seconds, the limit of every step of a rehearsal
TESTS_AT_ONCE = 14
PACKAGES = ("pytest", "pytest_benchmark")  # that only these steps import
BENCHES = {
    "attention": ("attention", "attention_varlen", "attention_windows", "layer_norm_attention"),
    "block": ("block",),
    "model": ("model",),
    "mlp": ("linear", "layer_norm_linear", "mlp", "layer_norm_mlp"),
    "layer_norm": ("layer_norm", "add_layer_norm"),
    "patch_embed": ("patch_embed",),
    "accelerate": ("accelerate",),
    "memory": ("memory, attention", "memory, block"),
    "qk_norm": ("qk_norm",),
    "rotary": ("rotary",),
}  # ops of a step; its results go into a file of its own
# Tests that need no GPU
_WITHOUT_GPU = ("benchmarks/", "mutation/", "kernels/test_targets", "kernels/test_traffic", "kernels/test_tune")
_PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
_TUNED_FIRST = ("attention_fwd", "attention_bwd_dq", "attention_bwd_dkdv", "attention_bwd_short", "gemm")


def gpu_steps(results: Path) -> list[Step]:
    """Return all steps. results: folder of the result files."""
    names = {table.name: len(_TUNED_FIRST) for table in TABLES} | {name: i for i, name in enumerate(_TUNED_FIRST)}
    tables = sorted(names, key=names.__getitem__)
    steps = [_step("compile candidates", "-m", "benchmarks.gpu.precompile", "--out", str(results), "--tables", *tables)]
    steps += [_step(f"tune {table}", "-m", "benchmarks.gpu.tune", "--table", table) for table in tables]
    steps += [_step(f"tests {path.stem}", *_PYTEST, str(path.relative_to(ROOT))) for path in test_files()]
    for tool in ("memcheck", "racecheck"):
        for op in sanitize.ops():
            steps.append(_step(f"sanitize {tool} {op}", "-m", "benchmarks.gpu.sanitize", "--tool", tool, "--op", op))
    steps += [_bench(name, results) for name in BENCHES]
    return [*steps, _step("page", "-m", "benchmarks.report.results")]


def rehearsal_steps(results: Path) -> list[Step]:
    """Return a step of every kind, small enough for a CPU."""
    tune = ("--rehearse", "--table", "attention_fwd", "--out", str(results / "tuned"))
    steps = [
        _step("tune attention_fwd", "-m", "benchmarks.gpu.tune", *tune),
        _step("tests test_library", *_PYTEST, "tests/runtime/test_library.py"),
        _step("sanitize memcheck dropout", "-m", "benchmarks.gpu.sanitize", "--rehearse", "--op", "dropout"),
        _bench("layer_norm", results, "--quick"),
        _step("page", "-m", "benchmarks.report.results", str(results), "--to", str(results / "README.md")),
    ]
    return [replace(step, limit=REHEARSED) for step in steps]


def test_files() -> list[Path]:
    """Return the files of tests that are worth a GPU's time."""
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    return [path for path in found if not path.relative_to(ROOT / "tests").as_posix().startswith(_WITHOUT_GPU)]


def _step(name: str, *arguments: str) -> Step:
    return Step(name, arguments, LIMITS[_kind(name)])


def _bench(name: str, results: Path, *options: str) -> Step:
    selection = " or ".join(f"[{op.replace(', ', '-')}-" for op in BENCHES[name])
    options = ("--benchmark-only", *options, "--benchmark-json", str(results / f"{name}.json"))
    return _step(f"bench {name}", *_PYTEST, "benchmarks", "-k", selection, *options)


def _kind(name: str) -> str:
    return name.split()[0]


def summary(steps: list[Step], journal: Journal) -> str:
    """Return how many steps there are of each status, and the names of those that are not done."""
    statuses = {step.name: journal.status(step.name) for step in steps}
    counts = Counter(statuses.values()).most_common()
    unfinished = [f"\n    {name}: {status}" for name, status in statuses.items() if status not in DONE]
    return f"{len(steps)} steps: {', '.join(f'{n} {status}' for status, n in counts)}{''.join(unfinished)}"


def at_once(kind: str) -> int:
    """Return how many steps of a kind run at a time: several files of tests, and one of everything else."""
    return min(TESTS_AT_ONCE, max(1, (os.cpu_count() or 1) - 2)) if kind == "tests" else 1


def left(
    steps: list[Step], journal: Journal, ended: Collection[str], most: float = math.inf, before: float = 0.0
) -> str:
    """Say how long the steps that have not ended will take; "" if nothing is left.

    A step is taken to last as long as the last time on this device, with any code, or else as long as those of its kind
    did on average. A kind that has not run yet counts with its limits, and the sum is then a bound.

    Args:
        ended: names of the steps that have ended in this call.
        most: seconds until the run ends in any case.
        before: seconds until the first of the steps begins.
    """
    took: dict[str, list[float]] = {}
    own: dict[str, float] = {}
    for r in read(journal.path):
        if (r["kind"], r["device"], r["status"]) == ("step", journal.device, "passed"):
            took.setdefault(_kind(r["name"]), []).append(r["seconds"])
            own[r["name"]] = r["seconds"]
    total, known = before, True
    for step in steps:
        if step.name in ended or journal.done("step", step.name):
            continue
        kind = _kind(step.name)
        several = took.get(kind)
        known &= several is not None
        seconds = own.get(step.name, sum(several) / len(several) if several else step.limit)
        total += seconds / at_once(kind)
    bound = not known or total > most
    return f"{'at most' if bound else 'about'} {duration(min(total, most))} left" if total else ""


def execute(steps: list[Step], runner: StepRunner) -> int:
    """Run all steps, kind by kind. Returns 0 if all are done, and 1 if not."""
    statuses: dict[str, str] = {}
    try:
        for kind in dict.fromkeys(_kind(step.name) for step in steps):
            some = [step for step in steps if _kind(step.name) == kind]
            statuses |= runner.run(some, workers=at_once(kind))
    finally:
        runner.end()
    return int(any(status not in DONE for status in statuses.values()))
