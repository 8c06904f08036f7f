"""The first minutes of a GPU: what is timed, in which order and when, what tuning before that covers, the verdict."""

import itertools
import json
import os
import runpy
import selectors
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import compiled, first, headline, verdict
from benchmarks.gpu.journal import Journal, Record
from benchmarks.gpu.plan import PARTS, SECONDS, Plan
from benchmarks.gpu.runner import Runner, Step
from benchmarks.harness.provenance import ROOT
from benchmarks.harness.timing import Clock
from benchmarks.harness.workloads import workloads
from fastvit.kernels import _configs, _tuned
from fastvit.ops.runtime import dispatch

CPU = torch.device("cpu")
needs_triton = pytest.mark.skipif(not dispatch.HAVE_TRITON, reason="triton is not installed")


def process(*arguments: str) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def record(kind: str, name: str, status: str = "passed", **found: Any) -> Record:
    return {"kind": kind, "name": name, "status": status, **found}


def time_of(seconds: float) -> dict[str, float]:
    return {"median": seconds}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A time that only stands still."""
    clock = types.SimpleNamespace(now=1000.0)
    monkeypatch.setattr(compiled, "time", types.SimpleNamespace(time=lambda: clock.now))
    return clock


@pytest.mark.parametrize(("seconds", "modes"), [(95.0, ["training", "inference"]), (80.0, [])])
def test_no_compilation_begins_that_would_run_into_the_timing(
    seconds: float, modes: list[str], tmp_path: Path, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    took = iter([40.0, 20.0])

    def warm(*_: Any) -> Callable[[], None]:
        clock.now += next(took)
        return lambda: None

    monkeypatch.setattr(compiled, "warm", warm)
    journal = Journal(tmp_path, "a GPU", code="code")
    chosen = types.SimpleNamespace(model=compiled.MODELS[0], provider="fused", rehearse=False, until=1000.0 + seconds)
    found = compiled.compile_all(journal, chosen, CPU)
    assert [about["mode"] for _, about in found.values()] == modes
    cut = [r for r in journal.records() if r["status"] == "cut"]
    assert len(cut) == 4 - len(modes)
    needed = "40 s may be needed, and 35" if modes else "90 s may be needed, and 80"
    assert {r["reason"] for r in cut} == {f"not begun: {needed} s were left"}


def test_it_is_imported_where_there_is_no_fcntl(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Windows, where the tests of all else of it run."""
    monkeypatch.setitem(sys.modules, "fcntl", None)
    runpy.run_path(compiled.__file__, run_name="a copy")


def test_a_process_that_dies_gives_its_turn_away(tmp_path: Path) -> None:
    take = (
        "import pathlib, sys, time; from benchmarks.gpu.compiled import take_turn\n"
        "file = take_turn(pathlib.Path(sys.argv[1])); print('mine', flush=True); time.sleep(60)"
    )
    first_process, second_process = (process("-c", take, str(tmp_path / "turn")) for _ in "12")
    ready = [selectors.DefaultSelector() for _ in "12"]
    for selector, one in zip(ready, (first_process, second_process), strict=True):
        assert one.stdout is not None
        selector.register(one.stdout, selectors.EVENT_READ)
    try:
        while not (holders := [i for i in (0, 1) if ready[i].select(0.1)]):
            pass
        (holder,) = holders
        other = 1 - holder
        assert not ready[other].select(2.0), "one at a time"
        (first_process, second_process)[holder].kill()
        assert ready[other].select(20.0), "the dead hold nothing"
    finally:
        for one in (first_process, second_process):
            one.kill()
            one.communicate()


