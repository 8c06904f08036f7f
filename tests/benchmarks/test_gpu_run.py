"""`make gpu`: its journal, what a second call goes on with, limits, and results. Rehearsed nightly."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as program
from benchmarks.gpu import check, commands, rows, sanitize, summary, verdict
from benchmarks.gpu.commands import Command
from benchmarks.gpu.journal import BEGUN, Journal, read
from benchmarks.gpu.runner import SKIPPED, Runner
from benchmarks.harness.provenance import ROOT
from benchmarks.harness.sdpa_backend import BY_NAME, SdpaBackend, kernel_of, with_kernel
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
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "--out", str(folder), *arguments],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


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
    assert "check layer_norm: done before" in out
    assert "10 results: 0 wrong, 0 failed, 0 missing" in out
    assert out.splitlines()[-1] == f"see {folder / 'table.md'}"
    table = (folder / "table.md").read_text()
    assert f"| {second} |" in table
    assert "did not end" not in table
    flash = next(r for r in after if r["name"] == second and r["status"] == "passed")["providers"]
    assert flash["flash"]["graph"]["median"] > 0
    assert "does not run" in flash["cudnn"]["skipped"]
    tuned = json.loads((folder / "tuned" / "tuned_interpreter.json").read_text())
    assert list(tuned["samples"]) == ["attention_fwd[50,64,2,0,0]"]
    bench = json.loads((folder / "layer_norm.json").read_text())
    assert [b["extra_info"]["mode"] for b in bench["benchmarks"]] == ["inference", "training"]
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
    code = f"import os, sys; open({path!r}, 'a').write('x'); print(os.getcwd() + '/done'); "
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
    assert "broken: failed" in capsys.readouterr().out
    (failed,) = (r for r in read(tmp_path / "results" / "results.jsonl") if r["name"] == "broken")
    assert failed["last"] == ["done", "1 False", "exit status 3"], (
        "no folder of the machine, no fallback, no interpreter"
    )
    mended = [counting(tmp_path, command.name) for command in every]
    mended[-1] = replace(mended[-1], prepares=("check",))  # its kernels may lie in another machine's cache
    assert start(tmp_path).run(mended) == dict.fromkeys(wanted, "passed") | {"no tool": "skipped"}
    assert [len((tmp_path / command.name).read_text()) for command in every] == [1, 1, 2, 2]
    assert "[last] " in (tmp_path / "results" / "log.txt").read_text()


STUBBORN = "import os, signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"


def begetting(pid: Path) -> str:
    """Return code that starts another process and waits; neither ends at SIGTERM."""
    child = f"{STUBBORN} open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    return (
        f"{STUBBORN} print('> begun', flush=True); subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    )


def test_a_command_over_its_limit_is_ended_with_what_it_started(tmp_path, capsys):
    """The next ones run all the same; the end of the run cuts what is later."""
    pid = tmp_path / "pid"
    every = [Command("slow", ("-c", begetting(pid)), limit=4.0), counting(tmp_path, "after")]
    assert start(tmp_path).run(every) == {"slow": "timed out", "after": "passed"}
    out = capsys.readouterr().out
    assert "slow: timed out after" in out
    assert "slow: begun" in out
    assert ends(int(pid.read_text()))
    assert start(tmp_path, seconds=0.5).run([counting(tmp_path, "late")]) == {"late": "cut"}
    assert not (tmp_path / "late").exists()


def ends(pid: int) -> bool:
    """Wait for a killed process. Return whether it is gone long before it would end by itself."""
    limit = time.perf_counter() + 20
    while time.perf_counter() < limit:
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":  # waits for its parent
            return True
        time.sleep(0.02)
    return False


def test_the_commands_are_complete():
    first, rest = commands.first(Path("results")), commands.rest(Path("results"))
    every = {command.name: command for command in [*first, *rest]}
    assert len(every) == len(first) + len(rest)
    kinds = [
        "compile",
        "check",
        "rows",
        "sanitize",
        "compiled",
        "compile",
        "tune",
        "tests",
        "sanitize",
        "bench",
        "page",
    ]
    names = [command.kind for command in [*first, *rest]]
    assert [kind for i, kind in enumerate(names) if i == 0 or names[i - 1] != kind] == kinds, "checks before rows"
    run = {name.split()[1] for name in every if name.startswith("tests ")}
    tests = {
        path.relative_to(ROOT / "tests").with_suffix("").as_posix() for path in (ROOT / "tests").rglob("test_*.py")
    }
    left_out = {name for name in tests - run if not name.startswith(("benchmarks/", "mutation/"))}
    assert left_out == {"kernels/test_targets", "kernels/test_traffic", "kernels/test_tuned"}
    tuned = [name.removeprefix("tune ") for name in every if name.startswith("tune ")]
    assert set(tuned) == set(_tuned.FIELDS)
    assert tuned.index("attention_bwd_short") > tuned.index("attention_bwd_dkdv"), "a choice between two comes later"
    assert tuned.index("use_triton_gemm") > tuned.index("gemm")
    wanted = {f"sanitize {tool} {op}" for tool in ("memcheck", "racecheck") for op in sanitize.ops()}
    assert {name for name in every if name.startswith("sanitize")} == wanted
    rows_found = {name for command in first for name in command.results}
    assert rows_found == {summary.row_name(w, mode) for w in workloads("headline") for mode in summary.MODES}
    assert {w.op for w in workloads("gpu")} == {name[6:] for name in every if name.startswith("bench ")}
    assert "[memory-block-" in every["bench memory, block"].words, "as pytest writes it"


def test_what_prepares_others_runs_while_they_are_to_do(tmp_path, monkeypatch, capsys):
    prepare, row = counting(tmp_path, "compile"), replace(counting(tmp_path, "rows"), results=("a row",))
    every = [replace(prepare, prepares=("rows",)), row]
    monkeypatch.setattr(commands, "rehearsal", lambda folder: every)
    folder = tmp_path / "results"
    words = ["--rehearse", "--out", str(folder)]
    for runs in (1, 1):
        assert program.main(words) == 0
        assert [len((tmp_path / command.name).read_text()) for command in every] == [runs, runs]
    out = capsys.readouterr().out
    assert "2 commands: 2 passed" in out
    assert "MISSING: a row" in out
    assert "MISSING: a row" in (folder / "table.md").read_text()
    assert program.main([*words, "--steps", "compile"]) == 0
    assert len((tmp_path / "compile").read_text()) == 2, "by name it runs again"
    monkeypatch.setattr(_tuned, "FOLDER", tmp_path)
    (tmp_path / "tuned_nvidia_h100.json").write_text("{}")
    program.keep_tuned(Journal(folder, "NVIDIA H100"))
    assert (folder / "tuned_nvidia_h100.json").exists(), "a copy stays with the results"


def test_the_list_and_what_cannot_begin(capsys, monkeypatch, tmp_path):
    Journal(tmp_path, "rehearsal").add("step", "page", "passed")
    assert program.main(["--rehearse", "--list", "--steps", "bench", "page", "--out", str(tmp_path)]) == 0
    bench, page = capsys.readouterr().out.splitlines()
    assert bench.startswith("to do      bench layer_norm ")
    assert page.startswith("passed     page ")
    with pytest.raises(SystemExit):
        program.main(["--rehearse", "--list", "--steps", "nonsense", "--out", str(tmp_path)])
    assert "no command begins with 'nonsense'" in capsys.readouterr().err
    monkeypatch.setattr(program, "why_no_gpu", lambda: "the driver is too old")
    assert program.main(["--first"]) == 2
    assert "make gpu needs a GPU: the driver is too old" in capsys.readouterr().err
    monkeypatch.setattr(program, "_PACKAGES", {"torch": "torch", "no_such_module": "no-such-module"})
    assert program.complaint(rehearse=True).startswith("make gpu: missing no-such-module: ")


# ---- results: checks and rows ----


def test_every_verdict_of_a_check_is_kept(tmp_path, monkeypatch):
    def verify(**options: Any) -> Any:
        assert options == {"names": ["layer_norm"], "device": torch.device("cpu")}
        yield Verdict("layer_norm", "bfloat16", None, 192, 197, "Triton", 0.5, 1.0, "dx", True)
        yield Verdict("layer_norm", "float16", 64, 192, 197, "Triton", 9.0, 1.0, "dx", False)
        yield Verdict("layer_norm", "float32", None, 192, 197, "Triton", None, None, "", False, "RuntimeError: no")

    monkeypatch.setattr(check.study, "verify", verify)
    assert check.main(["--rehearse", "--out", str(tmp_path), "layer_norm"]) == 1
    machine, good, wrong, failed = read(tmp_path / "results.jsonl")
    assert machine["name"] == "machine"
    assert (good["name"], good["status"], good["ratios"]) == ("layer_norm D192 N197 bf16", "passed", [0.5, 1.0])
    assert (wrong["case"], wrong["dtype"], wrong["reason"]) == ("layer_norm d64 N197", "fp16", "inaccurate")
    assert [verdict.is_wrong(r) for r in (good, wrong, failed)] == [False, True, False]
    assert failed["reason"] == "RuntimeError: no"


def test_rows_are_kept_when_they_end_and_left_out_later(tmp_path):
    """What was begun and did not end comes last."""
    journal = Journal(tmp_path, "a GPU", code="code")
    deselected: list[Any] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: deselected.extend(items))
    config: Any = SimpleNamespace(stash={rows._JOURNAL: journal}, hook=hook)
    chosen = workloads("quick", ops=("layer_norm", "mlp", "block"))
    items: Any = [
        SimpleNamespace(callspec=SimpleNamespace(params={"workload": w, "mode": "inference"}), config=config)
        for w in chosen
    ]
    info = {"ceilings": {"bytes_per_second": 1.0}, "providers": {"fastvit": {"time": {"median": 2.0}, "remark": ""}}}

    def call(item: Any, error: BaseException | None = None) -> None:
        item.funcargs = {"benchmark": SimpleNamespace(extra_info=info)}
        hooked = rows.pytest_runtest_call(item)
        next(hooked)
        with contextlib.suppress(StopIteration):
            hooked.send(None) if error is None else hooked.throw(error)

    call(items[0])
    assert journal.records()[0]["providers"] == {"fastvit": {"graph": {"median": 2.0}}}
    with pytest.raises(AssertionError):
        call(items[1], AssertionError("fastvit is not timed"))
    with pytest.raises(MemoryError):
        call(items[2], MemoryError())
    assert [r["wrong"] for r in journal.records() if r["status"] == "failed"] == [True, False]
    journal.add("row", rows._name(items[1]), BEGUN)  # as if the process had ended
    status = {r["name"]: r["status"] for r in journal.records() if r["kind"] == "row"}
    assert [*status.values()][:3] == ["passed", BEGUN, "failed"]
    left = items.copy()
    hooked = rows.pytest_collection_modifyitems(config, left)
    next(hooked)
    with pytest.raises(StopIteration):
        hooked.send(None)
    assert deselected == [items[0]]
    assert left == [*items[2:], items[1]]
    session: Any = SimpleNamespace(config=config, exitstatus=pytest.ExitCode.NO_TESTS_COLLECTED)
    rows.pytest_sessionfinish(session, session.exitstatus)
    assert session.exitstatus == 0, "one was done before"


@pytest.mark.parametrize(("quick", "grid", "journal"), [(False, "headline", "cuda"), (True, "quick", "cpu")])
def test_rows_of_a_gpu_are_the_headline_ones(quick, grid, journal, monkeypatch):
    monkeypatch.setenv("FASTVIT_STRICT", "1")  # which the import sets
    from benchmarks.conftest import SESSION

    session = SimpleNamespace(device=torch.device("cuda"), grid="quick" if quick else "gpu")
    option = SimpleNamespace(quick=quick, journal=Path("results"))
    config: Any = SimpleNamespace(stash={SESSION: session}, option=option)
    monkeypatch.setattr(rows.process, "journal", lambda folder, device: (folder, device.type))
    rows.pytest_configure(config)
    assert (session.grid, config.stash[rows._JOURNAL]) == (grid, (Path("results"), journal))


def test_providers_named_after_a_kernel_run_it():
    (workload,) = workloads("quick", ops=("block",))
    assert {*BY_NAME} < {*workload.providers}
    qkv = torch.randn(3, 1, 2, 8, 16)

    def step() -> str:
        with SdpaBackend() as backend:
            torch.nn.functional.scaled_dot_product_attention(*qkv)
        return backend.name

    assert with_kernel("flash", step)() == "flash_attention_for_cpu"
    with kernel_of("cudnn"), pytest.raises(RuntimeError):
        step()
