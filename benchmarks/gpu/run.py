"""Everything else that needs a GPU, in order of worth: tuning, all tests, sanitizers, the full grid, the results page.

    make gpu                                   # all that has not passed yet
    python -m benchmarks.gpu --list
    python -m benchmarks.gpu --steps tests "bench model"
    python -m benchmarks.gpu --rehearse        # every kind of step in miniature, without a GPU

Every step is a process of its own with a time limit. In the results folder (benchmarks/results/<gpu>), results.jsonl
keeps what became of them, and log.txt what they printed. A second call leaves out what has passed, unless code or
device have changed. Exit status: 0 if all passed, 1 if not, 2 if the run could not begin.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.gpu import needs, sanitize
from benchmarks.gpu.journal import DONE, REHEARSAL, Journal, read, results_folder
from benchmarks.gpu.runner import Runner, Step, duration
from benchmarks.gpu.tables import TABLES
from benchmarks.harness.provenance import ROOT, commit
from benchmarks.harness.record import environment
from fastvit._output import not_writable, write_file
from fastvit.kernels import _tuned

# Of a step, by the first word of its name; seconds
LIMITS = {"compile": 600.0, "tune": 1200.0, "tests": 1800.0, "sanitize": 900.0, "bench": 7200.0, "page": 60.0}
REHEARSED = 120.0  # seconds, of a rehearsal's steps
TESTS_AT_ONCE = 14
# Tests of what needs no GPU
_WITHOUT_GPU = {
    "test_targets",
    "test_benchmarks",
    "test_traffic",
    "test_gpu_run",
    "test_gpu_first",
    "test_gpu_plan",
    "test_tune",
}
_PACKAGES = ("pytest", "pytest_benchmark", "triton")  # that steps import
_PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
_TUNED_FIRST = ("attention_fwd", "attention_bwd_dq", "attention_bwd_dkdv", "attention_bwd_short", "gemm")
_TIMED_FIRST = ("attention", "block", "model", "mlp", "layer_norm", "patch_embed")


def gpu_steps(results: Path) -> list[Step]:
    tables = sorted({table.name: None for table in TABLES}, key=lambda name: _rank(_TUNED_FIRST, name))
    steps = [_step("compile candidates", "-m", "benchmarks.gpu.precompile", "--out", str(results), "--tables", *tables)]
    steps += [_step(f"tune {table}", "-m", "benchmarks.gpu.tune", "--table", table) for table in tables]
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if path.stem not in _WITHOUT_GPU:
            steps.append(_step(f"tests {path.stem}", *_PYTEST, str(path.relative_to(ROOT))))
    for tool in ("memcheck", "racecheck"):
        for op in sanitize.ops():
            steps.append(_step(f"sanitize {tool} {op}", "-m", "benchmarks.gpu.sanitize", "--tool", tool, "--op", op))
    benches = {path.stem.removeprefix("bench_"): path.name for path in (ROOT / "benchmarks").glob("bench_*.py")}
    for op in sorted(benches, key=lambda name: (_rank(_TIMED_FIRST, name), name)):
        options = "--benchmark-only", "--benchmark-json", str(results / f"{op}.json")
        steps.append(_step(f"bench {op}", *_PYTEST, f"benchmarks/{benches[op]}", *options))
    return [*steps, _step("page", "-m", "benchmarks.report.results")]


def rehearsal_steps(results: Path) -> list[Step]:
    bench = ("benchmarks/bench_layer_norm.py", "--benchmark-only", "--quick", "--benchmark-json")
    tune = ("--rehearse", "--table", "attention_fwd", "--out", str(results / "tuned"))
    steps = [
        _step("tune attention_fwd", "-m", "benchmarks.gpu.tune", *tune),
        _step("tests test_library", *_PYTEST, "tests/runtime/test_library.py"),
        _step("sanitize memcheck dropout", "-m", "benchmarks.gpu.sanitize", "--rehearse", "--op", "dropout"),
        _step("bench layer_norm", *_PYTEST, *bench, str(results / "layer_norm.json")),
        _step("page", "-m", "benchmarks.report.results", str(results), "--to", str(results / "README.md")),
    ]
    return [replace(step, limit=REHEARSED) for step in steps]


def _step(name: str, *arguments: str) -> Step:
    return Step(name, arguments, LIMITS[name.split()[0]])


def summary(steps: list[Step], journal: Journal) -> str:
    """Return how many steps there are of each status, and the names of those that are not done."""
    statuses = {step.name: (journal.get("step", step.name) or {}).get("status", "to do") for step in steps}
    counts = Counter(statuses.values()).most_common()
    unfinished = [f"\n    {name}: {status}" for name, status in statuses.items() if status not in DONE]
    return f"{len(steps)} steps: {', '.join(f'{n} {status}' for status, n in counts)}{''.join(unfinished)}"


def _rank(first: tuple[str, ...], name: str) -> int:
    return first.index(name) if name in first else len(first)


def at_once(kind: str) -> int:
    """How many steps of a kind run side by side: tests, and all else one by one."""
    return min(TESTS_AT_ONCE, max(1, (os.cpu_count() or 1) - 2)) if kind == "tests" else 1


def left(steps: list[Step], journal: Journal, ended: set[str], most: float = math.inf) -> str:
    """How long the steps that have not ended will take, in words: what each took the last time, on this device, or
    what those of its kind took on average, with any code; of a kind that has not run yet the limits, as a bound. most:
    seconds until the run ends in any case."""
    took: dict[str, list[float]] = {}
    own: dict[str, float] = {}
    for r in read(journal.path):
        if (r["kind"], r["device"], r["status"]) == ("step", journal.device, "passed"):
            took.setdefault(r["name"].split()[0], []).append(r["seconds"])
            own[r["name"]] = r["seconds"]
    total, known = 0.0, True
    for step in steps:
        if step.name in ended or journal.done("step", step.name):
            continue
        kind = step.name.split()[0]
        several = took.get(kind)
        known &= several is not None
        seconds = own.get(step.name, sum(several) / len(several) if several else step.limit)
        total += seconds / at_once(kind)
    bound = not known or total > most
    return f"{'at most' if bound else 'about'} {duration(min(total, most))} left" if total else ""


def execute(steps: list[Step], runner: Runner) -> int:
    """All steps, kind by kind."""
    statuses: dict[str, str] = {}
    try:
        for kind in dict.fromkeys(step.name.split()[0] for step in steps):
            some = [step for step in steps if step.name.split()[0] == kind]
            statuses |= runner.run(some, workers=at_once(kind))
    finally:
        runner.end()
    return int(any(status not in DONE for status in statuses.values()))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", nargs="+", default=[""], metavar="PREFIX", help='such as tests or "bench model"')
    parser.add_argument("--list", action="store_true", help="the steps and how they stand")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all of them")
    parser.add_argument("--rehearse", action="store_true", help="every kind of step in miniature, without a GPU")
    parser.add_argument("--out", type=Path, help="results folder")
    chosen = parser.parse_args(arguments)
    gpu = torch.cuda.is_available() and not chosen.rehearse
    if not chosen.list and (reason := needs.complaint("gpu", _PACKAGES, rehearse=chosen.rehearse)):
        print(reason, file=sys.stderr)
        return 2
    device = torch.cuda.get_device_name() if gpu else REHEARSAL
    results = (chosen.out or results_folder(device)).resolve()
    steps = rehearsal_steps(results) if chosen.rehearse else gpu_steps(results)
    steps = [step for step in steps if step.name.startswith(tuple(chosen.steps))]
    if not steps:
        parser.error(f"no step begins with {' or '.join(map(repr, chosen.steps))}")
    if reason := not_writable(results):
        print(f"{reason}; --out chooses another folder", file=sys.stderr)
        return 2
    journal = Journal(results, device)
    if chosen.list:
        for step in steps:
            stands = (journal.get("step", step.name) or {}).get("status", "to do")
            print(f"{stands:<10} {step.name:<34} python {' '.join(step.arguments)}")
        return 0
    print(json.dumps(environment(torch.device("cuda" if gpu else "cpu"), torch.bfloat16), indent=1))
    print(f"commit {commit()}, sources {journal.code}, results in {results}", flush=True)
    runner = Runner(
        journal, chosen.seconds, left=lambda runner: left(steps, journal, runner.ended, runner.seconds - runner.elapsed)
    )
    runner.say(left(steps, journal, set(), chosen.seconds) or "all has passed before")
    try:
        status = execute(steps, runner)
    except KeyboardInterrupt:
        print("stopped; the next call goes on with the steps that are left", file=sys.stderr)
        status = 130
    tuned = _tuned.FOLDER / _tuned.file_name(device)
    if tuned.exists():
        write_file(results / tuned.name, tuned.read_bytes())  # so that one folder has all that is to be kept
    print(f"{summary(steps, journal)}\nsee {results / 'log.txt'}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
