"""Everything that needs a GPU, as steps of under nine minutes each: tests, sanitizers, tuning, benchmarks, results.

    make gpu                                   # all that is not done yet
    python -m benchmarks.gpu --list
    python -m benchmarks.gpu --steps tests tune --budget 540
    python -m benchmarks.gpu --cpu-rehearsal   # the same machinery in miniature, without a GPU

Steps run one after another, each in a process of its own with a time limit. What they did is kept in run.json in the
results folder (benchmarks/results/<gpu>), with their output in logs/. A second call goes on with what has not passed,
unless code or device have changed. Exit status: 0 all passed, 75 some are still to do, 1 some failed.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import sanitize
from benchmarks.gpu.tables import TABLES
from benchmarks.harness.provenance import ROOT, commit, now, sources, write_json
from benchmarks.harness.record import environment, gpu_state

LIMIT = 530  # seconds
LEAST = 60  # of --budget that a step must find
UNFINISHED, SKIPPED = 75, 77  # exit statuses of steps, beside 0 and failure
DONE = ("passed", "skipped")

# Tests of what needs no GPU
_WITHOUT_GPU = {"test_targets", "test_benchmarks", "test_traffic", "test_gpu_run", "test_tune"}
# Into how many steps a file is cut; the others are one
_TEST_SHARDS = {
    "test_attention": 3, "test_fuzz": 5, "test_layer_norm": 2, "test_layers": 2, "test_linear": 4, "test_mlp": 3,
    "test_patch_embed": 4, "test_vit": 2,
}  # fmt: skip
# odd: forward and forward + backward alternate, and the second takes longer
_BENCH_SHARDS = {"accelerate": 9, "attention": 7, "layer_norm": 3, "mlp": 9, "patch_embed": 7, "block": 9, "model": 19}


@dataclass(frozen=True)
class Step:
    name: str
    argv: tuple[str, ...]  # of the Python interpreter
    limit: float = LIMIT


def _pytest(path: str, shard: str, *options: str) -> tuple[str, ...]:
    plugins = ("-p", "no:cacheprovider", "-p", "benchmarks.gpu.shard", "--shard", shard)
    return ("-m", "pytest", path, "-q", *plugins, *options)


def _shards(count: int) -> list[str]:
    return [f"{i}/{count}" for i in range(1, count + 1)]


def gpu_steps(results: Path) -> Iterator[Step]:
    workers = ("-n", "4") if importlib.util.find_spec("xdist") else ()  # compilation takes most of the time
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        if path.stem not in _WITHOUT_GPU:
            for shard in _shards(_TEST_SHARDS.get(path.stem, 1)):
                yield Step(f"tests {path.stem} {shard}", _pytest(f"tests/{path.name}", shard, *workers))
    for tool in ("memcheck", "racecheck"):
        for op in sanitize.ops():
            yield Step(f"sanitize {tool} {op}", ("-m", "benchmarks.gpu.sanitize", "--tool", tool, "--op", op))
    for table in TABLES:
        # a shape that has begun is finished: half a minute
        yield Step(f"tune {table}", ("-m", "benchmarks.gpu.tune", "--table", table, "--seconds", str(LIMIT - 90)))
    for op in [path.stem.removeprefix("bench_") for path in sorted((ROOT / "benchmarks").glob("bench_*.py"))]:
        for shard in _shards(_BENCH_SHARDS.get(op, 1)):
            file = results / f"{op}_{shard.replace('/', 'of')}.json"
            options = ("--benchmark-only", "--benchmark-json", str(file), "--bench-minutes", "6", "--complete")
            yield Step(f"bench {op} {shard}", _pytest(f"benchmarks/bench_{op}.py", shard, *options))
    yield Step("page", ("-m", "benchmarks.harness.results"))


def rehearsal_steps(results: Path) -> Iterator[Step]:
    yield Step("tests test_library 1/1", _pytest("tests/test_library.py", "1/1"))
    yield Step("sanitize memcheck dropout", ("-m", "benchmarks.gpu.sanitize", "--rehearse", "--op", "dropout"))
    tune = ("-m", "benchmarks.gpu.tune", "--rehearse", "--table", "attention_fwd", "--out", str(results / "tuned"))
    yield Step("tune attention_fwd", tune)
    file = results / "layer_norm_1of2.json"
    options = ("--benchmark-only", "--quick", "--benchmark-json", str(file), "--complete")
    yield Step("bench layer_norm 1/2", _pytest("benchmarks/bench_layer_norm.py", "1/2", *options))
    yield Step("page", ("-m", "benchmarks.harness.results", str(results), "--to", str(results / "README.md")))


class Run:
    """The steps' results so far, in one file; those of other code or of another device do not count."""

    def __init__(self, results: Path, device: str, code: str, *, again: bool = False) -> None:
        self.results, self.path = results, results / "run.json"
        self.state: dict[str, Any] = {"device": device, "sources": code, "commit": commit(), "steps": {}}
        if self.path.exists() and not again:
            before = json.loads(self.path.read_text())
            changed = [what for what in ("device", "sources") if before.get(what) != self.state[what]]
            if changed:
                print(f"the results so far are of other {' and '.join(changed)}: all steps run again")
            else:
                self.state["steps"] = before["steps"]

    def status(self, step: Step) -> str:
        return str(self.state["steps"].get(step.name, {}).get("status", "to do"))

    def run(self, step: Step, limit: float) -> str:
        """Runs the step for at most `limit` seconds; its status, which is then on disk."""
        log = self.results / "logs" / f"{re.sub(r'[^a-z0-9]+', '_', step.name)}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        before, start = gpu_state(), time.perf_counter()
        with log.open("w") as output:
            code = _execute([sys.executable, *step.argv], output, limit)
        if code is None:
            status = "timed out" if limit >= step.limit else "cut off"
        else:
            status = {0: "passed", SKIPPED: "skipped", UNFINISHED: "unfinished"}.get(code, "failed")
        self.state["steps"][step.name] = {
            "status": status,
            "exit": code,
            "seconds": round(time.perf_counter() - start, 1),
            "limit": limit,
            "when": now(),
            "log": str(log.relative_to(self.results)),
            "gpu": {"before": before, "after": gpu_state()},
        }
        write_json(self.path, self.state)
        return status

    def tail(self, step: Step, lines: int = 3) -> list[str]:
        log = self.results / self.state["steps"][step.name]["log"]
        return [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-lines:]


