"""`make gpu-first`: rehearsed in full, killed in the middle, with a process that dies; what it compiles beforehand."""

import itertools
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import compiled, correct, first, headline, summary, verdict
from benchmarks.gpu import journal as journal_module
from benchmarks.gpu.journal import BEGUN, Journal, Record, read
from benchmarks.gpu.plan import PARTS, SECONDS, Plan
from benchmarks.gpu.runner import Runner as Steps
from benchmarks.gpu.runner import Step
from benchmarks.harness.draw import Draw, Runner
from benchmarks.harness.provenance import ROOT
from benchmarks.harness.providers import OPS
from benchmarks.harness.timing import Clock
from benchmarks.harness.workloads import Workload, workloads
from fastvit import ops
from fastvit.kernels import _configs, _tuned
from fastvit.ops import _library

CPU = torch.device("cpu")
needs_triton = pytest.mark.skipif(not _library.HAVE_TRITON, reason="triton is not installed")


def process(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | variables
    return subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def rehearse(folder: Path, **variables: str) -> subprocess.Popen[str]:
    return process("-m", "benchmarks.gpu.first", "--rehearse", "--out", str(folder), **variables)


def dying(folder: Path, module: str, word: str) -> str:
    """What PYTHONPATH has to be for a process of this module with this word among its arguments to die at its start."""
    (folder / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        f"if sys.orig_argv[1:3] == ['-m', {module!r}] and {word!r} in sys.orig_argv:\n"
        "    os.kill(os.getpid(), signal.SIGSEGV)\n"
    )
    return os.pathsep.join([str(folder), str(ROOT)])


def overlaps(records: list[Record]) -> None:
    """Check that nothing ran while something else was timed."""
    timed = {r["name"]: r["timed"] for r in records if "timed" in r}
    timed |= {r["name"]: r["ran"] for r in records if r["name"] == "tune" and "ran" in r}
    assert len(timed) >= 6 or not any(r["kind"] == "compiled" for r in records)
    busy = {f"compiling {r['name']}": r["compiling"] for r in records if "compiling" in r}
    ours = ("correct", "sanitize", "compile", "environment")
    busy |= {r["name"]: r["ran"] for r in records if "ran" in r and r["name"].startswith(ours)}
    for name, (start, end) in timed.items():
        for other, (begin, finish) in (timed | busy).items():
            assert other == name or finish <= start or end <= begin, f"{other} ran while {name} was timed"


@needs_triton
@pytest.mark.slow
def test_rehearsal_with_a_process_that_dies_killed_and_taken_up_again(tmp_path: Path) -> None:
    folder = tmp_path / "first"
    path = dying(tmp_path, "benchmarks.gpu.correct", "mlp")

    run = rehearse(folder, PYTHONPATH=path)
    while not any(r["kind"] == "row" and r["status"] == "passed" for r in read(folder / "results.jsonl")):
        assert run.poll() is None, run.communicate()[0]
        time.sleep(0.05)
    run.send_signal(signal.SIGKILL)
    run.wait()
    before = read(folder / "results.jsonl")
    time.sleep(1.0)
    assert len(read(folder / "results.jsonl")) <= len(before) + 1, "its processes have ended with it"
    steps = {r["name"]: r for r in before if r["kind"] == "step"}
    assert next(r["strict"] for r in before if r["name"] == "machine"), "what is timed is no fallback"
    assert steps["correct mlp"]["status"] == "failed"
    assert "exit status" in steps["correct mlp"]["last"][-1]
    assert {steps[name]["status"] for name in ("environment", "compile", "correct layer_norm")} == {"passed"}
    assert "| attention B1 N50 H3 d64 forward |" in (folder / "table.md").read_text()

    with (folder / "results.jsonl").open("a") as file:
        file.write('{"kind": "row", "name": "torn')
    run = rehearse(folder)
    out, _ = run.communicate()
    assert run.returncode == 0, out
    after = read(folder / "results.jsonl")
    assert after[: len(before)] == before
    overlaps(before)
    overlaps(after[len(before) :])
    again = [r["name"] for r in after[len(before) :] if r["status"] != BEGUN]
    assert "correct layer_norm" not in again
    assert "attention B1 N50 H3 d64 forward" not in again
    assert {"correct mlp", "layer_norm B1 N50 D192 forward"} <= set(again)
    assert {"tune", "torch.compile sdpa vit_cifar_small"}.isdisjoint(again), "done before"
    assert "correct layer_norm: done before" in out
    assert "seconds left" in out
    assert "mlp: 6 of 6 correct" in out
    assert "26 results: 0 wrong, 0 failed, 0 missing" in out
    table = (folder / "table.md").read_text()
    assert out.splitlines()[-1] == f"see {folder / 'table.md'}"
    shown = table.split("```")[1].strip().splitlines()
    assert out.splitlines()[-1 - len(shown) : -1] == shown, "the verdict is first in the table and last in print"
    assert "measure nothing" in shown[1]
    assert "| model vit_cifar_small B1 px32 depth2 fused, default, forward |" in table
    assert "did not end" not in table
    names = ["log.txt", "results.jsonl", "table.md", "tuned_interpreter.json"]
    assert sorted(path.name for path in folder.iterdir()) == names


@needs_triton
def test_the_deadline_is_kept(tmp_path: Path) -> None:
    run = process("-m", "benchmarks.gpu.first", "--rehearse", "--out", str(tmp_path), "--seconds", "2")
    start = time.monotonic()
    out, _ = run.communicate()
    assert time.monotonic() - start < 30
    assert run.returncode == 1
    steps = {r["name"]: r["status"] for r in read(tmp_path / "results.jsonl") if r["kind"] == "step"}
    assert steps["rows, first part"] == "cut", out
    assert steps["correct layer_norm"] == "cut"
    assert "0 results: 0 wrong, 0 failed, 26 missing" in out


@needs_triton
@pytest.mark.slow
def test_what_was_compiled_beforehand_is_what_is_launched(tmp_path: Path) -> None:
    cache = {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    run = process("tests/precompiled.py", **cache)
    out, _ = run.communicate()
    assert run.returncode == 0, out
    recorded, compiled, launched, added = map(int, out.split()[-4:])
    assert recorded == compiled == launched > 8
    assert added == 0


def test_nothing_is_imported_that_a_bare_machine_lacks() -> None:
    missing = "rich", "networkx", "matplotlib", "pytest", "pytest_benchmark"
    modules = ["first", "probe", "correct", "headline", "compiled", "sanitize"]
    modules += ["precompile"] * _library.HAVE_TRITON
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({missing!r}));"
        f"import {', '.join(f'benchmarks.gpu.{name}' for name in modules)}"
    )
    run = process("-c", code)
    assert run.communicate()[0] == ""


