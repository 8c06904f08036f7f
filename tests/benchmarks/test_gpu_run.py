"""`make gpu`: its results, what a second call goes on with, limits, and the verdict. Rehearsed nightly."""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import commands, sanitize, summary
from benchmarks.gpu.results_file import MODES, Record, ResultsFile, read
from benchmarks.gpu.runner import SKIPPED, Command, Runner
from benchmarks.harness.provenance import ROOT
from benchmarks.harness.workloads import workloads
from benchmarks.report import results
from fastvit.ops.runtime import backend as backends

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
    again = [r["name"] for r in after[len(before) :] if r["status"] != "begun"]
    first, second = (f"block B1 N50 D192 H3 {title}" for title in MODES.values())
    assert {"check layer_norm", first}.isdisjoint(again), "done before"
    assert {"compile kernels", second} <= {*again}
    assert "6 results, 6 of them passed" in out
    page = (folder / "table.md").read_text()
    assert "check layer_norm: passed" in page
    assert "B1 N50 D192 H3  fwd+bwd" in page
    assert "vit_cifar_small B1 px32 depth1 fastvit, default, forward" in page
    flash = next(r for r in after if r["name"] == second and r["status"] == "passed")["providers"]
    assert flash["flash"]["time"]["median"] > 0
    assert "does not run" in flash["cudnn"]["skipped"]
    assert (folder / "README.md").read_text() == results.page([folder])


# ---- results.jsonl ----


def test_a_torn_line_and_other_runs_do_not_count(tmp_path):
    kept = ResultsFile(tmp_path, "a GPU", code="code")
    kept.add("row", "first", "passed")
    with kept.path.open("a") as file:
        file.write('{"kind": "row", "name": "torn", "sta')
    kept.add("row", "second", "passed")
    kept.add("row", "first", "failed")
    ResultsFile(tmp_path, "another GPU", code="code").add("row", "third", "passed")
    ResultsFile(tmp_path, "a GPU", code="other code").add("row", "fourth", "passed")
    assert [(r["name"], r["status"]) for r in kept.records()] == [("first", "failed"), ("second", "passed")]
    assert [kept.status("row", name) for name in ("first", "second", "third")] == ["failed", "passed", "to do"]
    assert len(read(kept.path)) == 5


# ---- commands: limits, and what a second call goes on with ----


def counting(folder: Path, name: str, status: int = 0, always: bool = False) -> Command:
    """Return a command that writes one character a run into `folder/name`."""
    path = str(folder / name)
    code = f"import os, sys; open({path!r}, 'a').write('x'); print('early'); print(os.getcwd() + '/done'); "
    code += f"print(os.environ['FASTVIT_STRICT'], 'TRITON_INTERPRET' in os.environ); sys.exit({status})"
    return Command(name, ("-c", code), always=always)


def start(folder: Path, seconds: float = 1e9) -> Runner:
    return Runner(ResultsFile(folder / "results", "gpu", code="code"), seconds)


def test_a_second_call_goes_on_with_what_has_not_passed(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FASTVIT_STRICT", "0")
    every = [counting(tmp_path, "first"), counting(tmp_path, "no tool", SKIPPED)]
    every += [counting(tmp_path, "broken", 3), counting(tmp_path, "last")]
    wanted = {"first": "passed", "no tool": "skipped", "broken": "failed, exit status 3", "last": "passed"}
    assert start(tmp_path).run(every) == wanted
    assert "broken: failed, exit status 3 after" in capsys.readouterr().out
    (failed,) = (r for r in read(tmp_path / "results" / "results.jsonl") if r["name"] == "broken")
    assert failed["last"][2:] == ["1 False"], "no fallback, no interpreter"
    assert failed["last"][1] == "done", "without the folder"
    mended = [counting(tmp_path, command.name, always=command.name == "last") for command in every]
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
    rows = [word for command in first if command.kind == "rows" for word in command.words]
    for op in {w.op for w in workloads("headline")}:
        assert sum(f"[{op}-" in word for word in rows) == 1, op
    assert {w.op for w in workloads("gpu")} == {name[6:] for name in every if name.startswith("bench ")}


# ---- the sanitizer, and the verdict ----


@pytest.mark.nightly
@needs_interpreter
def test_sanitizer_cases_launch_every_kernel():
    assert len(sanitize.kernels()) > 20
    interpreted = {name for name in sanitize.kernels() if "hopper" not in name}
    assert {kernel for op in sanitize.ops() for kernel in sanitize.rehearse(op)} == interpreted


def test_the_verdict_has_what_failed_first_and_compares_what_was_timed():
    def record(kind: str, name: str, status: str = "passed", **about: Any) -> Record:
        return {"kind": kind, "name": name, "status": status, **about}

    def row(name: str, op: str, mode: str, **times: float) -> Record:
        return record("row", name, op=op, mode=mode, providers={k: {"time": {"median": v}} for k, v in times.items()})

    def model(provider: str, seconds: float) -> Record:
        about = {"model": "m", "style": "default", "mode": "inference", "provider": provider}
        return record("compiled", f"m {provider}", time={"median": seconds}, **about)

    records = [
        row("a", "attention", "inference", eager=5.0, flash=3.0, cudnn=1.5, fastvit=2.0),
        row("b", "attention", "inference", eager=5.0, flash=4.0, cudnn=5.0, fastvit=2.0),
        row("c", "block", "training", eager=1.0, fastvit=2.0),
        record("step", "check mlp", "failed", last=["FAIL  mlp"]),
        record("row", "d", "failed", reason="AssertionError: 4.20"),
        record("row", "e", "begun"),
        record("step", "sanitize", "skipped", last=["SKIPPED: no compute-sanitizer"]),
        model("sdpa", 3.0),
        model("fastvit", 2.0),
    ]
    said = summary.verdict(records)
    assert said[:5] == [
        "7 results, 5 of them passed",
        "d: failed AssertionError: 4.20",
        "e: begun",
        "check mlp: failed FAIL  mlp",
        "sanitize: skipped SKIPPED: no compute-sanitizer",
    ]
    table = {" ".join(line.split()) for line in said[5:]}
    assert "attention, forward 1.75 (1.50 to 2.00) 1.38 (0.75 to 2.00) 2" in table
    assert "block, both passes - 0.50 1" in table
    assert "fused modules, forward 1.50 1" in table
    assert max(map(len, said)) <= 80
