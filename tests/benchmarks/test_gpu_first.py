"""The first minutes on a GPU: the plan, what is checked, compiled beforehand, and timed under torch.compile."""

import json
import math
import runpy
import selectors
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiling import ROOT, needs_triton, python

from benchmarks.gpu import compiled, correct, first, headline
from benchmarks.gpu.journal import Journal
from benchmarks.gpu.plan import PARTS, SECONDS, Plan
from benchmarks.gpu.runner import Step, StepRunner
from benchmarks.harness.draw import Draw, Runner
from benchmarks.harness.providers import OPS
from benchmarks.harness.workloads import Workload, workloads
from fastvit import ops
from fastvit.ops.runtime import backend as backends

CPU = torch.device("cpu")


def test_nothing_is_imported_that_a_bare_machine_lacks():
    missing = "rich", "networkx", "matplotlib", "pytest", "pytest_benchmark"
    modules = ["__main__", "probe", "correct", "headline", "compiled", "sanitize"]
    modules += ["precompile"] * backends.HAVE_TRITON
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({missing!r}));"
        f"import {', '.join(f'benchmarks.gpu.{name}' for name in modules)}"
    )
    assert python("-c", f"{code}; print('imported')") == "imported\n"


def test_the_first_minutes_are_complete():
    wanted = workloads("verify")
    attention = [w.sizes for w in wanted if w.op == "attention"]
    assert {s["N"] for s in attention} >= {197, 257, 1025, 4097}
    assert {s["d"] for s in attention} >= {32, 64, 72, 80, 96, 128}
    assert {w.op for w in wanted} == {op for op in OPS if op != "accelerate" and not op.startswith("memory")}
    assert {correct.group(w) for w in wanted} == set(correct.groups(False))
    rows = headline.rows(False)
    assert [*dict.fromkeys(w.op for w in rows)] == [op for some in headline.PARTS.values() for op in some]
    assert {(w.sizes["name"], w.sizes["B"]) for w in rows if w.op == "model"} == {
        (name, B) for name in ("vit_small_patch16_224", "vit_base_patch16_224") for B in (1, 32, 256)
    }


@pytest.mark.parametrize("case", correct.cases(True), ids=lambda case: case.id)
def test_what_is_right_passes(case):
    ratios, reason = correct.check(case, torch.float32, CPU)
    assert not reason
    assert 0 < max(ratios) < 2


