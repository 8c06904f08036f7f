"""The sanitizer: its cases launch every kernel, and its findings, refusals and absence are told apart."""

import os

import pytest

from benchmarks.gpu import runner, sanitize
from benchmarks.harness import provenance
from fastvit.ops.runtime import backend as backends

needs_interpreter = pytest.mark.skipif(
    not (backends.INTERPRET and backends.HAVE_TRITON), reason="runs in Triton's interpreter"
)


@pytest.mark.nightly
@needs_interpreter
def test_sanitizer_cases_launch_every_kernel():
    kernels = {
        line.split("(")[0].removeprefix("def ")
        for path in (provenance.ROOT / "kernels").glob("*.py")
        for line in path.read_text().splitlines()
        if line.startswith("def ") and "_kernel(" in line
    }
    assert {kernel for op in sanitize.ops() for kernel in sanitize.rehearse(op)} == kernels


def test_a_missing_sanitizer_is_said(monkeypatch, capsys):
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
