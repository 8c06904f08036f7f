"""A plugin for `pytest benchmarks`: keep every case in the journal when it ends, and leave out those that it has.

    pytest benchmarks --benchmark-only -p benchmarks.gpu.rows --journal FOLDER -k "[block-"

On a GPU the cases are the workloads for "headline". A case that has ended its process is begun again, after all others.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.journal import BEGUN, DONE, Journal, open_journal, words
from benchmarks.gpu.summary import row_name
from benchmarks.harness.workloads import Workload

_JOURNAL = pytest.StashKey[Journal]()
_DONE = pytest.StashKey[int]()  # how many of the selected rows are done


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--journal", type=Path, required=True, help="folder of the results")


@pytest.hookimpl(trylast=True)  # after benchmarks/conftest.py, which makes the session
def pytest_configure(config: pytest.Config) -> None:
    from benchmarks.conftest import SESSION

    session, rehearse = config.stash[SESSION], config.option.quick
    if session.device.type == "cuda" and not rehearse:
        session.grid = "headline"
    device = torch.device("cpu") if rehearse else session.device
    config.stash[_JOURNAL] = open_journal(config.option.journal, device)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, object, object]:
    """Leave out the rows that are done. What was begun and did not end comes last."""
    result = yield
    journal = config.stash[_JOURNAL]
    status = {r["name"]: r["status"] for r in journal.records() if r["kind"] == "row"}
    done = [item for item in items if status.get(_name(item)) in DONE]
    config.stash[_DONE] = len(done)
    config.hook.pytest_deselected(items=done)
    left = [item for item in items if item not in done]
    items[:] = sorted(left, key=lambda item: status.get(_name(item)) == BEGUN)
    return result


def _row(item: Any) -> tuple[Workload, str]:
    return item.callspec.params["workload"], item.callspec.params["mode"]


def _name(item: Any) -> str:
    return row_name(*_row(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: Any) -> Generator[None, object, object]:
    """Record that the row begins, and how it ends."""
    journal, name, start = item.config.stash[_JOURNAL], _name(item), time.time()
    workload, mode = _row(item)
    about: dict[str, Any] = {"op": workload.op, "mode": mode}
    journal.add("row", name, BEGUN, **about)
    try:
        result = yield
    except Exception as error:
        wrong = isinstance(error, AssertionError)  # fastvit's results, before anything was timed
        journal.add("row", name, "failed", reason=words(error), wrong=wrong, **about)
        _check_context()
        raise
    info = item.funcargs["benchmark"].extra_info
    journal.add("environment", "ceilings", "passed", **info["ceilings"])
    providers = {provider: figures(found) for provider, found in info["providers"].items()}
    journal.add("row", name, "passed", providers=providers, timed=[start, time.time()], **about)
    return result


def _check_context() -> None:
    """End the process if the error has ended the GPU's context: every later row would fail. The next call goes on."""
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            pytest.exit(words(error), returncode=1)


def figures(provider: dict[str, Any]) -> dict[str, Any]:
    """Return a provider's figures of harness/record.py as the journal has them: `graph` is the time of the GPU alone,
    by replays of a graph unless `remark` says why there is none."""
    return {"graph" if name == "time" else name: value for name, value in provider.items() if value}


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.stash.get(_DONE, 0):
        session.exitstatus = pytest.ExitCode.OK
