"""Run the steps of a run on a GPU, each a process of its own with a time limit, and record how they ended.

All output goes into log.txt, each line after the name of its step; lines that begin with "> " are also printed.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from benchmarks.gpu.journal import Journal
from benchmarks.harness.provenance import ROOT

SKIPPED = 77  # exit status of a step whose tool the machine does not have
CUT = 75  # exit status of a step that had no time to finish
_OURS = ("TRITON_INTERPRET", "PYTEST_XDIST")  # variables of a test process that steps must not inherit


@dataclass(frozen=True)
class Step:
    """A process of its own.

    Attributes:
        arguments: of the Python interpreter.
        limit: seconds after which it is ended.
        variables: of the environment, in addition to this process's.
    """

    name: str
    arguments: tuple[str, ...]
    limit: float = 3600.0
    variables: Mapping[str, str] = field(default_factory=dict)


class StepRunner:
    """Runs steps and records their status in the journal. `ended` has the names of those that have ended.

    Args:
        seconds: length of the run, after which every step is ended.
        left: says how long the rest will take; printed with every step that ends.
    """

    def __init__(
        self, journal: Journal, seconds: float = math.inf, left: Callable[[StepRunner], str] = lambda runner: ""
    ) -> None:
        self.journal, self.seconds, self._left = journal, seconds, left
        self.ended: set[str] = set()
        self._start = time.monotonic()
        self._lock = threading.Lock()
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._cut: set[str] = set()
        self._log = (journal.folder / "log.txt").open("a")

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._start

    def say(self, text: str) -> None:
        minutes, seconds = divmod(int(self.elapsed), 60)
        with self._lock:
            print(f"[{minutes}:{seconds:02d}] {text}", flush=True)

    def run(
        self, steps: Iterable[Step], *, workers: int = 1, until: float = math.inf, again: bool = False
    ) -> dict[str, str]:
        """Run the steps and wait for them. Returns the status of each by name. Steps that are done already do not run,
        unless `again`. until: seconds after the start of the run at which they are ended."""
        with ThreadPoolExecutor(workers) as pool:
            futures = {step.name: pool.submit(self._run, step, until, again) for step in steps}
            try:
                return {name: future.result() for name, future in futures.items()}
            except BaseException:
                for future in futures.values():
                    future.cancel()
                self.end()
                raise

    def begin(self, steps: Sequence[Step]) -> dict[str, Future[str]]:
        """Start the steps, all at once, and return while they run."""
        pool = ThreadPoolExecutor(max(len(steps), 1))
        futures = {step.name: pool.submit(self._run, step, math.inf, False) for step in steps}
        pool.shutdown(wait=False)
        return futures

    def cut(self, names: Iterable[str]) -> None:
        """End these steps now, if they run."""
        with self._lock:
            for name in self._running.keys() & set(names):
                self._cut.add(name)
                _release(self._running[name])

    def end(self) -> None:
        """End all steps that run."""
        self.cut([*self._running])

    def _run(self, step: Step, until: float, again: bool) -> str:
        if not again and self.journal.done("step", step.name):
            self.ended.add(step.name)
            self.say(f"{step.name}: done before")
            return "passed"
        limit = min(step.limit, until - self.elapsed, self.seconds - self.elapsed)
        if limit < 1:
            self._ended(step, "cut", time.time(), ["no time was left"])
            return "cut"
        start, last, timed_out = time.time(), deque[str](maxlen=3), threading.Event()
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
        environment |= step.variables
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.process_group", *step.arguments], cwd=ROOT, env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        with self._lock:
            self._running[step.name] = process

        def end() -> None:
            timed_out.set()
            _release(process)

        timer = threading.Timer(limit, end)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                self._read(step, line.rstrip(), last)
            code = process.wait()
        finally:
            timer.cancel()
            _release(process)
            with self._lock:
                del self._running[step.name]
        status = {0: "passed", SKIPPED: "skipped", CUT: "cut"}.get(code, "failed")
        status = "timed out" if timed_out.is_set() else "cut" if step.name in self._cut else status
        self._ended(step, status, start, [*last, *[f"exit status {code}"] * (status == "failed")])
        return status

    def _read(self, step: Step, line: str, last: deque[str]) -> None:
        with self._lock:
            print(f"[{step.name}] {line}", file=self._log, flush=True)
        if line.startswith("> "):
            self.say(f"{step.name}: {line[2:]}")
        elif line:
            last.append(_without_folders(line))

    def _ended(self, step: Step, status: str, start: float, last: list[str]) -> None:
        """Record the end of a step. start: seconds since 1970."""
        seconds = time.time() - start
        self.journal.add("step", step.name, status, ran=[start, start + seconds], seconds=round(seconds, 1), last=last)
        self.ended.add(step.name)
        left = f"; {words}" if (words := self._left(self)) else ""
        reasons = [f"\n    {line[:300]}" for line in last] if status != "passed" else []
        self.say(f"{step.name}: {status} after {seconds:.1f} s{left}{''.join(reasons)}")


def _without_folders(line: str) -> str:
    """Return a line for the journal, which is committed: a path in it starts at the project or at the package."""
    for folder in (sysconfig.get_path("purelib"), ROOT):  # the packages may lie in the project
        line = line.replace(f"{folder}/", "")
    return line


def duration(seconds: float) -> str:
    """Return a length of time in one unit, rounded: "40 seconds", "6 minutes", "3.5 hours"."""
    if seconds < 100:
        return f"{max(10 * round(seconds / 10), 10)} seconds"
    if seconds < 6000:
        return f"{round(seconds / 60)} minutes"
    return f"{seconds / 3600:.1f} hours".replace(".0 ", " ")


def _release(process: subprocess.Popen[str]) -> None:
    """Close the input of process_group.py, which then ends the step with all that it has started."""
    assert process.stdin is not None
    process.stdin.close()
