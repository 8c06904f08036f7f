"""`make gpu`: its journal, what a second call goes on with, limits, results and verdict. Rehearsed nightly."""

import itertools
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import check, commands, sanitize, summary
from benchmarks.gpu.journal import BEGUN, Journal, Record, read
from benchmarks.gpu.runner import SKIPPED, Command, Runner
from benchmarks.harness.provenance import ROOT
from benchmarks.harness.workloads import workloads
from benchmarks.report import results
from fastvit.kernels import _tuned
from fastvit.ops.runtime import backend as backends
from fastvit.study.accuracy.verification import Verdict

needs_interpreter = pytest.mark.skipif(
    not (backends.INTERPRET and backends.HAVE_TRITON), reason="runs in Triton's interpreter"
)


# ---- all of it, in miniature ----


def rehearse(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "--out", str(folder), *arguments]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes)


@needs_interpreter
@pytest.mark.nightly
def test_rehearsal_stopped_and_taken_up_again(tmp_path):
    folder = tmp_path / "results"
    run = rehearse(folder)
    while not any(r["kind"] == "row" and r["status"] == "passed" for r in read(folder / "results.jsonl")):
        assert run.poll() is None, run.communicate()[0]
        time.sleep(0.05)
    run.send_signal(signal.SIGTERM)
    run.wait()
    before = read(folder / "results.jsonl")
    time.sleep(1.0)
    assert len(read(folder / "results.jsonl")) <= len(before) + 1, "its processes have ended with it"
    with (folder / "results.jsonl").open("a") as file:
        file.write('{"kind": "row", "name": "torn')
    run = rehearse(folder)
    out, _ = run.communicate()
    assert run.returncode == 0, out
    after = read(folder / "results.jsonl")
    again = [r["name"] for r in after[len(before) :] if r["status"] != BEGUN]
    first, second = commands.rehearsal(folder)[4].results
    assert {"check layer_norm", "layer_norm D192 N197 fp32", first}.isdisjoint(again), "done before"
    assert second in again
    assert "10 results: 0 wrong, 0 failed, 0 missing" in out
    assert f"| {second} |" in (folder / "table.md").read_text()
    flash = next(r for r in after if r["name"] == second and r["status"] == "passed")["providers"]
    assert flash["flash"]["graph"]["median"] > 0
    assert "does not run" in flash["cudnn"]["skipped"]
    assert (folder / "tuned" / "tuned_interpreter.json").exists()
    assert (folder / "README.md").read_text() == results.page([folder])


# ---- the journal ----


def test_a_torn_line_and_other_runs_do_not_count(tmp_path):
    journal = Journal(tmp_path, "a GPU", code="code")
    journal.add("row", "first", "passed", ratio=float("inf"))
    with journal.path.open("a") as file:
        file.write('{"kind": "row", "name": "torn", "sta')
    journal.add("row", "second", "passed")
    journal.add("row", "first", "failed")
    Journal(tmp_path, "another GPU", code="code").add("row", "third", "passed")
    Journal(tmp_path, "a GPU", code="other code").add("row", "fourth", "passed")
    assert [(r["name"], r["status"]) for r in journal.records()] == [("first", "failed"), ("second", "passed")]
    assert not journal.done("row", "first")
    assert len(read(journal.path)) == 5
    assert read(journal.path)[0]["ratio"] is None, "JSON has no infinity"


# ---- commands: limits, and what a second call goes on with ----


def counting(folder: Path, name: str, status: int = 0) -> Command:
    """Return a command that writes one character a run into `folder/name`."""
    path = str(folder / name)
    code = f"import os, sys; open({path!r}, 'a').write('x'); print('> half'); print(os.getcwd() + '/done'); "
    code += f"print(os.environ['FASTVIT_STRICT'], 'TRITON_INTERPRET' in os.environ); sys.exit({status})"
    return Command(name, ("-c", code))


