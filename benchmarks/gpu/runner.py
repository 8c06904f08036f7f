"""Run the commands of a run on a GPU, each a process of its own with a limit, and record how they ended.

The output of a command goes into a file of the folder log; its lines that begin with "> " are also printed.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from benchmarks.gpu.journal import DONE, Journal
from benchmarks.harness.provenance import ROOT

SKIPPED = 77  # exit status of a command whose tool the machine does not have
_OURS = ("TRITON_INTERPRET", "PYTEST_XDIST")  # variables of a test process that commands must not inherit
_HOME = os.environ.get("TRITON_HOME", os.path.expanduser("~"))
VARIABLES = {
    # one cache for all: inductor would give a process of torch.compile another, without the kernels compiled before
    "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR", os.path.join(_HOME, ".triton", "cache")),
}
STRICT = {"FASTVIT_STRICT": "1"}  # a fallback raises, so that none is timed; tests set it themselves


@dataclass(frozen=True)
class Command:
    """A process of its own.

    Attributes:
        name: its kind, and what it is about. Commands of a kind that follow each other may run at the same time.
        words: arguments of the Python interpreter.
        limit: seconds after which it is ended.
        results: names of what it has to find.
        prepares: kinds of commands that need what it leaves on this machine. While one of them is to do, it runs again.
    """

    name: str
    words: tuple[str, ...]
    limit: float = 3600.0
    results: tuple[str, ...] = field(default=(), repr=False)
    prepares: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        return self.name.split()[0]

    @property
    def at_once(self) -> int:
        """How many commands of its kind run at a time. Nothing else runs while something is timed."""
        cores = os.cpu_count() or 1
        return {"check": max(2, min(6, cores // 2)), "tests": max(1, min(14, cores - 2))}.get(self.kind, 1)


class Runner:
    """Runs commands and records their status in the journal.

    Args:
        seconds: length of the run, after which every command is ended.
    """

    def __init__(self, journal: Journal, seconds: float = math.inf) -> None:
        self.journal, self.seconds = journal, seconds
        self._start = time.monotonic()
        self._lock = threading.Lock()
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._ended: set[str] = set()  # names of the commands that a person has stopped
        self._logs = journal.folder / "log"
        self._logs.mkdir(exist_ok=True)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._start

    def say(self, text: str) -> None:
        minutes, seconds = divmod(int(self.elapsed), 60)
        with self._lock:
            print(f"[{minutes}:{seconds:02d}] {text}", flush=True)

    def run(self, commands: Sequence[Command], at_once: int = 1) -> dict[str, str]:
        """Run the commands, so many at a time, and wait for them. Return the status of each by name. Those that are
        done already do not run, unless they prepare others."""
        with ThreadPoolExecutor(at_once) as pool:
            futures = {command.name: pool.submit(self._run, command) for command in commands}
            try:
                return {name: future.result() for name, future in futures.items()}
            except BaseException:
                for future in futures.values():
                    future.cancel()
                self.end()
                raise

    def end(self) -> None:
        """End all commands that run."""
        with self._lock:
            self._ended |= self._running.keys()
            for process in self._running.values():
                _kill(process)

    def _run(self, command: Command) -> str:
        if (before := self.journal.status(command.name)) in DONE and not command.prepares:
            self.say(f"{command.name}: done before")
            return before
        limit = min(command.limit, self.seconds - self.elapsed)
        if limit < 1:
            self._record(command, "cut", time.time(), ["no time was left"])
            return "cut"
        start, timed_out = time.time(), False
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)} | VARIABLES
        if command.kind != "tests":
            environment |= STRICT
        log = self._logs / f"{command.name.replace('/', '_')}.txt"
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, *command.words], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        with self._lock:
            self._running[command.name] = process
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            _kill(process)  # and what it has started and not ended
            code = process.wait()
            with self._lock:
                del self._running[command.name]
        lines = [line.rstrip() for line in log.read_text(errors="replace").splitlines()]
        for line in lines:
            if line.startswith("> "):
                self.say(f"{command.name}: {line[2:]}")
        last = [_without_folders(line) for line in lines if line and not line.startswith("> ")][-3:]
        status = {0: "passed", SKIPPED: "skipped"}.get(code, "failed")
        status = "timed out" if timed_out else "cut" if command.name in self._ended else status
        self._record(command, status, start, [*last, *[f"exit status {code}"] * (status == "failed")])
        return status

    def _record(self, command: Command, status: str, start: float, last: list[str]) -> None:
        """Record how a command ended. start: seconds since 1970."""
        end = time.time()
        self.journal.add("step", command.name, status, ran=[start, end], seconds=round(end - start, 1), last=last)
        reasons = [f"\n    {line[:300]}" for line in last] if status != "passed" else []
        self.say(f"{command.name}: {status} after {end - start:.1f} s{''.join(reasons)}")


def _without_folders(line: str) -> str:
    """Return a line for the journal, which is committed: a path in it starts at the project or at the package."""
    for folder in (sysconfig.get_path("purelib"), ROOT):  # the packages may lie in the project
        line = line.replace(f"{folder}/", "")
    return line


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a command with all that it has started, its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
