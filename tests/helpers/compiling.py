"""A process that compiles kernels instead of interpreting them."""

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def python(*arguments: str, **variables: str) -> str:
    """Run Python outside of the interpreter, with an empty kernel cache, and return what it prints.

    variables: of its environment.
    """
    with tempfile.TemporaryDirectory() as cache:
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        environment |= {"TRITON_CACHE_DIR": cache, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | variables
        done = subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
    assert done.returncode in (0, 1), done.stderr[-3000:]  # 1: a kernel has a problem
    return done.stdout