def start(folder: Path, seconds: float = 1e9) -> Runner:
    return Runner(Journal(folder / "results", "gpu", code="code"), seconds)


def test_a_second_call_goes_on_with_what_has_not_passed(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FASTVIT_STRICT", "0")
    every = [counting(tmp_path, "first"), counting(tmp_path, "no tool", SKIPPED)]
    every += [counting(tmp_path, "broken", 3), counting(tmp_path, "last")]
    wanted = {"first": "passed", "no tool": "skipped", "broken": "failed", "last": "passed"}
    assert start(tmp_path).run(every, at_once=2) == wanted
    said = capsys.readouterr().out
    assert "broken: half" in said
    assert "broken: failed" in said
    (failed,) = (r for r in read(tmp_path / "results" / "results.jsonl") if r["name"] == "broken")
    assert failed["last"][1:] == ["1 False", "exit status 3"], "no fallback, no interpreter"
    mended = [counting(tmp_path, command.name) for command in every]
    mended[-1] = replace(mended[-1], prepares=("check",))  # its kernels may lie in another machine's cache
    assert start(tmp_path).run(mended) == dict.fromkeys(wanted, "passed") | {"no tool": "skipped"}
    assert [len((tmp_path / command.name).read_text()) for command in every] == [1, 1, 2, 2]


def test_a_command_over_its_limit_is_ended_with_what_it_started(tmp_path):
    """Neither process ends at SIGTERM. The next command runs all the same; the end of the run cuts what is later."""
    pid = tmp_path / "pid"
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    begets = f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {stubborn!r}]); "
    begets += f"open({str(pid)!r}, 'w').write(str(child.pid)); {stubborn}"
    every = [Command("slow", ("-c", begets), limit=4.0), counting(tmp_path, "after")]
    assert start(tmp_path).run(every) == {"slow": "timed out", "after": "passed"}
    start_of_wait = time.perf_counter()
    while not is_gone(int(pid.read_text())):
        assert time.perf_counter() < start_of_wait + 20, "long before it would end by itself"
        time.sleep(0.02)
    assert start(tmp_path, seconds=0.5).run([counting(tmp_path, "late")]) == {"late": "cut"}
    assert not (tmp_path / "late").exists()