def test_what_still_compiles_when_the_timing_begins_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two processes is ready, and is timed after the other has been ended."""
    code = (
        "import pathlib, sys, time; go = pathlib.Path(sys.argv[1])\n"
        "if sys.argv[2] == 'sdpa':\n"
        "    go.with_name('sdpa m is ready').touch()\n"
        "    while not go.exists(): time.sleep(0.02)\n"
        "else: time.sleep(60)"
    )

    def step(name: str, arguments: tuple[str, ...]) -> Step:
        named = dict(itertools.pairwise(arguments))
        return Step(name, ("-c", code, named["--go"], named["--provider"]))

    monkeypatch.setattr(first, "Step", step)
    monkeypatch.setattr(compiled, "runs", lambda rehearse: [("m", "sdpa"), ("m", "fused")])
    monkeypatch.setattr(compiled, "results", lambda model, provider, rehearse: {f"{provider} result": {}})
    journal = Journal(tmp_path, "a GPU", code="code")
    runner = Runner(journal)
    with first._Models(runner, 2.0, True, ()) as models:
        models.measure(60.0)
    assert runner.elapsed < 40
    steps = {r["name"]: r for r in journal.records() if r["kind"] == "step"}
    assert {name: r["status"] for name, r in steps.items()} == {
        "torch.compile sdpa m": "passed", "torch.compile fused m": "cut",
    }  # fmt: skip
    assert steps["torch.compile fused m"]["at"] < steps["torch.compile sdpa m"]["at"]
    (cut,) = [r for r in journal.records() if r["kind"] == "compiled"]
    assert (cut["name"], cut["status"]) == ("fused result", "cut")
    assert "still compiling" in cut["reason"]


def test_the_plan_leaves_out_what_is_done() -> None:
    plan = Plan(SECONDS, {*PARTS})
    assert plan.left(0.0) == SECONDS
    assert plan.begin("checks", 100.0) == PARTS["checks"]
    assert plan.left(120.0) == (PARTS["checks"] - PARTS["kernels"] - 20) + SECONDS - PARTS["checks"]
    assert plan.left(SECONDS - 9) == 9.0, "the deadline is kept"
    again = Plan(SECONDS, {"rows", "more"})
    again.begin("tuning", 0.0)
    assert again.left(0.0) == SECONDS - PARTS["tuning"]
    assert Plan(100.0, {*PARTS}).begin("rows", 0.0) == pytest.approx(100.0 * PARTS["rows"] / SECONDS)


def test_providers_take_turns_in_random_order(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def step(name: str) -> Callable[[], tuple[torch.Tensor, ...]]:
        def work() -> tuple[torch.Tensor, ...]:
            order.append(name)
            return (torch.ones(1),)

        return work

    row = headline.Row(workloads("quick", ops=("layer_norm",))[0], "inference", Clock(CPU), 0.001)
    row.figures = {name: {} for name in "abc"}
    monkeypatch.setattr(headline, "CALLED_ROUNDS", 8)
    row.seconds = 1e-9  # one call a loop
    row._time_calls({name: step(name) for name in "abc"})
    rounds = [tuple(order[i : i + 3]) for i in range(len(order) - 24, len(order), 3)]
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    assert len(set(rounds)) > 1
    row.seconds = 0.001
    order.clear()
    monkeypatch.setattr(headline, "warm", lambda work, clock: 1e-4)
    row._time({name: step(name) for name in "abc"})
    rounds = [tuple(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    assert len(set(rounds)) > 1
    assert row.figures["a"]["graph"]["rounds"] == 3, "0.001 s for rounds of three times 0.1 ms"


def test_a_row_gets_its_share_of_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headline, "time", types.SimpleNamespace(time=lambda: 1000.0))
    assert headline.seconds_for(32, 1000.0 + 32 * headline.SHARE) == 1.0
    assert headline.seconds_for(1, 2000.0) == headline.MOST
    assert headline.seconds_for(3, 900.0) == headline.LEAST, "too late, but a row that is begun has rounds"


def test_a_row_says_which_measured_choices_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    key = (_tuned.bucket(788), 1536, 384, 2, 0)

    def use() -> bool:
        return _configs.use_triton_gemm(788, 1536, 384, 2, False, "sm_90")

    assert use(), "looked up before, and kept"
    monkeypatch.setattr(_tuned, "choice", lambda arch, table, *of: (0,) if of == key else None)
    names: set[str] = set()
    with headline._taken(names):
        assert not use()
        _configs.gemm(788, 1536, 384, 2, "sm_90")
    assert names == {"use_triton_gemm[10,1536,384,2,0]"}
    _tuned.clear_caches()


@needs_triton
@pytest.mark.slow
def test_what_is_compiled_beforehand_is_in_order_and_complete() -> None:
    out, _ = process("tests/helpers/first_minutes.py").communicate()
    found = json.loads(out.splitlines()[-1])
    assert found["first"] == "rows"
    assert found["dtypes"] == ["bf16", "fp16", "fp32"]
    assert found["asked by rows"] == found["measured"], "tuning measures what the rows ask for, all of it, and no more"
    assert found["not compiled"] == 0, "with any choice that tuning may make"


def test_the_verdict_has_what_is_wrong_first_and_compares_what_was_timed() -> None:
    def row(name: str, op: str, mode: str, **times: float) -> Record:
        return record("row", name, op=op, mode=mode, providers={k: {"graph": time_of(v)} for k, v in times.items()})

    def model(provider: str, seconds: float) -> Record:
        about = {"model": "m", "style": "default", "mode": "inference", "provider": provider}
        return record("compiled", f"m {provider}", graph=time_of(seconds), **about)

    records = [
        record("plan", "results", expected={"row": ["a", "b", "c", "d", "e"], "correct": ["mlp x"]}),
        row("a", "attention", "inference", eager=5.0, flash=3.0, cudnn=1.5, fused=2.0),
        row("b", "attention", "inference", eager=5.0, flash=4.0, cudnn=5.0, fused=2.0),
        row("c", "block", "training", eager=1.0, fused=2.0),
        record("row", "d", "failed", op="block", mode="inference", reason="OutOfMemoryError", wrong=False),
        record("correct", "mlp x", "failed", case="mlp x", dtype="bf16", ratios=[9.0, 1.0], reason="inaccurate"),
        record("step", "sanitize", "skipped", last=["SKIPPED: no compute-sanitizer"]),
        model("sdpa", 3.0),
        model("fused", 2.0),
    ]
    said = verdict.lines(records)
    assert said[:5] == [
        "7 results: 1 wrong, 1 failed, 1 missing",
        "WRONG: mlp x: inaccurate 9.00, 1.00",
        "FAILED: d: OutOfMemoryError",
        "MISSING: e",
        "sanitize: skipped SKIPPED: no compute-sanitizer",
    ]
    table = {" ".join(line.split()) for line in said[5:]}
    assert "attention, forward 1.75 (1.50 to 2.00) 1.38 (0.75 to 2.00) 2" in table
    assert "block, both passes - 0.50 1" in table
    assert "fused modules, forward 1.50 1" in table
    assert max(map(len, said)) <= 80
