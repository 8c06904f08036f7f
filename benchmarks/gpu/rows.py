"""A plugin for `pytest benchmarks`: keep every case in the journal when it ends, and leave out those that it has.

    pytest benchmarks --benchmark-only -p benchmarks.gpu.rows --journal FOLDER -k "[block-"

On a GPU the cases are the workloads for "headline". Cases that have failed or ended their process come last.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.journal import DONE, MODES, Journal, device_name, words

_JOURNAL = pytest.StashKey[Journal]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--journal", type=Path, required=True, help="folder of the results")


@pytest.hookimpl(trylast=True)  # after benchmarks/conftest.py, which makes the session
def pytest_configure(config: pytest.Config) -> None:
    from benchmarks.conftest import SESSION

    session, rehearse = config.stash[SESSION], config.option.quick
    if session.device.type == "cuda" and not rehearse:
        session.grid = "headline"
    config.stash[_JOURNAL] = Journal(config.option.journal, device_name(rehearse))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    status = {r["name"]: r["status"] for r in config.stash[_JOURNAL].records() if r["kind"] == "row"}
    for item in items:
        if status.get(_name(item)) in DONE:
            item.add_marker(pytest.mark.skip("measured before"))
    items.sort(key=lambda item: _name(item) in status)


def _name(item: Any) -> str:
    workload, mode = (item.callspec.params[name] for name in ("workload", "mode"))
    return f"{workload.op} {workload} {MODES[mode]}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: Any) -> Generator[None, object, object]:
    """Record that the row begins, and how it ends."""
    journal, name = item.config.stash[_JOURNAL], _name(item)
    journal.add("row", name, "begun")
    try:
        result = yield
    except Exception as error:
        journal.add("row", name, "failed", reason=words(error))
        _check_context()
        raise
    journal.add("row", name, "passed", **item.funcargs["benchmark"].extra_info)
    return result


def _check_context() -> None:
    """End the process if the error has ended the GPU's context: every later row would fail. The next call goes on."""
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            pytest.exit(words(error), returncode=1)