def is_gone(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"  # waits for its parent


def test_the_commands_are_complete():
    first, rest = commands.first(Path("results")), commands.rest(Path("results"))
    every = {command.name: command for command in [*first, *rest]}
    assert len(every) == len(first) + len(rest)
    kinds = [kind for kind, _ in itertools.groupby(command.kind for command in first)]
    assert kinds.index("compile") < kinds.index("check") < kinds.index("rows")
    tuned = [name.removeprefix("tune ") for name in every if name.startswith("tune ")]
    assert set(tuned) == set(_tuned.FIELDS)
    assert tuned.index("attention_bwd_short") > tuned.index("attention_bwd_dkdv"), "a choice between two comes later"
    row_names = {name for command in first for name in command.results}
    assert row_names == {summary.row_name(w, mode) for w in workloads("headline") for mode in summary.MODES}
    assert {w.op for w in workloads("gpu")} == {name[6:] for name in every if name.startswith("bench ")}


# ---- results of checks, the sanitizer, and the verdict ----


def test_every_verdict_of_a_check_is_kept(tmp_path, monkeypatch):
    verdicts = [
        Verdict("layer_norm", "bfloat16", None, 192, 197, "Triton", 0.5, 1.0, "dx", True),
        Verdict("layer_norm", "float16", 64, 192, 197, "Triton", 9.0, 1.0, "dx", False),
        Verdict("layer_norm", "float32", None, 192, 197, "Triton", None, None, "", False, "RuntimeError: no"),
    ]
    wanted = {"names": ["layer_norm"], "device": torch.device("cpu")}
    monkeypatch.setattr(check.study, "verify", lambda **options: verdicts if options == wanted else [])
    assert check.main(["--rehearse", "--out", str(tmp_path), "layer_norm"]) == 1
    _, good, wrong, failed = read(tmp_path / "results.jsonl")
    assert (good["name"], good["status"], good["ratios"]) == ("layer_norm D192 N197 bf16", "passed", [0.5, 1.0])
    assert [summary.is_wrong(r) for r in (good, wrong, failed)] == [False, True, False]
    assert failed["reason"] == "RuntimeError: no"


@pytest.mark.nightly
@needs_interpreter
def test_sanitizer_cases_launch_every_kernel():
    kernels = {
        line.split("(")[0].removeprefix("def ")
        for path in (ROOT / "kernels").glob("*.py")
        for line in path.read_text().splitlines()
        if line.startswith("def ") and "_kernel(" in line
    }
    assert {kernel for op in sanitize.ops() for kernel in sanitize.rehearse(op)} == kernels


def test_graphs_are_a_column_of_the_calls_where_they_were_timed():
    time = {"median": 2e-6}
    providers = {"fastvit": {"called": time, "graph": time}, "graphs": {"called": {"median": 1e-6}}}
    row = {"kind": "row", "name": "a", "status": "passed", "op": "model", "mode": "training", "providers": providers}
    old = row | {"providers": {"fastvit": providers["fastvit"]}}
    alone, called = (line for line in summary.markdown([row]).splitlines() if line.startswith("| a |"))
    assert called == "| a | - | - | - | 2.0 | 1.0 | 0.50x graphs |"
    assert "graphs" not in alone + summary.markdown([old])


def test_the_verdict_has_what_is_wrong_first_and_compares_what_was_timed():
    def record(kind: str, name: str, status: str = "passed", **about: Any) -> Record:
        return {"kind": kind, "name": name, "status": status, **about}

    def row(name: str, op: str, mode: str, **times: float) -> Record:
        return record("row", name, op=op, mode=mode, providers={k: {"graph": {"median": v}} for k, v in times.items()})

    def model(provider: str, seconds: float) -> Record:
        about = {"model": "m", "style": "default", "mode": "inference", "provider": provider}
        return record("compiled", f"m {provider}", graph={"median": seconds}, **about)

    records = [
        record("plan", "results", expected={"rows": ["a", "b", "c", "d", "e"], "check mlp": ["mlp x"]}),
        row("a", "attention", "inference", eager=5.0, flash=3.0, cudnn=1.5, fastvit=2.0),
        row("b", "attention", "inference", eager=5.0, flash=4.0, cudnn=5.0, fastvit=2.0),
        row("c", "block", "training", eager=1.0, fastvit=2.0),
        record("row", "d", "failed", op="block", mode="inference", reason="OutOfMemoryError", wrong=False),
        record("row", "f", "failed", op="block", mode="inference", reason="AssertionError: 4.20", wrong=True),
        record("correct", "mlp x", "failed", case="mlp x", dtype="bf16", ratios=[9.0, 1.0], reason="inaccurate"),
        record("step", "sanitize", "skipped", last=["SKIPPED: no compute-sanitizer"]),
        model("sdpa", 3.0),
        model("fastvit", 2.0),
    ]
    said = summary.verdict(records)
    assert said[:6] == [
        "8 results: 2 wrong, 1 failed, 1 missing",
        "WRONG: f: AssertionError: 4.20",
        "WRONG: mlp x: inaccurate 9.00, 1.00",
        "FAILED: d: OutOfMemoryError",
        "MISSING: e",
        "sanitize: skipped SKIPPED: no compute-sanitizer",
    ]
    table = {" ".join(line.split()) for line in said[6:]}
    assert "attention, forward 1.75 (1.50 to 2.00) 1.38 (0.75 to 2.00) 2" in table
    assert "block, both passes - 0.50 1" in table
    assert "fused modules, forward 1.50 1" in table
    assert max(map(len, said)) <= 80
