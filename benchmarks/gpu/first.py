"""The first nine minutes on a GPU: is all of it right, and how fast is it?

    make gpu-first                                     # or python -m benchmarks.gpu.first
    python -m benchmarks.gpu.first --out FOLDER
    python -m benchmarks.gpu.first --unpack FOLDER     # what another machine's run has brought back: go on with it here
    python -m benchmarks.gpu.first --rehearse          # every step in miniature, on a CPU

One deadline is kept, by the plan of plan.py: what reaches its limit is cut, and what it has found by then stays. All
that is found goes at once into results.jsonl in the results folder, and into table.md; log.txt has what the steps
printed, and tuned_<gpu>.json the launch choices measured. These files are what has to come back. A second call goes on
with what is missing. Exit status: 0 if all is done and right, 1 if not, 2 if the run could not begin.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from concurrent.futures import Future, wait
from pathlib import Path

import torch

from benchmarks.gpu import compiled, correct, headline, needs, summary, verdict
from benchmarks.gpu.journal import DONE, REHEARSAL, Journal, read, results_folder
from benchmarks.gpu.plan import SECONDS, Plan
from benchmarks.gpu.runner import Runner, Step, duration
from benchmarks.harness.provenance import write_text
from fastvit._output import not_writable, write_file
from fastvit.kernels import _tuned

CHECKING, COMPILING = 8e9, 6e9  # bytes of the GPU's memory that a process of checks, of torch.compile may need
_HOME = os.environ.get("TRITON_HOME", os.path.expanduser("~"))
VARIABLES = {
    "FASTVIT_STRICT": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "4",
    # one cache for all: inductor would give a process of torch.compile another, where no kernel is compiled beforehand
    "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR", os.path.join(_HOME, ".triton", "cache")),
}


def run(folder: Path, rehearse: bool, seconds: float = SECONDS) -> int:
    """All steps, in the order of the plan, and the verdict; the exit status."""
    journal = summary.journal(folder, torch.device("cpu" if rehearse else "cuda"))
    journal.add("plan", "results", "passed", expected=_expected(rehearse))
    shared = ("--out", str(folder), *["--rehearse"] * rehearse)

    def step(name: str, module: str, *arguments: str) -> Step:
        return Step(name, ("-m", f"benchmarks.gpu.{module}", *shared, *arguments))

    machine, kernels = step("environment", "probe"), step("compile", "precompile")
    checks = [_sanitizer(rehearse), *(step(f"correct {name}", "correct", "--group", name)
                                      for name in correct.groups(rehearse))]  # fmt: skip
    tuning = Step("tune", ("-m", "benchmarks.gpu.tune", "--headline", *(shared if rehearse else ())))
    rows = [step(f"rows, {part} part", "headline", "--part", part) for part in headline.PARTS]
    todo = _todo(journal, checks, tuning, rehearse)
    plan = Plan(seconds, todo, rehearse)

    def left(runner: Runner) -> str:
        return "" if rows[-1].name in runner.ended else f"about {duration(plan.left(runner.elapsed))} left"

    runner = Runner(journal, seconds, VARIABLES, left)
    runner.say(f"{journal.device}, sources {journal.code}, results in {folder}")
    begins = f"about {duration(plan.left(0.0))}, at most {duration(seconds)}" if todo else "all is done"
    runner.say(begins)

    def begin(part: str) -> float:
        return plan.begin(part, runner.elapsed)

    try:
        if todo:
            runner.run([machine], until=begin("machine"), again=True)
            runner.run([kernels], until=begin("kernels"), again=True)
        with _Models(runner, begin("checks"), rehearse, shared) as models:
            runner.run(checks, workers=_workers(runner), until=begin("checks"))
            models.measure(begin("models"))
        runner.run([tuning], until=begin("tuning"))
        _keep_tuned(journal, folder)
        for one, part in zip(rows, ("rows", "more"), strict=True):
            _rows(runner, one, begin(part))
    finally:
        runner.end()
        records = journal.records()
        write_text(folder / "table.md", summary.markdown(records))  # whatever several processes last wrote there
    print(*summary.short(records), "", *verdict.lines(records), sep="\n")
    print(f"see {folder / 'table.md'}", flush=True)
    return int(bool(_rows_left(journal)) or any(r["status"] not in DONE for r in records))


def _expected(rehearse: bool) -> dict[str, list[str]]:
    """By kind, the names of all results that a complete run has."""
    checks = [correct.name_of(case, dtype) for case in correct.cases(rehearse) for dtype in correct.dtypes(rehearse)]
    rows = [name for part in headline.PARTS for *_, name in headline.named(rehearse, part)]
    models = [name for run in compiled.runs(rehearse) for name in compiled.results(*run, rehearse)]
    return {"correct": checks, "row": rows, "compiled": models}


def _todo(journal: Journal, checks: list[Step], tuning: Step, rehearse: bool) -> set[str]:
    """The parts of the plan that have something to do."""
    done = {r["name"] for r in journal.records() if r["status"] in DONE}
    expected = _expected(rehearse)
    parts = {
        "checks": not done.issuperset(step.name for step in checks),
        "models": not done.issuperset(expected["compiled"]),
        "tuning": tuning.name not in done,
        "rows": not done.issuperset(name for *_, name in headline.named(rehearse, "first")),
        "more": not done.issuperset(name for *_, name in headline.named(rehearse, "second")),
    }
    found = {part for part, something in parts.items() if something}
    return found | {"machine", "kernels"} if found else found


def _workers(runner: Runner) -> int:
    """Return how many checks run at a time: as many as memory and cores allow, and one for the sanitizer."""
    machine = runner.journal.get("environment", "machine") or {}
    memory = machine.get("memory_bytes", 0) - COMPILING * len(compiled.runs(False))
    return 1 + max(2, min(6, int(memory / CHECKING), (os.cpu_count() or 1) // 2))


def _sanitizer(rehearse: bool) -> Step:
    arguments = ("--rehearse", "--op", "dropout") if rehearse else ("--tool", "memcheck", "--op", "attention")
    return Step("sanitize", ("-m", "benchmarks.gpu.sanitize", *arguments))


class _Models:
    """The processes of torch.compile: they compile within the context, until so many seconds after the start of the
    run, and are timed by `measure`, when nothing else runs."""

    def __init__(self, runner: Runner, until: float, rehearse: bool, shared: tuple[str, ...]) -> None:
        self.runner, self.until, self.rehearse, self.shared = runner, until, rehearse, shared
        self.names = {f"torch.compile {provider} {model}": (model, provider)
                      for model, provider in compiled.runs(rehearse)}  # fmt: skip
        self.futures: dict[str, Future[str]] = {}

    def __enter__(self) -> _Models:
        self.scratch = tempfile.TemporaryDirectory()
        self.go = Path(self.scratch.name) / "go"
        wall = str(time.time() + self.until - self.runner.elapsed)
        steps = [
            Step(name, ("-m", "benchmarks.gpu.compiled", *self.shared, "--model", model, "--provider", provider,
                        "--go", str(self.go), "--until", wall))
            for name, (model, provider) in self.names.items()
        ]  # fmt: skip
        self.futures = self.runner.begin(steps)
        return self

    def measure(self, until: float) -> None:
        """Wait until all have compiled, end those that have not in time, and have the others timed."""
        while (late := self._compiling()) and self.runner.elapsed < self.until:
            time.sleep(0.05)
        self.runner.cut(late)
        wait([self.futures[name] for name in late])
        journal = self.runner.journal
        for name in late:
            for result, about in compiled.results(*self.names[name], self.rehearse).items():
                if not journal.done("compiled", result):
                    reason = "its process was ended: it was still compiling when the timing was to begin"
                    journal.add("compiled", result, "cut", reason=reason, **about)
        self.go.touch()
        wait(self.futures.values(), max(until - self.runner.elapsed, 0.0))
        self.runner.cut(self.names)
        wait(self.futures.values())

    def _compiling(self) -> list[str]:
        return [
            name for name, future in self.futures.items()
            if not future.done() and not compiled.ready(self.go, *self.names[name]).exists()
        ]  # fmt: skip

    def __exit__(self, *_: object) -> None:
        self.runner.cut(self.names)
        wait(self.futures.values())
        self.scratch.cleanup()


def _keep_tuned(journal: Journal, folder: Path) -> None:
    """A copy of the measured launch choices, so that one folder has all that is to come back."""
    tuned = _tuned.FOLDER / _tuned.file_name(journal.device)
    if journal.device != REHEARSAL and tuned.exists():
        write_file(folder / tuned.name, tuned.read_bytes())


def _rows(runner: Runner, step: Step, until: float) -> None:
    """Again without the row that ended the process, as long as there is progress."""
    since = time.time()
    part = step.arguments[-1]
    rehearse = runner.journal.device == REHEARSAL
    wall = since + min(until, runner.seconds) - runner.elapsed
    while left := headline.left(runner.journal, rehearse, part, since):
        arguments = (*step.arguments, "--since", str(since), "--until", str(wall))
        runner.run([Step(step.name, arguments)], until=until)
        if headline.left(runner.journal, rehearse, part, since) == left:
            return


def _rows_left(journal: Journal) -> list[str]:
    rehearse = journal.device == REHEARSAL
    return [name for part in headline.PARTS for *_, name in headline.left(journal, rehearse, part, time.time())]


def unpack(bundle: Path, folder: Path | None) -> Path:
    """Put the files of a run's folder where a run goes on with them, and its launch choices also where kernels look
    for them; return the folder."""
    found = read(bundle / "results.jsonl")
    if not found:
        raise SystemExit(f"{bundle}: no results.jsonl with a result in it")
    folder = folder or results_folder(found[-1]["device"]) / "first"
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(bundle.iterdir()):
        if path.is_file():
            write_file(folder / path.name, path.read_bytes())
            if path.name.startswith("tuned_"):
                write_file(_tuned.FOLDER / path.name, path.read_bytes())
    return folder


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="results folder; default benchmarks/results/<gpu>/first")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="the deadline; default %(default)s")
    parser.add_argument("--unpack", type=Path, metavar="FOLDER", help="take over the results in this folder, and end")
    parser.add_argument("--rehearse", action="store_true", help="every step in miniature, on a CPU")
    chosen = parser.parse_args(arguments)
    if chosen.unpack is not None:
        print(f"the results are in {unpack(chosen.unpack, chosen.out)}")
        return 0
    if reason := needs.complaint("gpu-first", ("triton",), rehearse=chosen.rehearse):
        print(reason, file=sys.stderr)
        return 2
    device = REHEARSAL if chosen.rehearse else torch.cuda.get_device_name()
    folder = (chosen.out or results_folder(device) / "first").resolve()
    if reason := not_writable(folder):
        print(f"{reason}; --out chooses another folder", file=sys.stderr)
        return 2
    try:
        return run(folder, chosen.rehearse, chosen.seconds)
    except KeyboardInterrupt:
        print(f"stopped; what was found is in {folder}, and the next call goes on with the rest", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
