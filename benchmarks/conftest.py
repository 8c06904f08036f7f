"""Options, the `measure` fixture that every benchmark is one call of, and the table at the end.

pytest benchmarks --benchmark-only                      CPU path in minutes, or the full grid on a GPU
pytest benchmarks --benchmark-only --quick              one tiny case per op, under a minute
pytest benchmarks --benchmark-only --providers eager,sdpa,compile,fused --dtype bfloat16
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

os.environ["FASTVIT_STRICT"] = "1"  # a fallback raises, so that none is ever timed

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.harness import table
from benchmarks.harness.measure import Measure, Session
from benchmarks.harness.measure import measure as measure_one
from benchmarks.harness.providers import PROVIDERS
from benchmarks.harness.record import environment
from benchmarks.harness.timing import Clock
from benchmarks.harness.workloads import workloads

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SESSION = pytest.StashKey[Session]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fastvit")
    group.addoption("--quick", action="store_true", help="one tiny case per op")
    group.addoption("--dtype", choices=sorted(DTYPES), help="float32 on a CPU, bfloat16 on a GPU, unless given")
    group.addoption("--providers", type=_providers, help=f"of {','.join(PROVIDERS)}; default all, on a CPU no compile")
    group.addoption("--bench-seconds", type=float, help="timed seconds for each case and step")
    group.addoption("--bench-minutes", type=float, help="after this no further case begins; default 5, on a GPU 120")


def _providers(text: str) -> tuple[str, ...]:
    unknown = set(text.split(",")) - set(PROVIDERS)
    if unknown:
        raise pytest.UsageError(f"--providers: unknown {sorted(unknown)}, allowed are {PROVIDERS}")
    return tuple(name for name in PROVIDERS if name in text.split(","))


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise pytest.UsageError("TRITON_INTERPRET=1: Triton's interpreter is for tests; its time means nothing")
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    quick = config.option.quick
    dtype = DTYPES[config.option.dtype or ("bfloat16" if gpu else "float32")]
    minutes = config.option.bench_minutes or (120.0 if gpu else 5.0)
    config.stash[SESSION] = Session(
        device=device,
        dtype=dtype,
        grid="quick" if quick else "gpu" if gpu else "cpu",
        providers=config.option.providers or (PROVIDERS if gpu else ("eager", "sdpa", "fused")),
        case_seconds=config.option.bench_seconds or (0.2 if quick else 1.5),
        deadline=time.perf_counter() + minutes * 60,
        clock=Clock(device),
    )
    if config.option.benchmark_columns is None:
        config.option.benchmark_columns = ["median", "iqr", "min", "rounds"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The workloads of a bench module's OPS; each runs forward only, and forward + backward."""
    if "workload" in metafunc.fixturenames:
        chosen = workloads(metafunc.config.stash[SESSION].grid, ops=metafunc.module.OPS)
        metafunc.parametrize("workload", chosen, ids=[workload.id for workload in chosen])
    if "mode" in metafunc.fixturenames:
        metafunc.parametrize("mode", table.MODE)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.benchmark(timer=config.stash[SESSION].clock))


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[SESSION].remaining = len(session.items)


def pytest_runtest_setup(item: pytest.Item) -> None:
    session = item.config.stash[SESSION]
    if time.perf_counter() > session.deadline:
        session.left_out += 1
        pytest.skip("the time of --bench-minutes is over")


@pytest.fixture
def measure(benchmark: BenchmarkFixture, request: pytest.FixtureRequest) -> Iterator[Measure]:
    session = request.config.stash[SESSION]
    yield lambda workload, mode: measure_one(benchmark, session, workload, mode)
    session.remaining -= 1


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, object]) -> None:
    machine_info.pop("node", None)  # the name of the machine is nobody's business


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    session = config.stash[SESSION]
    if not session.records:
        return
    write = terminalreporter.write_line
    terminalreporter.section("fused against PyTorch")
    where = table.header(environment(session.device, session.dtype), session.ceilings)
    write("\n".join([*where, "", table.LEGEND]))
    for op, lines in table.render(session.records, session.ceilings):
        terminalreporter.section(op, sep="-")
        write("\n".join(lines))
    if session.left_out:
        write(f"left out: {session.left_out} benchmarks, because the time of --bench-minutes was over")
