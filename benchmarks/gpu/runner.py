"""Run the commands of a run on a GPU, each a process of its own with a limit, and record how they ended.

The output of a command goes into a file of the folder log.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from benchmarks.gpu.results_file import DONE, ResultsFile
from benchmarks.harness.provenance import ROOT

SKIPPED = 77  # exit status of a command whose tool the machine does not have
_OURS = ("TRITON_INTERPRET", "PYTEST_XDIST")  # variables of a test process that commands must not inherit
_HOME = os.environ.get("TRITON_HOME", os.path.expanduser("~"))
VARIABLES = {
    # one cache for all: inductor would give a process of torch.compile another, without the kernels compiled before
    "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR", os.path.join(_HOME, ".triton", "cache")),
    "COLUMNS": "120",  # of tables in a log
}
STRICT = {"FASTVIT_STRICT": "1"}  # a fallback raises, so that none is timed; tests set it themselves


@dataclass(frozen=True)
class Command:
    """A process of its own.

    Attributes:
        name: its kind, and what it is about. Commands of a kind that follow each other may run at the same time.
        words: arguments of the Python interpreter.
        limit: seconds after which it is ended.
        always: run it although it has passed, because later commands need what it leaves on this machine.
    """

    name: str
    words: tuple[str, ...]
    limit: float = 3600.0
    always: bool = False

    @property
    def kind(self) -> str:
        return self.name.split()[0]

    @property
    def at_once(self) -> int:
        """How many commands of its kind run at a time. Nothing else runs while something is timed."""
        cores = os.cpu_count() or 1
        return {"check": max(2, min(6, cores // 2)), "tests": max(1, min(14, cores - 2))}.get(self.kind, 1)


class Runner:
    """Runs commands and records their status in results.jsonl.

    Args:
        seconds: length of the run, after which every command is ended.
    """

    def __init__(self, results: ResultsFile, seconds: float = math.inf) -> None:
        self.results, self.seconds = results, seconds
        self._start = time.monotonic()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False
        self._logs = results.folder / "log"
        self._logs.mkdir(exist_ok=True)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._start

    def say(self, text: str) -> None:
        minutes, seconds = divmod(int(self.elapsed), 60)
        print(f"[{minutes}:{seconds:02d}] {text}\n", end="", flush=True)  # one string: lines of threads do not mix

    def run(self, commands: Sequence[Command]) -> dict[str, str]:
        """Run the commands, kind by kind, and wait for them. Return the status of each by name. Those that are done
        already do not run again."""
        statuses: dict[str, str] = {}
        for _, group in itertools.groupby(commands, key=lambda command: command.kind):
            same = list(group)
            with ThreadPoolExecutor(same[0].at_once) as pool:
                futures = {command.name: pool.submit(self._run, command) for command in same}
                try:
                    statuses |= {name: future.result() for name, future in futures.items()}
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    self._stopped = True
                    for process in [*self._running]:
                        _kill(process)
                    raise
        return statuses

    def _run(self, command: Command) -> str:
        before = self.results.status("step", command.name)
        if before in DONE and not command.always:
            self.say(f"{command.name}: done before")
            return before
        start, limit = time.time(), min(command.limit, self.seconds - self.elapsed)
        if limit < 1 or self._stopped:
            return self._record(command, "cut", start, ["no time was left"])
        self.say(f"{command.name} ...")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)} | VARIABLES
        if command.kind != "tests":
            environment |= STRICT
        log = self._logs / f"{command.name.replace('/', '_')}.txt"
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, *command.words], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self._running.add(process)
        try:
            code = process.wait(limit)
            status = {0: "passed", SKIPPED: "skipped"}.get(code, f"failed, exit status {code}")
        except subprocess.TimeoutExpired:
            status = "timed out"
        finally:
            _kill(process)  # and what it has started and not ended
            process.wait()
            self._running.remove(process)
        lines = [_without_folders(line.rstrip()) for line in log.read_text(errors="replace").splitlines()]
        return self._record(command, "cut" if self._stopped else status, start, [line for line in lines if line])

    def _record(self, command: Command, status: str, start: float, lines: list[str]) -> str:
        """Record how a command ended, and its last lines. start: seconds since 1970."""
        seconds, last = round(time.time() - start, 1), lines[-1 if status in DONE else -3 :]
        self.results.add("step", command.name, status, seconds=seconds, last=last)
        self.say("\n    ".join([f"{command.name}: {status} after {seconds} s", *(line[:300] for line in last)]))
        return status


def _without_folders(line: str) -> str:
    """Return a line for results.jsonl, which is committed: a path in it starts at the project or at the package."""
    for folder in (sysconfig.get_path("purelib"), ROOT):  # the packages may lie in the project
        line = line.replace(f"{folder}/", "")
    return line


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a command with all that it has started, its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
