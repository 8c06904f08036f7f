"""Say while the benchmarks run which case runs, and what came of it: a line for each, instead of pytest's dots."""

from __future__ import annotations

import sys
from collections.abc import Generator
from typing import Any

import pytest

from benchmarks.harness import table
from benchmarks.harness.columns import terminal_width, wrapped
from benchmarks.harness.conditions import Conditions
from benchmarks.harness.measure import Session

_RESULT = " fwd+bwd   0.0123 ms  ~1.00x compile"


class Progress:
    """A plugin of pytest. A line begins with its case, so that it names what runs, and ends with the result."""

    def __init__(self, config: pytest.Config, session: Session) -> None:
        self.reporter = config.pluginmanager.getplugin("terminalreporter")
        self.reporter.showfspath = False  # pytest's line of the file
        self.config, self.session = config, session
        self.cases = self.begun = 0
        self.over = self.interrupted = False
        self._line = ""

    def _say(self, text: str) -> None:
        self.reporter.write_line("\n".join(wrapped([text], terminal_width())))
        self.reporter.flush()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.cases = len(session.items)
        if not self.cases:
            self._say("no case is selected; --collect-only -q lists all: -k '[block-' selects blocks")
        room = max(terminal_width() - len(self._count() + _RESULT), 20)
        self._width = max((len(_name(item, room)) for item in session.items), default=room)

    def _count(self) -> str:
        return f"[{self.begun:{len(str(self.cases))}}/{self.cases}] "

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        if "ceilings" not in vars(self.session) and not item.get_closest_marker("skip"):
            self._say("measuring the machine's limits")
            _ = self.session.ceilings
            self._say("fastvit's time, and fastest other / fastvit, above 1 where fastvit is faster:")
        self.begun += 1
        mode = table.MODE[item.callspec.params["mode"]]  # type: ignore[attr-defined]
        self._line = f"{self._count()}{_name(item, self._width):{self._width}} {mode:7} "
        if not self.reporter.showlongtestinfo and self.config.option.capture != "no":
            self._begin()  # with -v pytest names the case; with -s what it prints would break the line

    def _begin(self) -> None:
        self.reporter.ensure_newline()
        self.reporter.write(self._line, flush=True)
        self.reporter.currentfspath = self._line  # for pytest: a line has begun

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self, report: Any) -> Generator[None, Any, Any]:
        """End the line, and leave nothing for pytest to write but its summary."""
        category, letter, word = yield
        if self.over or not letter or not self.begun:  # with pytest-xdist none begins here
            return category, letter, word
        if category == "passed":
            text = table.in_a_line(self.session.records[-1])
        else:
            text = word if isinstance(word, str) else word[0]
            if report.skipped:
                text += f": {report.longrepr[2].removeprefix('Skipped: ')}"
        if self.reporter.currentfspath != self._line:
            self._begin()
        colour = {"passed": "green", "skipped": "yellow"}.get(category, "red")
        self.reporter.write(f"{text}\n", flush=True, **{colour: True})
        self.reporter.currentfspath = None
        return category, "", ""

    @pytest.hookimpl(tryfirst=True)
    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self.interrupted = excinfo.errisinstance(KeyboardInterrupt)
        # an interrupted instruction may have no line, and pytest computes with it
        excinfo.traceback = excinfo.traceback.filter(lambda entry: bool(entry.get_python_framesummary().lineno))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.over = True
        if self.session.records:
            self._say("measuring the machine's limits again")
            try:
                _ = self.session.conditions
            except KeyboardInterrupt:
                self.interrupted = True
                vars(self.session)["conditions"] = Conditions(self.session.ceilings, self.session.ceilings)
        if self.interrupted:
            session.exitstatus = 130

    def pytest_unconfigure(self, config: pytest.Config) -> None:
        if self.interrupted:
            files = [str(file) for file in (config.option.benchmark_json, config.option.results) if file]
            saved = f"saved in {' and '.join(files)}" if files and self.session.records else "nothing was written"
            print(f"interrupted after {len(self.session.records)} of {self.cases} cases; {saved}", file=sys.stderr)


def _name(item: Any, width: int) -> str:
    """Return op and sizes of a case; without room for all, without the first sizes, but with the name of a model."""
    workload = item.callspec.params["workload"]
    name = f"{workload.op} {workload}"
    head, *sizes = (str(workload) if workload.op == "model" and len(name) > width else name).split()
    name = " ".join([head, *sizes])
    while len(name) > width and sizes:
        name = " ".join([head, "..", *(sizes := sizes[1:])])
    return name