def _execute(command: list[str], output: Any, limit: float) -> int | None:
    """The exit status, or None if the command and what it started were ended at the limit."""
    ours = ("TRITON_INTERPRET", "PYTEST_XDIST")  # of the process that calls, in tests
    variables = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    with subprocess.Popen(
        command, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            return process.wait(limit)
        except BaseException as error:
            for sign, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
                os.killpg(process.pid, sign)
                try:
                    process.wait(patience)
                    break
                except subprocess.TimeoutExpired:
                    continue
            if isinstance(error, subprocess.TimeoutExpired):
                return None
            raise


def execute(run: Run, steps: Sequence[Step], budget: float = float("inf")) -> int:
    """Runs what is not done, in order, until the budget of seconds is over; prints a line a step."""
    end = time.perf_counter() + budget
    for i, step in enumerate(steps):
        label = f"[{i + 1}/{len(steps)}] {step.name}"
        if run.status(step) in DONE:
            print(f"{label}: {run.status(step)} before", flush=True)
            continue
        left = end - time.perf_counter()
        if left < min(LEAST, step.limit):
            print(f"{label}: not begun, {max(left, 0.0):.0f} s of the budget left", flush=True)
            break
        status = run.run(step, min(step.limit, left))
        print(f"{label}: {status} after {run.state['steps'][step.name]['seconds']} s", flush=True)
        if status != "passed":
            print(*(f"    {line}" for line in run.tail(step)), sep="\n", flush=True)
    found = [run.status(step) for step in steps]
    print(", ".join(f"{found.count(status)} {status}" for status in sorted(set(found))), f"- {run.path}")
    if any(status in ("failed", "timed out") for status in found):
        return 1
    return 0 if all(status in DONE for status in found) else UNFINISHED


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", nargs="+", default=[""], metavar="PREFIX", help='such as tests or "bench model"')
    parser.add_argument("--list", action="store_true", help="the steps and how they stand")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds for this call")
    parser.add_argument("--again", action="store_true", help="forget the results so far")
    parser.add_argument("--cpu-rehearsal", action="store_true", help="every kind of step in miniature, without a GPU")
    parser.add_argument("--out", type=Path, help="results folder")
    chosen = parser.parse_args(arguments)
    rehearsal = chosen.cpu_rehearsal
    if not rehearsal and not chosen.list and not torch.cuda.is_available():
        parser.error("no GPU; --cpu-rehearsal runs the steps in miniature without one")
    gpu = torch.cuda.is_available() and not rehearsal
    device = torch.cuda.get_device_name() if gpu else "cpu rehearsal"
    folder = re.sub(r"[^a-z0-9]+", "_", device.lower())
    results = (chosen.out or (ROOT / "benchmarks" / "results" / folder if gpu else ROOT / "out" / folder)).resolve()
    steps = list(rehearsal_steps(results) if rehearsal else gpu_steps(results))
    steps = [step for step in steps if any(step.name.startswith(prefix) for prefix in chosen.steps)]
    if not steps:
        parser.error(f"no step begins with {' or '.join(map(repr, chosen.steps))}")
    run = Run(results, device, sources(), again=chosen.again)
    if chosen.list:
        for step in steps:
            print(f"{run.status(step):<10} {step.name:<34} python {' '.join(step.argv)}")
        return 0
    print(json.dumps(environment(torch.device("cuda" if gpu else "cpu"), torch.bfloat16), indent=1))
    print(f"commit {run.state['commit']}, sources {run.state['sources']}; logs in {results / 'logs'}", flush=True)
    return execute(run, steps, chosen.budget)


if __name__ == "__main__":
    sys.exit(main())
