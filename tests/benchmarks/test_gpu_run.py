"""`make gpu`: rehearsed, killed and taken up again; its steps, limits, and what it says."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as program
from benchmarks.gpu import journal as journal_module
from benchmarks.gpu import needs, rest, sanitize
from benchmarks.gpu.journal import BEGUN, Journal, Record, read
from benchmarks.gpu.rest import execute
from benchmarks.gpu.runner import Step, StepRunner
from benchmarks.harness import provenance
from benchmarks.harness.provenance import ROOT
from benchmarks.harness.workloads import workloads
from benchmarks.report import results
from fastvit.kernels import _tuned
from fastvit.ops.runtime import backend as backends

needs_triton = pytest.mark.skipif(not backends.HAVE_TRITON, reason="triton is not installed")
needs_interpreter = pytest.mark.skipif(
    not (backends.INTERPRET and backends.HAVE_TRITON), reason="runs in Triton's interpreter"
)


def rehearse(folder: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | variables
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "--out", str(folder), *arguments], cwd=ROOT,
        env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def dying(folder: Path, module: str, word: str) -> str:
    """Return a PYTHONPATH with which a process of this module with this argument dies when it starts."""
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
@pytest.mark.nightly
def test_rehearsal_with_a_process_that_dies_killed_and_taken_up_again(tmp_path):
    folder = tmp_path / "results"
    path = dying(tmp_path, "benchmarks.gpu.correct", "mlp")

    run = rehearse(folder, "--first", PYTHONPATH=path)
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
    assert "minutes left" in out
    assert "mlp: 6 of 6 correct" in out
    assert "32 results: 0 wrong, 0 failed, 0 missing" in out
    table = (folder / "table.md").read_text()
    assert out.splitlines()[-1] == f"see {folder / 'table.md'}"
    shown = table.split("```")[1].strip().splitlines()
    assert out.splitlines()[-1 - len(shown) : -1] == shown, "the verdict is first in the table and last in print"
    assert "measure nothing" in shown[1]
    assert "| model vit_cifar_small B1 px32 depth2 fastvit, default, forward |" in table
    assert "did not end" not in table
    assert {step.name for step in rest.rehearsal_steps(folder)} <= set(again)
    tuned = json.loads((folder / "tuned" / "tuned_interpreter.json").read_text())
    assert list(tuned["samples"]) == ["attention_fwd[20,16,2,0,0]"]
    bench = json.loads((folder / "layer_norm.json").read_text())
    assert [b["extra_info"]["mode"] for b in bench["benchmarks"]] == ["inference", "training"] * 2
    assert (folder / "README.md").read_text() == results.page([folder])
    assert "### layer_norm" in (folder / "README.md").read_text()
    names = ["README.md", "layer_norm.json", "log.txt", "results.jsonl", "table.md", "tuned", "tuned_interpreter.json"]
    left = sorted(path.name for path in folder.iterdir() if not path.name.startswith(".fastvit-"))
    assert left == names, "apart from a file that the killed process was writing"


@needs_triton
def test_a_run_without_time_begins_nothing(tmp_path):
    run = rehearse(tmp_path, "--first", "--minutes", "0.01")  # under a second: on a faster machine, too
    out, _ = run.communicate()
    assert run.returncode == 1
    steps = {r["name"]: r["status"] for r in read(tmp_path / "results.jsonl") if r["kind"] == "step"}
    assert {"environment", "correct layer_norm", "tune", "rows, second part"} < steps.keys()
    assert set(steps.values()) == {"cut"}, out
    assert "0 results: 0 wrong, 0 failed, 32 missing" in out


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
    assert len(read(journal.path)) == 5
    assert read(journal.path)[0]["ratio"] is None
    for line in journal.path.read_text().splitlines():
        if "torn" not in line:
            json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_unpacking_is_where_a_run_goes_on(tmp_path, monkeypatch):
    bundle, root, kernels = (tmp_path / name for name in ("bundle", "root", "kernels"))
    kernels.mkdir()
    monkeypatch.setattr(journal_module, "ROOT", root)
    monkeypatch.setattr(_tuned, "FOLDER", kernels)
    Journal(bundle, "NVIDIA H100 80GB HBM3", code="code").add("row", "first", "passed")
    (bundle / "tuned_nvidia_h100.json").write_text("{}")  # a copy stays with the results
    assert program.main(["--unpack", str(bundle)]) == 0
    folder = root / "benchmarks" / "results" / "nvidia_h100_80gb_hbm3"
    assert Journal(folder, "NVIDIA H100 80GB HBM3", code="code").done("row", "first")
    assert (kernels / "tuned_nvidia_h100.json").exists()
    assert (folder / "tuned_nvidia_h100.json").exists()
    with pytest.raises(SystemExit, match="no results"):
        program.main(["--unpack", str(kernels)])


def counting(folder: Path, name: str, status: int = 0) -> Step:
    """Return a step that writes one character a run into `folder/name`."""
    path = str(folder / name)
    code = f"import sys; open({path!r}, 'a').write('x'); print('done', {name!r}); sys.exit({status})"
    return Step(name, ("-c", code))


def runs(folder: Path, name: str) -> int:
    path = folder / name
    return len(path.read_text()) if path.exists() else 0


def start(folder: Path, seconds: float = 1e9) -> StepRunner:
    return StepRunner(Journal(folder / "results", "gpu", code="code"), seconds)


def statuses(folder: Path) -> dict[str, str]:
    records = Journal(folder / "results", "gpu", code="code").records()
    return {r["name"]: r["status"] for r in records if r["kind"] == "step"}


def test_a_second_call_goes_on_with_what_has_not_passed(tmp_path, capsys):
    steps = [counting(tmp_path, "first"), counting(tmp_path, "no tool", 77)]
    steps += [counting(tmp_path, "broken", 3), counting(tmp_path, "third")]
    assert execute(steps, start(tmp_path)) == 1
    out = capsys.readouterr().out
    assert "broken: failed" in out
    assert "exit status 3" in out
    assert statuses(tmp_path) == {"first": "passed", "no tool": "skipped", "broken": "failed", "third": "passed"}
    mended = [counting(tmp_path, step.name, 0) if step.name == "broken" else step for step in steps]
    assert execute(mended, start(tmp_path)) == 0
    assert [runs(tmp_path, step.name) for step in steps] == [1, 1, 2, 1]
    assert set(statuses(tmp_path).values()) == {"passed", "skipped"}
    assert "[third] done third" in (tmp_path / "results" / "log.txt").read_text()


STUBBORN = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"


def begetting(pid: Path) -> str:
    """Return code that starts another process and waits; neither ends at SIGTERM."""
    child = f"{STUBBORN} open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    return (
        f"import subprocess, sys; {STUBBORN} print('begun', flush=True);"
        f"subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    )


def test_a_step_over_its_limit_is_ended_with_what_it_started(tmp_path, capsys):
    pid = tmp_path / "pid"
    steps = [Step("slow", ("-c", begetting(pid)), limit=4.0), counting(tmp_path, "after")]
    assert execute(steps, start(tmp_path)) == 1
    assert statuses(tmp_path) == {"slow": "timed out", "after": "passed"}, "the next runs all the same"
    out = capsys.readouterr().out
    assert "slow: timed out after" in out
    assert "begun" in out
    assert ends(int(pid.read_text()))


def test_a_step_ends_with_the_process_that_holds_it(tmp_path):
    """A killed process closes its pipes."""
    pid = tmp_path / "pid"
    holder = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu.process_group", "-c", begetting(pid)],
        cwd=provenance.ROOT,
        stdin=subprocess.PIPE,
    )
    assert holder.stdin is not None
    while not (pid.exists() and pid.read_text()):
        assert holder.poll() is None
        time.sleep(0.02)
    holder.stdin.close()
    holder.wait(20)
    assert ends(int(pid.read_text()))


def test_the_journal_names_no_folder_of_the_machine(tmp_path):
    code = (
        "import os, sysconfig; print(os.getcwd() + '/benchmarks/a.py:1', sysconfig.get_path('purelib') + '/torch/b.py')"
    )
    assert execute([Step("paths", ("-c", code))], start(tmp_path)) == 0
    (step,) = (record for record in read(tmp_path / "results" / "results.jsonl") if record["kind"] == "step")
    assert step["last"] == ["benchmarks/a.py:1 torch/b.py"]


def test_the_deadline_of_a_run_cuts_its_later_steps(tmp_path):
    steps = [Step("long", ("-c", "import time; time.sleep(60)")), counting(tmp_path, "late")]
    assert execute(steps, start(tmp_path, seconds=2.5)) == 1
    assert statuses(tmp_path) == {"long": "timed out", "late": "cut"}
    assert runs(tmp_path, "late") == 0


def test_what_a_person_stops_has_not_failed(tmp_path):
    held = start(tmp_path)
    future = held.begin([Step("slow", ("-c", "print('> here', flush=True); import time; time.sleep(60)"))])["slow"]
    while "here" not in (tmp_path / "results" / "log.txt").read_text():
        time.sleep(0.02)
    held.end()
    assert future.result(20) == "cut"
    assert statuses(tmp_path) == {"slow": "cut"}


def test_steps_may_run_side_by_side(tmp_path):
    """Each of two steps waits for the other."""
    code = (
        "import pathlib, sys, time; own, other = map(pathlib.Path, sys.argv[1:]); own.touch()\n"
        "while not other.exists(): time.sleep(0.02)"
    )
    pair = [str(tmp_path / name) for name in "ab"]
    steps = [Step("a", ("-c", code, *pair), 60.0), Step("b", ("-c", code, *reversed(pair)), 60.0)]
    assert start(tmp_path).run(steps, workers=2) == {"a": "passed", "b": "passed"}


def ends(pid: int) -> bool:
    """Wait for a killed process. Returns whether it is gone long before it would end by itself."""
    limit = time.perf_counter() + 20
    while alive(pid):
        if time.perf_counter() > limit:
            return False
        time.sleep(0.02)
    return True


def alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and waits for its parent does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_steps_are_complete():
    names = [tuple(step.name.split()) for step in rest.gpu_steps(Path("results"))]
    tests = {path.stem: path.parent.name for path in (ROOT / "tests").rglob("test_*.py")}
    run = {name[1] for name in names if name[0] == "tests"}
    assert {name for name in tests.keys() - run if tests[name] not in ("benchmarks", "mutation")} == {
        "test_targets",
        "test_traffic",
        "test_tune",
    }
    assert sorted(op for some in rest.BENCHES.values() for op in some) == sorted({w.op for w in workloads("gpu")})
    tuned = [name[1] for name in names if name[0] == "tune"]
    assert set(tuned) == set(_tuned.FIELDS)
    assert tuned[0] == "attention_fwd"
    assert tuned.index("attention_bwd_short") > tuned.index("attention_bwd_dkdv"), "a choice between two comes later"
    assert tuned.index("use_triton_gemm") > tuned.index("gemm")
    sanitized = {name[1:] for name in names if name[0] == "sanitize"}
    assert sanitized == {(tool, op) for tool in ("memcheck", "racecheck") for op in sanitize.ops()}
    assert [*dict.fromkeys(name[0] for name in names)] == ["compile", "tune", "tests", "sanitize", "bench", "page"]


def test_a_run_that_cannot_begin_says_why(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(needs, "why_no_gpu", lambda: "the driver is too old")
    assert program.main(["--first"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert "make gpu-first needs a GPU: the driver is too old" in said[0]
    assert said[1] == "fastvit doctor says more; --rehearse runs every step in miniature without one."
    assert len(said) == 2
    (tmp_path / "file").touch()
    assert program.main(["--rehearse", "--out", str(tmp_path / "file" / "folder")]) == 2
    assert "folder cannot be written: Not a directory; --out chooses another" in capsys.readouterr().err


def test_all_that_is_missing_is_said_at_once(monkeypatch):
    monkeypatch.setattr(needs, "why_no_gpu", lambda: "")
    monkeypatch.setattr(needs, "missing_for_triton", lambda: "no C compiler")
    said = needs.complaint("gpu", ("torch", "no_such_module", "nor_this"), rehearse=False).splitlines()
    assert said[0].startswith("make gpu: missing no_such_module, nor_this: ")
    assert said[0].endswith(" -m pip install no_such_module nor_this")
    assert said[1] == "make gpu: no C compiler"
    assert needs.complaint("gpu", ("torch",), rehearse=True) == "", "a rehearsal launches nothing"


def test_the_time_left_is_that_of_similar_steps(tmp_path):
    steps = [Step(f"{kind} {i}", (), 3600.0) for kind in ("tune", "bench") for i in range(3)]
    journal = Journal(tmp_path, "gpu", code="code")
    assert rest.left(steps, journal, set()) == "at most 6 hours left"
    Journal(tmp_path, "gpu", code="older code").add("step", "tune 0", "passed", seconds=100.0)
    Journal(tmp_path, "another gpu", code="code").add("step", "tune 1", "passed", seconds=9000.0)
    journal.add("step", "tune 1", "failed", seconds=1.0)
    assert rest.left(steps[:3], journal, set()) == "about 5 minutes left"
    assert rest.left(steps[:3], journal, set(), most=120.0) == "at most 2 minutes left"
    journal.add("step", "tune 2", "passed", seconds=700.0)
    assert rest.left(steps[:3], journal, {"tune 1"}) == "about 2 minutes left", "what 0 took itself; 2 is done"
    assert rest.left(steps[:3], journal, {"tune 0", "tune 1"}) == ""
    assert rest.left(steps[:3], journal, {"tune 1"}, before=500.0) == "about 10 minutes left"


def test_the_list_has_every_step_and_its_status(capsys, tmp_path):
    Journal(tmp_path, "rehearsal").add("step", "page", "passed")
    assert program.main(["--rehearse", "--list", "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("to do      environment ")
    assert lines[-1].startswith("passed     page ")
    assert sum("rows, " in line for line in lines) == 2
    assert program.main(["--rehearse", "--list", "--steps", "tests", "--out", str(tmp_path)]) == 0
    assert [line.split()[:4] for line in capsys.readouterr().out.splitlines()] == [
        ["to", "do", "tests", "test_library"]
    ]


def test_an_unknown_step_is_refused(capsys, tmp_path):
    with pytest.raises(SystemExit):
        program.main(["--rehearse", "--steps", "nonsense", "--out", str(tmp_path)])
    assert "no step begins with 'nonsense'" in capsys.readouterr().err


def test_the_last_line_names_what_is_not_done(tmp_path):
    journal = Journal(tmp_path, "gpu", code="code")
    for name, status in (("tune a", "passed"), ("tests b", "failed"), ("sanitize c", "skipped"), ("bench d", "passed")):
        journal.add("step", name, status)
    steps = [Step(name, ()) for name in ("tune a", "tests b", "sanitize c", "bench d", "page")]
    assert rest.summary(steps, journal).splitlines() == [
        "5 steps: 2 passed, 1 failed, 1 skipped, 1 to do",
        "    tests b: failed",
        "    page: to do",
    ]


def sizes(op: str, *names: str) -> set[tuple[object, ...]]:
    return {tuple(w.sizes[name] for name in names) for w in workloads("gpu", ops=(op,))}


def test_the_gpu_grid_is_complete():
    assert sizes("attention", "N", "d") >= {(N, 64) for N in (197, 257, 577, 1025, 1370, 4097, 16385)}
    assert sizes("attention", "N", "d") >= {(N, d) for d in (72, 80, 88, 96, 128) for N in (257, 1025)}
    assert sizes("attention", "B") >= {(1,), (256,)}
    assert sizes("layer_norm", "D") >= {(D,) for D in (192, 384, 768, 1024, 1152, 1280, 1408, 1536, 1664)}
    assert sizes("block", "N", "D") >= {(N, D) for N in (197, 257, 1370, 4097) for D in (384, 768, 1024, 1280)}
    models = {(name.split("_")[1], px) for name, px in sizes("model", "name", "px")}
    assert models >= {(size, px) for size in ("small", "base", "large", "huge") for px in (224, 518, 1024)}
