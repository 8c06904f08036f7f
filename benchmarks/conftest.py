"""Options, the order and the time of a run, the `measure` fixture that every benchmark is one call of, and the table at
the end.

pytest benchmarks --benchmark-only                      CPU path in 5 minutes, or the full grid on a GPU
pytest benchmarks --benchmark-only --quick              one tiny case per op, in about 100 s of one core
pytest benchmarks --benchmark-only --long               CPU path, large cases too
pytest benchmarks --benchmark-only --providers eager,sdpa,compile,graph,fastvit --dtype bfloat16
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Generator, Iterator
from dataclasses import asdict
from typing import Any

os.environ["FASTVIT_STRICT"] = "1"  # a fallback raises, so that none is ever timed

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.harness import conditions, table
from benchmarks.harness.clock import Clock
from benchmarks.harness.measure import Measure, Session
from benchmarks.harness.measure import measure as measure_one
from benchmarks.harness.providers import PROVIDERS
from benchmarks.harness.record import Record, environment
from benchmarks.harness.schedule import Case, OutOfTime, Schedule, command, counted, selection, turns
from benchmarks.harness.sdpa_backend import BY_NAME
from benchmarks.harness.workloads import INSTALLED, Workload, workloads
from fastvit.cli.options import words_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
END_SECONDS = 5.0  # for measuring the limits again at the end
MINUTES = {"quick": 5.0, "cpu": 5.0, "long": 30.0, "gpu": 110.0}  # a step of `make gpu` ends at 120
NO_TIME = "no time left for it"
SESSION = pytest.StashKey[Session]()
CASE = pytest.StashKey[Case]()  # of an item


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fastvit")
    group.addoption("--quick", action="store_true", help="one tiny case per op")
    group.addoption("--long", action="store_true", help="on a CPU, large cases too")
    group.addoption("--dtype", choices=sorted(DTYPES), help="float32 on a CPU, bfloat16 on a GPU, unless given")
    group.addoption(
        "--providers",
        type=words_of(PROVIDERS),
        help=f"of {','.join(PROVIDERS)}; default all but the kernels of SDPA by name, on a CPU what is not compiled",
    )
    group.addoption("--bench-seconds", type=float, help="timed seconds for each case and step")
    group.addoption("--bench-minutes", type=float, help="for all; default 5, with --long 30, on a GPU 110")


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise pytest.UsageError("TRITON_INTERPRET=1: Triton's interpreter is for tests; its time means nothing")
    options = config.option
    gpu = torch.cuda.is_available()
    if options.quick and options.long:
        raise pytest.UsageError("--quick and --long exclude each other")
    if gpu and options.long:
        raise pytest.UsageError("--long is for a CPU; on a GPU the grid has everything")
    device = torch.device("cuda" if gpu else "cpu")
    grid = ("quick",) if options.quick else ("gpu",) if gpu else ("cpu", "long") if options.long else ("cpu",)
    seconds = (options.bench_minutes or MINUTES[grid[-1]]) * 60
    case_seconds = options.bench_seconds or {"quick": 0.2, "cpu": 1.0}.get(grid[-1], 1.5)
    default = [name for name in PROVIDERS if name not in BY_NAME] if gpu else ("eager", "sdpa", "fastvit")
    config.stash[SESSION] = Session(
        device=device,
        dtype=DTYPES[options.dtype or ("bfloat16" if gpu else "float32")],
        grid=grid,
        providers=tuple(name for name in PROVIDERS if name in (options.providers or default)),
        clock=Clock(device),
        schedule=Schedule(time.perf_counter() + seconds - END_SECONDS, case_seconds),
    )
    asked = ("columns", "compare", "histogram", "cprofile")
    if not any(getattr(options, f"benchmark_{name}") for name in asked):
        options.benchmark_quiet = True  # the plugin's table: fastvit alone, in more columns than fit
    options.benchmark_columns = options.benchmark_columns or ["median", "iqr", "min", "rounds"]


def pytest_sessionstart(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter.showfspath = False  # every case has a line of progress


@pytest.hookimpl(wrapper=True)
def pytest_report_header(config: pytest.Config) -> Generator[None, list[str], list[str]]:
    """Leave out the defaults of pytest-benchmark: none is used here."""
    lines = yield
    return [line for line in lines if not str(line).startswith("benchmark: ")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise a bench module with the workloads of its OPS, in its MODES, or forward only and forward +
    backward."""
    if "workload" in metafunc.fixturenames:
        chosen = workloads(*metafunc.config.stash[SESSION].grid, ops=metafunc.module.OPS)
        metafunc.parametrize("workload", chosen, ids=[workload.id for workload in chosen])
        metafunc.parametrize("mode", getattr(metafunc.module, "MODES", tuple(table.MODE)))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    session = config.stash[SESSION]
    for item in items:
        parameters: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
        if "workload" in parameters:
            item.stash[CASE] = parameters["workload"], parameters["mode"]
            item.add_marker(pytest.mark.benchmark(timer=session.clock))
    turn = turns(workloads(*session.grid))
    items.sort(key=lambda item: turn[item.stash[CASE][0].id] if CASE in item.stash else (-1, 0))


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[SESSION].schedule.total = sum(CASE in item.stash for item in session.items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Leave out a case for which there is no time; print a line of progress for every other."""
    if CASE not in item.stash:
        return (yield)
    session, (workload, mode) = item.config.stash[SESSION], item.stash[CASE]
    schedule, write = session.schedule, item.config.get_terminal_writer()
    work = session.work(workload, mode)
    if not schedule.admits((workload, mode), work):
        item.add_marker(pytest.mark.skip(NO_TIME))
        return (yield)
    name = f"{workload.op} {workload}, {table.MODE[mode]}"
    write.write(f"{schedule.done + 1:>3} of {schedule.total}  {name:<64}", flush=True)
    begun, before = time.perf_counter(), len(session.records)
    result = yield
    seconds = time.perf_counter() - begun
    minutes, rest = divmod(int(schedule.left()), 60)
    outcome = ""
    if len(session.records) == before:
        outcome = " left out" if schedule.left_out and schedule.left_out[-1][0] == (workload, mode) else " failed"
    if outcome != " left out":
        schedule.finish(workload.op, work, seconds)
    write.line(f"{seconds:6.1f} s {minutes:>4}:{rest:02} left{outcome}")
    return result


@pytest.hookimpl(wrapper=True)
def pytest_report_teststatus(report: pytest.TestReport) -> Generator[None, Any, tuple[str, str, str]]:
    """Print no letters between the lines of progress. Cases left out are listed at the end, by op."""
    category, *_ = yield
    return "left out" if category == "skipped" and NO_TIME in str(report.longrepr) else category, "", ""


@pytest.fixture
def measure(benchmark: BenchmarkFixture, request: pytest.FixtureRequest) -> Measure:
    session = request.config.stash[SESSION]

    def run(workload: Workload, mode: str) -> Record:
        try:
            return measure_one(benchmark, session, workload, mode)
        except OutOfTime:
            session.schedule.left_out.append(((workload, mode), session.work(workload, mode)))
            pytest.skip(NO_TIME)

    return run


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
        ceilings = session.conditions.best
        where = table.header(environment(session.device, session.dtype), ceilings)
        where += conditions.lines(session.conditions, session.records, ceilings)
        if left_out := len(session.schedule.left_out):
            where.append(f"NOT ALL: {left_out} of {session.schedule.total} benchmarks were left out: no time was left")
        write("\n".join([*where, "", table.LEGEND]))
        for title, lines in table.render(session.records, ceilings, shutil.get_terminal_size().columns):
            terminalreporter.section(title, sep="-")
            write("\n".join(lines))
    if lines := [*_not_measured(config)]:
        terminalreporter.section("not measured", sep="-")
        write("\n".join(lines))


def _not_measured(config: pytest.Config) -> Iterator[str]:
    """List the cases that were left out, and the command that runs them."""
    session, options = config.stash[SESSION], config.option
    given = {
        "dtype": options.dtype,
        "providers": ",".join(options.providers or ()),
        "bench-seconds": options.bench_seconds,
    }
    chosen = [f"--{name} {value}" for name, value in given.items() if value]
    left_out = [case for case, _ in session.schedule.left_out]
    ran = dict.fromkeys(record.op for record in session.records)
    if not INSTALLED:
        yield "accelerate: none of timm, torchvision and transformers is installed"
    if left_out:
        grid = [f"--{name}" for name in ("quick", "long") if getattr(options, name)]
        minutes = f"--bench-minutes {session.schedule.minutes()}"
        yield f"left out, no time was left: {len(left_out)} of {session.schedule.total} benchmarks"
        yield from counted(case.op for case, _ in left_out)
        yield from command(*grid, *chosen, minutes, f'-k "{selection(left_out, ran)}"')
    if (ran or left_out) and session.grid == ("quick",):
        yield "not asked for: every case but tiny ones"
        yield from command(*chosen)
    elif session.grid == ("cpu",) and (large := workloads("long", ops=(*ran, *(case.op for case, _ in left_out)))):
        yield f"not asked for: {2 * len(large)} benchmarks of large cases; with them, in {MINUTES['long']:.0f} minutes"
        yield from counted(workload.op for workload in large for _ in table.MODE)
        yield from command("--long", *chosen)
