"""The first minutes of a run: is all of it right, and how fast is it?

The parts and their deadlines are those of plan.py. A part that reaches its deadline is ended, and keeps what it has
found. Every result goes at once into results.jsonl and table.md, so that an interrupted run is still useful.
"""

from __future__ import annotations

import os
import tempfile
import time
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu import compiled, correct, headline
from benchmarks.gpu.journal import DONE, REHEARSAL, Journal
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.runner import Step, StepRunner
from fastvit._output import write_file
from fastvit.kernels import _tuned

CHECKING, COMPILING = 8e9, 6e9  # bytes of GPU memory that a process of checks, of torch.compile may need
_HOME = os.environ.get("TRITON_HOME", os.path.expanduser("~"))
VARIABLES = {
    "FASTVIT_STRICT": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "4",
    # one cache for all: inductor would give a process of torch.compile another, without the kernels compiled before
    "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR", os.path.join(_HOME, ".triton", "cache")),
}


class FirstMinutes:
    """The steps of the first minutes, for a run that keeps its results in the journal's folder."""

    def __init__(self, journal: Journal, rehearse: bool) -> None:
        self.journal, self.rehearse = journal, rehearse
        self._shared = ("--out", str(journal.folder), *["--rehearse"] * rehearse)
        self.machine, self.kernels = self._step("environment", "probe"), self._step("compile", "precompile")
        sanitize = ("--rehearse", "--op", "dropout") if rehearse else ("--tool", "memcheck", "--op", "attention")
        checks = [self._step(f"correct {name}", "correct", "--group", name) for name in correct.groups(rehearse)]
        self.checks = [_step("sanitize", "sanitize", *sanitize), *checks]
        self.models = {
            (model, provider): self._step(
                f"torch.compile {provider} {model}", "compiled", "--model", model, "--provider", provider
            )
            for model, provider in compiled.runs(rehearse)
        }
        self.tuning = _step("tune", "tune", "--headline", *(self._shared if rehearse else ()))
        self.rows = {part: self._step(f"rows, {part} part", "headline", "--part", part) for part in headline.PARTS}

    def _step(self, name: str, module: str, *arguments: str) -> Step:
        return _step(name, module, *self._shared, *arguments)

    @property
    def steps(self) -> list[Step]:
        """Every step, in the order of the plan."""
        return [self.machine, self.kernels, *self.checks, *self.models.values(), self.tuning, *self.rows.values()]

    def expected(self) -> dict[str, list[str]]:
        """Return by kind the names of all results that a complete run has."""
        dtypes = correct.dtypes(self.rehearse)
        checks = [correct.name_of(case, dtype) for case in correct.cases(self.rehearse) for dtype in dtypes]
        rows = [name for part in self.rows for *_, name in headline.named(self.rehearse, part)]
        models = [name for run in self.models for name in compiled.results(*run, self.rehearse)]
        return {"correct": checks, "row": rows, "compiled": models}

    def todo(self) -> set[str]:
        """Return the parts of the plan that have something to do."""
        done = {r["name"] for r in self.journal.records() if r["status"] in DONE}
        parts = {
            "checks": not done.issuperset(step.name for step in self.checks),
            "models": not done.issuperset(self.expected()["compiled"]),
            "tuning": self.tuning.name not in done,
            "rows": not done.issuperset(name for *_, name in headline.named(self.rehearse, "first")),
            "more": not done.issuperset(name for *_, name in headline.named(self.rehearse, "second")),
        }
        found = {part for part, something in parts.items() if something}
        return found | {"machine", "kernels"} if found else found

    def complete(self) -> bool:
        """Whether every step and every result is there and right."""
        records = {(r["kind"], r["name"]): r["status"] for r in self.journal.records()}
        wanted = [(kind, name) for kind, names in self.expected().items() for name in names]
        wanted += [("step", step.name) for step in self.steps]
        found = [status for (kind, _), status in records.items() if kind in ("environment", "compile")]
        return all(status in DONE for status in (*found, *(records.get(name) for name in wanted)))

    def run(self, runner: StepRunner, plan: Plan) -> None:
        """Run what is left of all parts, in the order of the plan."""

        def begin(part: str) -> float:
            return plan.begin(part, runner.elapsed)

        if plan.todo:
            runner.run([self.machine], until=begin("machine"), again=True)
            runner.run([self.kernels], until=begin("kernels"), again=True)
        with CompiledModels(runner, begin("checks"), self.models, self.rehearse) as models:
            runner.run(self.checks, workers=self._workers(), until=begin("checks"))
            models.measure(begin("models"))
        runner.run([self.tuning], until=begin("tuning"))
        keep_tuned(self.journal)
        for part, ends in zip(self.rows, ("rows", "more"), strict=True):
            self._run_rows(runner, part, begin(ends))

    def _workers(self) -> int:
        """Return how many checks run at a time: as many as memory and cores allow, and one for the sanitizer."""
        machine = self.journal.get("environment", "machine") or {}
        memory = machine.get("memory_bytes", 0) - COMPILING * len(compiled.runs(False))
        return 1 + max(2, min(6, int(memory / CHECKING), (os.cpu_count() or 1) // 2))

    def _run_rows(self, runner: StepRunner, part: str, until: float) -> None:
        """Start the step again without the row that ended the process, as long as there is progress."""
        since = time.time()
        wall = since + min(until, runner.seconds) - runner.elapsed
        step = self.rows[part]
        step = replace(step, arguments=(*step.arguments, "--since", str(since), "--until", str(wall)))
        while left := headline.left(self.journal, self.rehearse, part, since):
            runner.run([step], until=until)
            if headline.left(self.journal, self.rehearse, part, since) == left:
                return


def keep_tuned(journal: Journal) -> None:
    """Copy the measured launch choices into the results folder, so that it has all that is to be kept."""
    tuned = _tuned.FOLDER / _tuned.file_name(journal.device)
    if journal.device != REHEARSAL and tuned.exists():
        write_file(journal.folder / tuned.name, tuned.read_bytes())


def _step(name: str, module: str, *arguments: str) -> Step:
    return Step(name, ("-m", f"benchmarks.gpu.{module}", *arguments), variables=VARIABLES)


class CompiledModels:
    """The processes of torch.compile. They compile within the context, until so many seconds after the start of the
    run, and are timed by `measure`, when nothing else runs.

    steps: by model and provider.
    """

    def __init__(self, runner: StepRunner, until: float, steps: dict[tuple[str, str], Step], rehearse: bool) -> None:
        self.runner, self.until, self.rehearse = runner, until, rehearse
        self.steps = steps
        self.futures: dict[tuple[str, str], Future[str]] = {}

    def __enter__(self) -> CompiledModels:
        self.scratch = tempfile.TemporaryDirectory()
        self.go = Path(self.scratch.name) / "go"
        wall = str(time.time() + self.until - self.runner.elapsed)
        waiting = [
            replace(step, arguments=(*step.arguments, "--go", str(self.go), "--until", wall))
            for step in self.steps.values()
        ]
        self.futures = dict(zip(self.steps, self.runner.begin(waiting).values(), strict=True))
        return self

    def measure(self, until: float) -> None:
        """Wait until all have compiled, end those that have not in time, and have the others timed."""
        while (late := self._compiling()) and self.runner.elapsed < self.until:
            time.sleep(0.05)
        self._cut(late)
        journal = self.runner.journal
        for run in late:
            for result, about in compiled.results(*run, self.rehearse).items():
                if not journal.done("compiled", result):
                    reason = "its process was ended: it was still compiling when the timing was to begin"
                    journal.add("compiled", result, "cut", reason=reason, **about)
        self.go.touch()
        wait(self.futures.values(), max(until - self.runner.elapsed, 0.0))
        self._cut([*self.steps])

    def _cut(self, runs: list[tuple[str, str]]) -> None:
        self.runner.cut(self.steps[run].name for run in runs)
        wait(self.futures[run] for run in runs)

    def _compiling(self) -> list[tuple[str, str]]:
        return [
            run
            for run, future in self.futures.items()
            if not future.done() and not compiled.ready(self.go, *run).exists()
        ]

    def __exit__(self, *_: object) -> None:
        self._cut([*self.steps])
        self.scratch.cleanup()
