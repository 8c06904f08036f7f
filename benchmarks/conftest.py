"""Options, the workloads, the `measure` fixture that a benchmark is one call of, and the table at the end.

pytest benchmarks --benchmark-only                      CPU path in some ten minutes, or the full grid on a GPU
pytest benchmarks --benchmark-only --quick              one tiny case of every kind, on one core in less than a minute
pytest benchmarks --benchmark-only --providers eager,sdpa,compile,graph,fastvit --dtype bfloat16
pytest benchmarks --benchmark-only --results FOLDER     every case is kept at once, and not measured again
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Generator
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ["FASTVIT_STRICT"] = "1"  # a fallback raises, so that none is ever timed

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.gpu.results_file import DONE, MODES, ResultsFile, device_name, words
from benchmarks.harness import conditions, table
from benchmarks.harness.clock import Clock
from benchmarks.harness.columns import terminal_width, wrapped
from benchmarks.harness.measure import Measure, Replay, Session
from benchmarks.harness.measure import measure as measure_one
from benchmarks.harness.progress import Progress
from benchmarks.harness.providers import PROVIDERS
from benchmarks.harness.record import environment
from benchmarks.harness.sdpa_backend import BY_NAME
from benchmarks.harness.workloads import INSTALLED, workloads
from fastvit.cli.options import words_of
from fastvit.cli.terminal import check_folder, described

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CASE_SECONDS = {"quick": 0.02, "cpu": 0.5, "headline": 0.8, "gpu": 1.5}  # of timed rounds
SESSION = pytest.StashKey[Session]()
RESULTS = pytest.StashKey[ResultsFile]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fastvit")
    group.addoption("--quick", action="store_true", help="one tiny case of every kind, on one core")
    group.addoption("--dtype", choices=sorted(DTYPES), help="float32 on a CPU, bfloat16 on a GPU, unless given")
    group.addoption(
        "--providers",
        type=words_of(PROVIDERS),
        help=f"of {','.join(PROVIDERS)}; default all but the kernels of SDPA by name, on a CPU eager,sdpa,fastvit",
    )
    group.addoption("--bench-seconds", type=float, help="timed seconds for each case and step")
    text = "keep each case in its results.jsonl at once, without those that it has; on a GPU the headline cases"
    group.addoption("--results", type=Path, metavar="FOLDER", help=text)


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise pytest.UsageError("TRITON_INTERPRET=1: Triton's interpreter is for tests; its time means nothing")
    options = config.option
    try:
        if isinstance(options.benchmark_json, Path):  # pytest-benchmark opens it only at the end
            check_folder("--benchmark-json", options.benchmark_json)
        results = options.results and ResultsFile(options.results, device_name(rehearse=options.quick))
    except (OSError, ValueError) as error:
        raise pytest.UsageError("--results: " * isinstance(error, OSError) + described(error)) from None
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    grid = "quick" if options.quick else "cpu" if not gpu else "headline" if options.results else "gpu"
    if options.quick:
        torch.set_num_threads(1)  # CI runs it next to something else
    default = [name for name in PROVIDERS if name not in BY_NAME] if gpu else ("eager", "sdpa", "fastvit")
    config.stash[SESSION] = Session(
        device=device,
        dtype=DTYPES[options.dtype or ("bfloat16" if gpu else "float32")],
        grid=grid,
        providers=tuple(name for name in PROVIDERS if name in (options.providers or default)),
        clock=Clock(device),
        replay=Replay(),
        seconds=options.bench_seconds or CASE_SECONDS[grid],
    )
    if results:
        config.stash[RESULTS] = results
    asked = ("columns", "compare", "histogram", "cprofile")
    if not any(getattr(options, f"benchmark_{name}") for name in asked):
        options.benchmark_quiet = True  # the plugin's table: fastvit alone, in more columns than fit
    options.benchmark_columns = options.benchmark_columns or ["median", "iqr", "min", "rounds"]


def pytest_sessionstart(session: pytest.Session) -> None:
    config = session.config
    if config.pluginmanager.hasplugin("terminalreporter") and not config.option.collectonly:
        config.pluginmanager.register(Progress(config, config.stash[SESSION]))
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # after `| head`, instead of a traceback


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each workload forward alone, and forward and backward; the memory study in training only."""
    if "workload" in metafunc.fixturenames:
        chosen = workloads(metafunc.config.stash[SESSION].grid)
        cases = [
            (w, mode) for w in chosen for mode in table.MODE if mode == "training" or not w.op.startswith("memory")
        ]
        metafunc.parametrize(("workload", "mode"), cases, ids=[f"{w.id}-{mode}" for w, mode in cases])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.benchmark(timer=config.stash[SESSION].replay))
    if RESULTS in config.stash:
        status = {r["name"]: r["status"] for r in config.stash[RESULTS].records() if r["kind"] == "row"}
        for item in items:
            if status.get(_name(item)) in DONE:
                item.add_marker(pytest.mark.skip("measured before"))
        items.sort(key=lambda item: _name(item) in status)  # what has failed or ended the process comes last


def _name(item: Any) -> str:
    workload, mode = (item.callspec.params[name] for name in ("workload", "mode"))
    return f"{workload.op} {workload} {MODES[mode]}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: Any) -> Generator[None, object, object]:
    """Record that the case begins, and how it ends."""
    if RESULTS not in item.config.stash:
        return (yield)
    results, name = item.config.stash[RESULTS], _name(item)
    results.add("row", name, "begun")
    try:
        result = yield
    except Exception as error:
        results.add("row", name, "failed", reason=words(error))
        _check_context()
        raise
    results.add("row", name, "passed", **item.funcargs["benchmark"].extra_info)
    return result


def _check_context() -> None:
    """End the process if the error has ended the GPU's context: every later case would fail. The next call goes on."""
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            pytest.exit(words(error), returncode=1)


@pytest.fixture
def measure(benchmark: BenchmarkFixture, request: pytest.FixtureRequest) -> Measure:
    session = request.config.stash[SESSION]

    return functools.partial(measure_one, benchmark, session)


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, object]) -> None:
    machine_info.pop("node", None)  # the name of the machine stays private


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, object]) -> None:
    session = config.stash[SESSION]
    if session.records:
        output_json["conditions"] = asdict(session.conditions)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    session = config.stash[SESSION]
    write = terminalreporter.write_line
    if session.records:
        terminalreporter.section("fastvit against PyTorch")
        ceilings = conditions.best([session.conditions.start, session.conditions.end])
        where = table.header(environment(session.device, session.dtype), ceilings)
        where += conditions.lines(session.conditions, session.records, ceilings)
        width = terminal_width()
        write("\n".join([*wrapped(where, width, indent=8), "", *table.legend(width)]))
        for title, lines in table.render(session.records, ceilings, width):
            terminalreporter.section(title, sep="-")
            write("\n".join(lines))
    if not INSTALLED:
        write("accelerate: neither timm, torchvision nor transformers is installed")
