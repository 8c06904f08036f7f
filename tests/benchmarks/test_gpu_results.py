"""What `make gpu` says: the table, the verdict, and what the sanitizer has found."""

import os
from typing import Any

import pytest

from benchmarks.gpu import sanitize, verdict
from benchmarks.gpu.journal import Record
from benchmarks.gpu.runner import SKIPPED
from benchmarks.harness.provenance import ROOT
from fastvit.ops.runtime import backend as backends

needs_interpreter = pytest.mark.skipif(
    not (backends.INTERPRET and backends.HAVE_TRITON), reason="runs in Triton's interpreter"
)

OUTCOMES = [
    (0, "========= ERROR SUMMARY: 0 errors", 0, "no findings"),
    (86, "========= ERROR SUMMARY: 3 errors", 1, "FINDINGS"),
    (9, "Traceback", 1, "FAILED with exit status 9"),
    (255, "========= Error: the device is not supported", SKIPPED, "refuses this device: Error: the device"),
]


@pytest.mark.parametrize(("ended", "said", "status", "words"), OUTCOMES)
def test_what_the_sanitizer_says(ended, said, status, words, monkeypatch, tmp_path, capsys):
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


def record(kind: str, name: str, status: str = "passed", **about: Any) -> Record:
    return {"kind": kind, "name": name, "status": status, **about}


def time_of(seconds: float) -> dict[str, float]:
    return {"median": seconds}


def test_the_verdict_has_what_is_wrong_first_and_compares_what_was_timed():
    def row(name: str, op: str, mode: str, **times: float) -> Record:
        return record("row", name, op=op, mode=mode, providers={k: {"graph": time_of(v)} for k, v in times.items()})

    def model(provider: str, seconds: float) -> Record:
        about = {"model": "m", "style": "default", "mode": "inference", "provider": provider}
        return record("compiled", f"m {provider}", graph=time_of(seconds), **about)

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
    said = verdict.lines(records)
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
