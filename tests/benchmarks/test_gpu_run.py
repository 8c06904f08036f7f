"""`make gpu`: the steps, resuming, time limits, and the page made of several result files."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import first, needs, runner, sanitize
from benchmarks.gpu import run as gpu
from benchmarks.gpu.journal import Journal
from benchmarks.gpu.run import execute
from benchmarks.gpu.runner import Runner, Step
from benchmarks.harness import provenance
from benchmarks.harness.record import Provider, Record, environment
from benchmarks.harness.timing import Ceilings
from benchmarks.harness.workloads import workloads
from benchmarks.report import plot, results
from fastvit.kernels import _tuned
from fastvit.ops.runtime import dispatch
from fastvit.tuning.clock import Quantiles

needs_interpreter = pytest.mark.skipif(
    not (dispatch.INTERPRET and dispatch.HAVE_TRITON), reason="runs in Triton's interpreter"
)


def counting(folder: Path, name: str, status: int = 0) -> Step:
    """A step that leaves one character a run in `folder/name`."""
    path = str(folder / name)
    code = f"import sys; open({path!r}, 'a').write('x'); print('done', {name!r}); sys.exit({status})"
    return Step(name, ("-c", code))


def runs(folder: Path, name: str) -> int:
    path = folder / name
    return len(path.read_text()) if path.exists() else 0


def start(folder: Path, device: str = "gpu", code: str = "code", seconds: float = 1e9) -> Runner:
    return Runner(Journal(folder / "results", device, code=code), seconds)


def statuses(folder: Path) -> dict[str, str]:
    records = Journal(folder / "results", "gpu", code="code").records()
    return {r["name"]: r["status"] for r in records if r["kind"] == "step"}


def test_a_second_call_goes_on_with_what_has_not_passed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.parametrize(("device", "code"), [("other gpu", "code"), ("gpu", "other code")])
def test_results_of_another_device_or_code_do_not_count(tmp_path: Path, device: str, code: str) -> None:
    steps = [counting(tmp_path, "step")]
    execute(steps, start(tmp_path))
    assert execute(steps, start(tmp_path, device, code)) == 0
    assert runs(tmp_path, "step") == 2


STUBBORN = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"


def begetting(pid: Path) -> str:
    """Code of a process that starts another and waits; neither ends at SIGTERM."""
    child = f"{STUBBORN} open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    return (
        f"import subprocess, sys; {STUBBORN} print('begun', flush=True);"
        f"subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    )


def test_a_step_over_its_limit_is_ended_with_what_it_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pid, began = tmp_path / "pid", time.perf_counter()
    steps = [Step("slow", ("-c", begetting(pid)), limit=4.0), counting(tmp_path, "after")]
    assert execute(steps, start(tmp_path)) == 1
    assert time.perf_counter() - began < 30
    assert statuses(tmp_path) == {"slow": "timed out", "after": "passed"}, "the next runs all the same"
    out = capsys.readouterr().out
    assert "slow: timed out after" in out
    assert "begun" in out
    assert ends(int(pid.read_text()))


def test_a_step_ends_with_whoever_holds_it(tmp_path: Path) -> None:
    """A process that is killed holds nothing."""
    pid = tmp_path / "pid"
    leash = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu.leash", "-c", begetting(pid)], cwd=provenance.ROOT, stdin=subprocess.PIPE
    )
    assert leash.stdin is not None
    while not (pid.exists() and pid.read_text()):
        assert leash.poll() is None
        time.sleep(0.02)
    leash.stdin.close()
    leash.wait(20)
    assert ends(int(pid.read_text()))


def test_the_deadline_of_a_run_cuts_its_later_steps(tmp_path: Path) -> None:
    steps = [Step("long", ("-c", "import time; time.sleep(60)")), counting(tmp_path, "late")]
    assert execute(steps, start(tmp_path, seconds=2.5)) == 1
    assert statuses(tmp_path) == {"long": "timed out", "late": "cut"}
    assert runs(tmp_path, "late") == 0


def test_what_a_person_stops_has_not_failed(tmp_path: Path) -> None:
    held = start(tmp_path)
    future = held.begin([Step("slow", ("-c", "print('> here', flush=True); import time; time.sleep(60)"))])["slow"]
    while "here" not in (tmp_path / "results" / "log.txt").read_text():
        time.sleep(0.02)
    held.end()
    assert future.result(20) == "cut"
    assert statuses(tmp_path) == {"slow": "cut"}


def test_steps_may_run_side_by_side(tmp_path: Path) -> None:
    """Each waits for the other."""
    code = (
        "import pathlib, sys, time; own, other = map(pathlib.Path, sys.argv[1:]); own.touch()\n"
        "while not other.exists(): time.sleep(0.02)"
    )
    pair = [str(tmp_path / name) for name in "ab"]
    steps = [Step("a", ("-c", code, *pair), 60.0), Step("b", ("-c", code, *reversed(pair)), 60.0)]
    assert start(tmp_path).run(steps, workers=2) == {"a": "passed", "b": "passed"}


def ends(pid: int) -> bool:
    """Whether the process, killed a moment ago, is gone long before it would end by itself."""
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


# ---- the steps ----


def test_steps_are_complete() -> None:
    names = [tuple(step.name.split()) for step in gpu.gpu_steps(Path("results"))]
    tests = {path.stem for path in (provenance.ROOT / "tests").rglob("test_*.py")}
    assert {name[1] for name in names if name[0] == "tests"} == tests - gpu._WITHOUT_GPU
    benches = {path.stem.removeprefix("bench_") for path in (provenance.ROOT / "benchmarks").glob("bench_*.py")}
    assert {name[1] for name in names if name[0] == "bench"} == benches
    tuned = [name[1] for name in names if name[0] == "tune"]
    assert set(tuned) == set(_tuned.FIELDS)
    assert tuned[0] == "attention_fwd"
    assert tuned.index("attention_bwd_short") > tuned.index("attention_bwd_dkdv"), "a choice between two comes later"
    assert tuned.index("use_triton_gemm") > tuned.index("gemm")
    sanitized = {name[1:] for name in names if name[0] == "sanitize"}
    assert sanitized == {(tool, op) for tool in ("memcheck", "racecheck") for op in sanitize.ops()}
    assert [*dict.fromkeys(name[0] for name in names)] == ["compile", "tune", "tests", "sanitize", "bench", "page"]


@pytest.mark.parametrize("program", [gpu.main, first.main])
def test_a_run_that_cannot_begin_says_why(
    program: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setattr(needs, "why_no_gpu", lambda: "the driver is too old")
    assert program([]) == 2
    said = capsys.readouterr().err.splitlines()
    assert "needs a GPU: the driver is too old" in said[0]
    assert said[1] == "fastvit doctor says more; --rehearse runs every step in miniature without one."
    assert len(said) == 2
    (tmp_path / "file").touch()
    assert program(["--rehearse", "--out", str(tmp_path / "file" / "folder")]) == 2
    assert "folder cannot be written: Not a directory; --out chooses another" in capsys.readouterr().err


def test_all_that_is_missing_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "why_no_gpu", lambda: "")
    monkeypatch.setattr(needs, "missing_for_triton", lambda: "no C compiler")
    said = needs.complaint("gpu", ("torch", "no_such_module", "nor_this"), rehearse=False).splitlines()
    assert said[0].startswith("make gpu: missing no_such_module, nor_this: ")
    assert said[0].endswith(" -m pip install no_such_module nor_this")
    assert said[1] == "make gpu: no C compiler"
    assert needs.complaint("gpu", ("torch",), rehearse=True) == "", "a rehearsal launches nothing"


def test_the_time_left_is_that_of_steps_like_it(tmp_path: Path) -> None:
    steps = [Step(f"{kind} {i}", (), 3600.0) for kind in ("tune", "bench") for i in range(3)]
    journal = Journal(tmp_path, "gpu", code="code")
    assert gpu.left(steps, journal, set()) == "at most 6 hours left"
    Journal(tmp_path, "gpu", code="older code").add("step", "tune 0", "passed", seconds=100.0)
    Journal(tmp_path, "another gpu", code="code").add("step", "tune 1", "passed", seconds=9000.0)
    journal.add("step", "tune 1", "failed", seconds=1.0)
    assert gpu.left(steps[:3], journal, set()) == "about 5 minutes left"
    assert gpu.left(steps[:3], journal, set(), most=120.0) == "at most 2 minutes left"
    journal.add("step", "tune 2", "passed", seconds=700.0)
    assert gpu.left(steps[:3], journal, {"tune 1"}) == "about 2 minutes left", "what 0 took itself; 2 is done"
    assert gpu.left(steps[:3], journal, {"tune 0", "tune 1"}) == ""


def test_an_unknown_step_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--rehearse", "--steps", "nonsense", "--out", str(tmp_path)])
    assert "no step begins with 'nonsense'" in capsys.readouterr().err


def test_the_last_line_names_what_is_not_done(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "gpu", code="code")
    for name, status in (("tune a", "passed"), ("tests b", "failed"), ("sanitize c", "skipped"), ("bench d", "passed")):
        journal.add("step", name, status)
    steps = [Step(name, ()) for name in ("tune a", "tests b", "sanitize c", "bench d", "page")]
    assert gpu.summary(steps, journal).splitlines() == [
        "5 steps: 2 passed, 1 failed, 1 skipped, 1 to do", "    tests b: failed", "    page: to do",
    ]  # fmt: skip


@needs_interpreter
@pytest.mark.slow
def test_rehearsal_runs_every_kind_of_step(tmp_path: Path) -> None:
    assert gpu.main(["--rehearse", "--out", str(tmp_path)]) == 0
    steps = [r["name"] for r in Journal(tmp_path, "rehearsal").records()]
    assert [name.split()[0] for name in steps] == ["tune", "tests", "sanitize", "bench", "page"]
    tuned = json.loads((tmp_path / "tuned" / "tuned_interpreter.json").read_text())
    assert list(tuned["samples"]) == ["attention_fwd[20,16,2,0,0]"]
    bench = json.loads((tmp_path / "layer_norm.json").read_text())
    assert [b["extra_info"]["mode"] for b in bench["benchmarks"]] == ["inference", "training"] * 2
    assert (tmp_path / "README.md").read_text() == results.page([tmp_path])
    assert "### layer_norm" in (tmp_path / "README.md").read_text()


# ---- sanitizers ----


@pytest.mark.slow
@needs_interpreter
def test_sanitizer_cases_launch_every_kernel() -> None:
    kernels = {
        line.split("(")[0].removeprefix("def ")
        for path in (provenance.ROOT / "kernels").glob("*.py")
        for line in path.read_text().splitlines()
        if line.startswith("def ") and "_kernel(" in line
    }
    assert {kernel for op in sanitize.ops() for kernel in sanitize.rehearse(op)} == kernels


def test_a_missing_sanitizer_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sanitize.shutil, "which", lambda name, path=None: None)
    assert sanitize.main(["--tool", "racecheck"]) == runner.SKIPPED
    assert "SKIPPED: no compute-sanitizer" in capsys.readouterr().out


OUTCOMES = [
    (0, "========= ERROR SUMMARY: 0 errors", 0, "no findings"),
    (86, "========= ERROR SUMMARY: 3 errors", 1, "FINDINGS"),
    (9, "Traceback", 1, "FAILED with exit status 9"),
    (255, "========= Error: the device is not supported", runner.SKIPPED, "refuses this device: Error: the device"),
    (86, "========= Error: not supported", 1, "FINDINGS"),
]


@pytest.mark.parametrize(("ended", "said", "status", "words"), OUTCOMES)
def test_what_the_sanitizer_says(
    ended: int, said: str, status: int, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    seen = tmp_path / "arguments"
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f'#!/bin/sh\necho "$PYTORCH_NO_CUDA_MEMORY_CACHING" "$@" > {seen}\necho "{said}"\nexit {ended}\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert sanitize.main(["--tool", "racecheck", "--op", "dropout"]) == status
    out = capsys.readouterr().out
    assert words in out.splitlines()[-1]
    assert said in out
    arguments = seen.read_text()
    assert arguments.startswith("1 --tool racecheck --error-exitcode 86 ")
    assert "benchmarks.gpu.sanitize --inside --op=dropout" in arguments


# ---- the grid ----


def sizes(op: str, *names: str) -> set[tuple[object, ...]]:
    return {tuple(w.sizes[name] for name in names) for w in workloads("gpu", ops=(op,))}


def test_the_gpu_grid_is_complete() -> None:
    assert sizes("attention", "N", "d") >= {(N, 64) for N in (197, 257, 577, 1025, 1370, 4097, 16385)}
    assert sizes("attention", "N", "d") >= {(N, d) for d in (72, 80, 88, 96, 128) for N in (257, 1025)}
    assert sizes("attention", "B") >= {(1,), (256,)}
    assert sizes("layer_norm", "D") >= {(D,) for D in (192, 384, 768, 1024, 1152, 1280, 1408, 1536, 1664)}
    assert sizes("block", "N", "D") >= {(N, D) for N in (197, 257, 1370, 4097) for D in (384, 768, 1024, 1280)}
    models = {(name.split("_")[1], px) for name, px in sizes("model", "name", "px")}
    assert models >= {(size, px) for size in ("small", "base", "large", "huge") for px in (224, 518, 1024)}


# ---- the results page ----


def result(path: Path, lengths: tuple[int, ...], copy: float, device: str = "a GPU") -> Path:
    benchmarks = []
    for N in lengths:
        record = Record("attention", f"N{N}", "inference", {"N": N}, {}, flops=10**9, moved_bytes=10**6)
        record.providers = {"eager": Provider(Quantiles.of([0.012] * 3)), "fused": Provider(Quantiles.of([0.004] * 3))}
        where = environment(torch.device("cpu"), torch.float32) | {"device": device}
        benchmarks.append({"extra_info": record.as_dict(where, Ceilings(copy, 1e12))})
    commit = {"id": "0123456789abcdef", "dirty": False}
    run = {"datetime": "2026-01-02T03:04:05", "commit_info": commit, "benchmarks": benchmarks}
    path.write_text(json.dumps(run))
    return path


def test_one_table_of_several_files(tmp_path: Path) -> None:
    second = result(tmp_path / "b.json", (577, 1025), 3e12)
    first = result(tmp_path / "a.json", (17, 50), 1e12)
    text = results.render([first, second])
    assert text.count("### attention") == 1
    places = [text.index(f"\nN{N} ") for N in (17, 50, 577, 1025)]
    assert places == sorted(places)
    assert "large copy 3,000 GB/s" in text, "the best that the machine reached"
    assert "commit 0123456789" in text
    (tmp_path / "cut_off.json").touch()
    assert text in results.page([tmp_path]), "a folder's files of one dtype are one run"
    with pytest.raises(ValueError, match="several devices"):
        results.render([first, result(tmp_path / "c.json", (197,), 1e12, "another GPU")])
    with pytest.raises(ValueError, match="no benchmark"):
        results.render([])


def test_the_page_is_that_of_the_result_files() -> None:
    """`python -m benchmarks.report.results` makes it."""
    text = (results.RESULTS / "README.md").read_text()
    assert text == results.page()
    tables = [line for block in text.split("```")[1::2] for line in block.splitlines()]
    assert max(map(len, tables)) <= 100
    for file in plot.FILES.values():
        assert f"cpu/{file}" in text
        assert (results.RESULTS / "cpu" / file).exists()


def test_the_ops_of_the_readme_are_those_of_the_result_file() -> None:
    readme = (provenance.ROOT / "README.md").read_text()
    assert readme == results.with_ops(readme)
    assert "| `attention_qkvpacked`, B1 N1025 H12 d64 |" in readme
    assert len(readme.splitlines()) <= 170, "read in one sitting"
    with pytest.raises(ValueError, match="no lines"):
        results.with_ops("a page without marks")


def test_the_low_precision_of_the_readme_is_that_of_the_result_file() -> None:
    rows = json.loads((provenance.ROOT / "benchmarks/results/cpu/low_precision.json").read_text())["models"]
    ms, found = (
        {(r["provider"], r["precision"]): r for r in next(rows[name] for name in rows if name.startswith(model))}
        for model in ("ViT-B/16", "DINOv2")
    )
    named = ("eager", "bfloat16"), ("compile", "int8, torchao"), ("ONNX Runtime", "int8")
    milliseconds = [f"{1e3 * ms[row]['time']['median']:.0f}" for row in (("eager", "float32"), *named)]
    shares = [f"{100 * found[row]['top1']:.0f}" for row in named]
    readme = " ".join((provenance.ROOT / "README.md").read_text().split())
    assert "eager {} ms, bfloat16 {}, int8 {} (torchao, compiled) or {} (ONNX".format(*milliseconds) in readme
    assert "finds {}, {} and {} % of nearest patches again".format(*shares) in readme


def test_the_compile_time_of_the_readme_is_that_of_the_result_file() -> None:
    found = json.loads((provenance.ROOT / "benchmarks/results/cpu/compile_time.json").read_text())["results"]
    cases = [case for of in found.values() for case in of["cases"] if case["mode"] == "train"]
    (kernels,) = {len(case["kernels"]) for case in cases}
    least, most = (f(case["seconds"] for case in cases) for f in (min, max))
    said = f"training ViT-B/16: {kernels} in {least:.0f} to {most:.0f} s of one core"
    assert said in (provenance.ROOT / "README.md").read_text()
