"""Everything that needs a GPU, step by step: tests, sanitizers, tuning, benchmarks, the results page.

    make gpu                                   # all that has not passed yet
    python -m benchmarks.gpu --list
    python -m benchmarks.gpu --steps tests "bench model"
    python -m benchmarks.gpu --cpu-rehearsal   # every kind of step in miniature, without a GPU

Every step is a process of its own with a time limit. In the results folder (benchmarks/results/<gpu>), run.json keeps
what became of them, and logs/ what they printed. A second call leaves out what has passed, unless code or device have
changed. Exit status: 0 if all passed, else 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import sanitize
from benchmarks.gpu.tables import TABLES
from benchmarks.harness.provenance import ROOT, commit, sources, write_json
from benchmarks.harness.record import environment

LIMIT = 3600.0  # seconds
SKIPPED = 77  # exit status of a step that the machine has no tool for
DONE = ("passed", "skipped")
Steps = dict[str, tuple[str, ...]]  # name -> arguments of the Python interpreter

# Tests of what needs no GPU
_WITHOUT_GPU = {"test_targets", "test_benchmarks", "test_traffic", "test_gpu_run", "test_tune"}
_PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")


def gpu_steps(results: Path) -> Steps:
    steps: Steps = {}
    workers = ("-n", "4") if importlib.util.find_spec("xdist") else ()  # compilation takes most of the time
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        if path.stem not in _WITHOUT_GPU:
            steps[f"tests {path.stem}"] = (*_PYTEST, f"tests/{path.name}", *workers)
    for tool in ("memcheck", "racecheck"):
        for op in sanitize.ops():
            steps[f"sanitize {tool} {op}"] = ("-m", "benchmarks.gpu.sanitize", "--tool", tool, "--op", op)
    for table in TABLES:
        steps[f"tune {table}"] = ("-m", "benchmarks.gpu.tune", "--table", table)
    for path in sorted((ROOT / "benchmarks").glob("bench_*.py")):
        op = path.stem.removeprefix("bench_")
        file = str(results / f"{op}.json")
        steps[f"bench {op}"] = (*_PYTEST, f"benchmarks/{path.name}", "--benchmark-only", "--benchmark-json", file)
    return steps | {"page": ("-m", "benchmarks.harness.results")}


def rehearsal_steps(results: Path) -> Steps:
    bench = ("benchmarks/bench_layer_norm.py", "--benchmark-only", "--quick", "--benchmark-json")
    tune = ("--rehearse", "--table", "attention_fwd", "--out", str(results / "tuned"))
    return {
        "tests test_library": (*_PYTEST, "tests/test_library.py"),
        "sanitize memcheck dropout": ("-m", "benchmarks.gpu.sanitize", "--rehearse", "--op", "dropout"),
        "tune attention_fwd": ("-m", "benchmarks.gpu.tune", *tune),
        "bench layer_norm": (*_PYTEST, *bench, str(results / "layer_norm.json")),
        "page": ("-m", "benchmarks.harness.results", str(results), "--to", str(results / "README.md")),
    }


def earlier(results: Path, device: str, code: str) -> dict[str, Any]:
    """What became of the steps so far, by name; nothing, if they ran on another device or with other code."""
    path = results / "run.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    return before["steps"] if (before.get("device"), before.get("sources")) == (device, code) else {}


def _run(argv: tuple[str, ...], log: Path, limit: float) -> str:
    """The status of a process, which ends at the limit with all that it started."""
    ours = ("TRITON_INTERPRET", "PYTEST_XDIST")  # of the process that calls, in tests
    variables = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("w") as output,
        subprocess.Popen(
            [sys.executable, *argv], cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        ) as process,
    ):  # fmt: skip
        try:
            return {0: "passed", SKIPPED: "skipped"}.get(process.wait(limit), "failed")
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                return "timed out"
            raise


def execute(steps: Steps, results: Path, device: str, code: str, limit: float = LIMIT) -> int:
    """Runs what has not passed, in order; prints a line a step."""
    done = earlier(results, device, code)
    for i, (name, argv) in enumerate(steps.items(), 1):
        label = f"[{i}/{len(steps)}] {name}"
        if done.get(name, {}).get("status") in DONE:
            print(f"{label}: {done[name]['status']} before", flush=True)
            continue
        log, start = results / "logs" / f"{re.sub(r'[^a-z0-9]+', '_', name)}.log", time.perf_counter()
        status = _run(argv, log, limit)
        done[name] = {"status": status, "seconds": round(time.perf_counter() - start, 1)}
        write_json(results / "run.json", {"device": device, "sources": code, "commit": commit(), "steps": done})
        print(f"{label}: {status} after {done[name]['seconds']} s", flush=True)
        if status != "passed":
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            print(*(f"    {line}" for line in lines[-3:]), sep="\n", flush=True)
    return int(any(done[name]["status"] not in DONE for name in steps))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", nargs="+", default=[""], metavar="PREFIX", help='such as tests or "bench model"')
    parser.add_argument("--list", action="store_true", help="the steps and how they stand")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for a step")
    parser.add_argument("--cpu-rehearsal", action="store_true", help="every kind of step in miniature, without a GPU")
    parser.add_argument("--out", type=Path, help="results folder")
    chosen = parser.parse_args(arguments)
    gpu = torch.cuda.is_available() and not chosen.cpu_rehearsal
    if not (gpu or chosen.cpu_rehearsal or chosen.list):
        parser.error("no GPU; --cpu-rehearsal runs the steps in miniature without one")
    device = torch.cuda.get_device_name() if gpu else "cpu rehearsal"
    folder = re.sub(r"[^a-z0-9]+", "_", device.lower())
    results = (chosen.out or ROOT / ("benchmarks/results" if gpu else "out") / folder).resolve()
    steps = rehearsal_steps(results) if chosen.cpu_rehearsal else gpu_steps(results)
    steps = {name: argv for name, argv in steps.items() if name.startswith(tuple(chosen.steps))}
    if not steps:
        parser.error(f"no step begins with {' or '.join(map(repr, chosen.steps))}")
    code = sources()
    if chosen.list:
        done = earlier(results, device, code)
        for name, argv in steps.items():
            print(f"{done.get(name, {}).get('status', 'to do'):<10} {name:<34} python {' '.join(argv)}")
        return 0
    print(json.dumps(environment(torch.device("cuda" if gpu else "cpu"), torch.bfloat16), indent=1))
    print(f"commit {commit()}, sources {code}; logs in {results / 'logs'}", flush=True)
    return execute(steps, results, device, code, chosen.limit)


if __name__ == "__main__":
    sys.exit(main())
