"""The programs in benchmarks/examples run with small sizes, as users run them, and learn what they should."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from library_imports import import_timm

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "benchmarks" / "examples"


def run(name: str, *arguments: str, interpret: bool = False) -> str:
    """Run an example and return what it prints."""
    import_timm()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment["TRITON_INTERPRET"] = str(int(interpret))
    command = [sys.executable, "-m", "benchmarks.harness.libraries", str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_serve() -> None:
    text = run("serve.py", "--model", "vit_tiny_patch16_224", "--rounds", "3")
    assert "14 modules accelerated, 0 skipped" in text
    rows = re.findall(r"^(timm.*?)\s+(\d+\.\d+)\s+(\d+\.\d+)$", text, re.MULTILINE)
    assert [name for name, _, _ in rows][:2] == ["timm", "timm, accelerated"]
    assert all(0 < float(median) <= float(p99) for _, median, p99 in rows)


@pytest.mark.parametrize("command", [["train.py", "run", "--help"], ["worked_example.py"], ["attention_kernel.py"]])
def test_a_reader_that_has_read_enough_ends_them_quietly(command: list[str]) -> None:
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"} | {"TRITON_INTERPRET": "1"}
    arguments = [sys.executable, "-W", "ignore", str(EXAMPLES / command[0]), *command[1:]]
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, env=environment | {"PYTHONPATH": str(ROOT)}
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.communicate()[1] == b""


def test_attention_kernel() -> None:
    pytest.importorskip("triton")
    text = run("attention_kernel.py", interpret=True)  # its exit status tells whether all are right
    assert re.findall(r"N(\d+) d64, float32: largest difference", text) == ["1", "32", "50", "197"]
