"""How kernels are called: fastvit.ops.runtime.launch, held against Triton's own launches without a GPU.

The checks are the functions of stub_launches.py; they run in a process of their own, because this one may be Triton's
interpreter.
"""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "helpers" / "stub_launches.py"
CHECKS = [
    node.name
    for node in ast.parse(SCRIPT.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name != "main" and not node.name.startswith("_")
]


@cache
def results() -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "FASTVIT_BACKEND")}
    environment["PYTHONPATH"] = os.pathsep.join([str(SCRIPT.parents[2]), str(SCRIPT.parent)])
    done = subprocess.run([sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("check", CHECKS)
def test_launches(check: str) -> None:
    problem = results()[check]
    assert not problem, problem
