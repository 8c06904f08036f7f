"""`make gpu-first`: rehearsed in full, killed in the middle, with a process that dies; what it compiles beforehand."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import correct, first, headline, summary
from benchmarks.gpu import journal as journal_module
from benchmarks.gpu.journal import BEGUN, Journal, Record, read
from benchmarks.harness.draw import Draw, Runner
from benchmarks.harness.provenance import ROOT
from benchmarks.harness.providers import OPS
from benchmarks.harness.workloads import Workload, workloads
from fastvit import ops
from fastvit.ops.runtime import dispatch
from fastvit.tuning.clock import Clock

CPU = torch.device("cpu")
needs_triton = pytest.mark.skipif(not dispatch.HAVE_TRITON, reason="triton is not installed")


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
    left = sorted(path.name for path in folder.iterdir() if not path.name.startswith(".fastvit-"))
    assert left == names, "but for a file that the killed process was writing"


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
    run = process("tests/helpers/precompiled.py", **cache)
    out, _ = run.communicate()
    assert run.returncode == 0, out
    recorded, compiled, launched, added = map(int, out.split()[-4:])
    assert recorded == compiled == launched > 8
    assert added == 0


def test_nothing_is_imported_that_a_bare_machine_lacks() -> None:
    missing = "rich", "networkx", "matplotlib", "pytest", "pytest_benchmark"
    modules = ["first", "probe", "correct", "headline", "compiled", "sanitize"]
    modules += ["precompile"] * dispatch.HAVE_TRITON
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