class Wrong:
    """A LayerNorm that leaves its last row out, is inaccurate, or does not repeat itself."""

    def __init__(self, how: str) -> None:
        self.how, self.calls = how, 0

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out = ops.layer_norm(x, weight, bias)
        if self.how == "unwritten":
            return torch.where(torch.arange(x.shape[1])[:, None] == x.shape[1] - 1, torch.empty_like(out), out)
        if self.how == "inaccurate":
            return out * 1.001
        return out * (1 + 2e-7 * (self.calls // 2 % 2))  # forward and inference are two calls of one run


@pytest.mark.parametrize(
    ("how", "reason"),
    [("unwritten", "inaccurate"), ("inaccurate", "inaccurate"), ("unsteady", "another result the second time")],
)
def test_what_is_wrong_fails(how, reason, monkeypatch):
    (case,) = workloads("quick", ops=("layer_norm",))
    plain, wrong = Workload.runner, Wrong(how)

    def runner(self: Workload, provider: str, draw: Draw, *, check: bool = False) -> Runner:
        made = plain(self, provider, draw, check=check)
        if provider == "fastvit":
            made.forward = lambda: wrong(*made.inputs, *made.parameters)
        return made

    monkeypatch.setattr(Workload, "runner", runner)
    ratios, said = correct.check(case, torch.float32, CPU)
    assert reason in said
    assert math.isinf(max(ratios)) == (how == "unwritten")
    if how != "unsteady":  # five runs a draw; four draws, or one where what is missing cannot be bad luck
        assert wrong.calls == {"unwritten": 5, "inaccurate": 20}[how]


def test_memory_is_poisoned():
    torch.use_deterministic_algorithms(False)
    torch.ones(4321)  # what fresh memory would be, if it were left as it is
    with correct.poisoned():
        assert torch.empty(4321).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A clock that only the test advances."""
    clock = types.SimpleNamespace(now=1000.0)
    monkeypatch.setattr(compiled, "time", types.SimpleNamespace(time=lambda: clock.now))
    return clock


@pytest.mark.parametrize(("seconds", "modes"), [(95.0, ["training", "inference"]), (80.0, [])])
def test_no_compilation_begins_that_would_run_into_the_timing(seconds, modes, tmp_path, clock, monkeypatch):
    took = iter([40.0, 20.0])

    def warm(*_: Any) -> Callable[[], None]:
        clock.now += next(took)
        return lambda: None

    monkeypatch.setattr(compiled, "warm", warm)
    journal = Journal(tmp_path, "a GPU", code="code")
    chosen = types.SimpleNamespace(model=compiled.MODELS[0], provider="fastvit", rehearse=False, until=1000.0 + seconds)
    found = compiled.compile_all(journal, chosen, CPU)
    assert [about["mode"] for _, about in found.values()] == modes
    cut = [r for r in journal.records() if r["status"] == "cut"]
    assert len(cut) == 4 - len(modes)
    needed = "40 s may be needed, and 35" if modes else "90 s may be needed, and 80"
    assert {r["reason"] for r in cut} == {f"not begun: {needed} s were left"}


def test_it_is_imported_where_there_is_no_fcntl(monkeypatch):
    """Windows has no fcntl, and runs the other tests of this module."""
    monkeypatch.setitem(sys.modules, "fcntl", None)
    runpy.run_path(compiled.__file__, run_name="a copy")


def test_a_process_that_dies_gives_its_turn_away(tmp_path):
    take = (
        "import pathlib, sys, time; from benchmarks.gpu.compiled import take_turn\n"
        "file = take_turn(pathlib.Path(sys.argv[1])); print('mine', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", take, str(tmp_path / "turn")]
    pair = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) for _ in "12"]
    ready = [selectors.DefaultSelector() for _ in pair]
    for selector, one in zip(ready, pair, strict=True):
        assert one.stdout is not None
        selector.register(one.stdout, selectors.EVENT_READ)
    try:
        while not (holders := [i for i in (0, 1) if ready[i].select(0.1)]):
            pass
        (holder,) = holders
        assert not ready[1 - holder].select(2.0), "one at a time"
        pair[holder].kill()
        assert ready[1 - holder].select(20.0), "a dead process holds nothing"
    finally:
        for one in pair:
            one.kill()
            one.communicate()


def test_what_still_compiles_when_the_timing_begins_is_ended(tmp_path, monkeypatch):
    """One of two processes is ready; it is timed after the other has been ended."""
    code = (
        "import pathlib, sys, time; go = pathlib.Path(sys.argv[3])\n"  # after NAME --go
        "if sys.argv[1] == 'sdpa':\n"
        "    go.with_name('sdpa m is ready').touch()\n"
        "    while not go.exists(): time.sleep(0.02)\n"
        "else: time.sleep(60)"
    )

    steps = {("m", name): Step(f"torch.compile {name} m", ("-c", code, name)) for name in ("sdpa", "fastvit")}
    monkeypatch.setattr(compiled, "results", lambda model, provider, rehearse: {f"{provider} result": {}})
    journal = Journal(tmp_path, "a GPU", code="code")
    runner = StepRunner(journal)
    with first.CompiledModels(runner, 2.0, steps, True) as models:
        models.measure(60.0)
    ended = [(r["name"], r["status"]) for r in journal.records() if r["kind"] == "step"]
    assert ended == [("torch.compile fastvit m", "cut"), ("torch.compile sdpa m", "passed")]
    (cut,) = [r for r in journal.records() if r["kind"] == "compiled"]
    assert (cut["name"], cut["status"]) == ("fastvit result", "cut")
    assert "still compiling" in cut["reason"]


def test_the_plan_leaves_out_what_is_done():
    plan = Plan(SECONDS, {*PARTS})
    assert plan.left(0.0) == SECONDS
    assert plan.begin("checks", 100.0) == PARTS["checks"]
    assert plan.left(120.0) == (PARTS["checks"] - PARTS["kernels"] - 20) + SECONDS - PARTS["checks"]
    assert plan.left(SECONDS - 9) == 9.0, "the deadline is kept"
    again = Plan(SECONDS, {"rows", "more"})
    again.begin("tuning", 0.0)
    assert again.left(0.0) == SECONDS - PARTS["tuning"]
    assert Plan(100.0, {*PARTS}).begin("rows", 0.0) == pytest.approx(100.0 * PARTS["rows"] / SECONDS)


@needs_triton
@pytest.mark.nightly
def test_what_is_compiled_beforehand_is_in_order_and_complete():
    found = json.loads(python("tests/helpers/first_minutes.py").splitlines()[-1])
    assert found["first"] == "rows"
    assert found["dtypes"] == ["bf16", "fp16", "fp32"]
    assert found["asked by rows"] == found["measured"], "tuning measures what the rows ask for, all of it, and no more"
    assert found["not compiled"] == 0, "with any choice that tuning may make"