# ---- what is checked and timed ----


def test_the_first_minutes_are_complete() -> None:
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
def test_what_is_right_passes(case: Workload) -> None:
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
def test_what_is_wrong_fails(how: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = workloads("quick", ops=("layer_norm",))
    plain, wrong = Workload.runner, Wrong(how)

    def runner(self: Workload, provider: str, draw: Draw, *, check: bool = False) -> Runner:
        made = plain(self, provider, draw, check=check)
        if provider == "fused":
            made.forward = lambda: wrong(*made.inputs, *made.parameters)
        return made

    monkeypatch.setattr(Workload, "runner", runner)
    ratios, said = correct.check(case, torch.float32, CPU)
    assert reason in said
    assert math.isinf(max(ratios)) == (how == "unwritten")
    if how != "unsteady":  # five runs a draw; four draws, or one where what is missing cannot be bad luck
        assert wrong.calls == {"unwritten": 5, "inaccurate": 20}[how]


def test_memory_is_poisoned() -> None:
    torch.use_deterministic_algorithms(False)
    torch.ones(4321)  # what fresh memory would be, if it were left as it is
    with correct.poisoned():
        assert torch.empty(4321).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_row_of_wrong_results_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (workload,) = workloads("quick", ops=("layer_norm",))
    journal = Journal(tmp_path, "a GPU", code="code")

    def row() -> Record:
        headline.measure(journal, Clock(CPU), workload, "inference", "a row", 0.01)
        return journal.records()[0]

    assert row()["status"] == "passed"
    monkeypatch.setattr(ops, "layer_norm", lambda x, *_, **__: torch.zeros_like(x))
    assert row()["status"] == "failed"
    assert "differs from eager by 1 of the largest result" in row()["reason"]
    monkeypatch.setattr(ops, "layer_norm", lambda x, *_, **__: 1 // 0)
    assert row()["status"] == "failed"
    assert "ZeroDivisionError" in row()["reason"]


def test_a_row_is_begun_once_in_a_call(tmp_path: Path) -> None:
    """One that ends its process is left out by the next, and begun again in a later call."""
    journal = Journal(tmp_path, "a GPU", code="code")
    (_, _, first_row), (_, _, second_row) = headline.left(journal, True, "first", 0.0)
    since = time.time()
    journal.add("row", first_row, BEGUN)
    assert [name for *_, name in headline.left(journal, True, "first", since)] == [second_row]
    journal.add("row", second_row, "passed")
    assert headline.left(journal, True, "first", since) == []
    assert [name for *_, name in headline.left(journal, True, "first", time.time())] == [first_row]


# ---- what is kept ----


def test_a_torn_line_and_other_runs_do_not_count(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "a GPU", code="code")
    journal.add("row", "first", "passed", ratio=float("inf"))
    with journal.path.open("a") as file:
        file.write('{"kind": "row", "name": "torn", "sta')
    journal.add("row", "second", "passed")
    journal.add("row", "first", "failed")
    Journal(tmp_path, "another GPU", code="code").add("row", "third", "passed")
    Journal(tmp_path, "a GPU", code="other code").add("row", "fourth", "passed")
    assert [(r["name"], r["status"]) for r in journal.records()] == [("first", "failed"), ("second", "passed")]
    assert len(read(journal.path)) == 5
    assert read(journal.path)[0]["ratio"] is None
    for line in journal.path.read_text().splitlines():
        if "torn" not in line:
            json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_unpacking_is_where_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, root, kernels = (tmp_path / name for name in ("bundle", "root", "kernels"))
    kernels.mkdir()
    monkeypatch.setattr(journal_module, "ROOT", root)
    monkeypatch.setattr(first._tuned, "FOLDER", kernels)
    Journal(bundle, "NVIDIA H100 80GB HBM3", code="code").add("row", "first", "passed")
    (bundle / "tuned_nvidia_h100.json").write_text("{}")  # a copy stays with the results
    assert first.main(["--unpack", str(bundle)]) == 0
    folder = root / "benchmarks" / "results" / "nvidia_h100_80gb_hbm3" / "first"
    assert Journal(folder, "NVIDIA H100 80GB HBM3", code="code").done("row", "first")
    assert (kernels / "tuned_nvidia_h100.json").exists()
    assert (folder / "tuned_nvidia_h100.json").exists()
    with pytest.raises(SystemExit, match="no results"):
        first.main(["--unpack", str(kernels)])


def record(kind: str, name: str, status: str = "passed", **found: Any) -> Record:
    return {"kind": kind, "name": name, "status": status, **found}


def time_of(seconds: float) -> dict[str, float]:
    return {"median": seconds}


def test_the_table_says_what_is_wrong_and_what_is_missing() -> None:
    figures = {
        "eager": {"called": time_of(3e-4), "graph": time_of(1.5e-4)},
        "cudnn": {"skipped": "RuntimeError: No available kernel"},
        "fused": {"called": time_of(1e-4), "graph": time_of(5e-5)},
    }
    unhidden = {"fused": {"called": time_of(1e-4), "remark": "the GPU waited for the host"}}
    records = [
        record("correct", "mlp x bf16", case="mlp x", dtype="bf16", ratios=[0.5, 1.25]),
        record("correct", "mlp x fp16", "failed", case="mlp x", dtype="fp16", ratios=[None, 1.0], reason="inaccurate"),
        record("correct", "mlp x fp32", BEGUN, case="mlp x", dtype="fp32"),
        record("row", "attention forward", op="attention", mode="inference", providers=figures, tuned=["gemm[1]"]),
        record("row", "block forward", op="block", mode="inference", providers=unhidden, tuned=[]),
        record("row", "model forward", BEGUN),
        record("step", "correct mlp", "failed", last=["Segmentation fault", "exit status 139"]),
    ]
    text = summary.markdown(records)
    assert "| mlp x | 0.50, 1.25 | **inaccurate** not finite, 1.00 | **did not end** |" in text
    assert "| attention forward | 150.0 | - | - | 50.0 | 300.0 | - | - | 100.0 | 3.00x eager | 1 |" in text
    assert "- attention forward, cudnn: RuntimeError: No available kernel" in text
    assert "| block forward | - | - | - | - | - | - | - | 100.0 |  | - |" in text, (
        "no time of the host as one of the GPU"
    )
    assert "- block forward, fused: the GPU waited for the host" in text
    assert "| model forward (**did not end**) |" in text
    lines = summary.short(records)
    assert "mlp: 1 of 3 correct, worst error ratio 1.25" in lines
    assert "attention forward: 50.0 us, eager 3.00x; as called eager 3.00x" in lines


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


# ---- one at a time, in time ----


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
    """Of two processes one is ready, and is timed after the other has been ended."""
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
    runner = Steps(journal)
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
    out, _ = process("tests/first_minutes.py", PYTHONPATH=str(ROOT)).communicate()
    found = json.loads(out.splitlines()[-1])
    assert found["first"] == "rows"
    assert found["dtypes"] == ["bf16", "fp16", "fp32"]
    assert found["asked by rows"] == found["measured"], "tuning measures what the rows ask for, all of it, and no more"
    assert found["not compiled"] == 0, "with any choice that tuning may make"
