"""How kernels are called: fastvit.ops.runtime.launch, held against Triton's own launches without a GPU.

The checks are functions of two scripts; these run in processes of their own, because this one may be Triton's
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

HELPERS = Path(__file__).parents[1] / "helpers"
CHECKS = [
    (script, node.name)
    for script in ("stub_launches.py", "stub_calls.py")
    for node in ast.parse((HELPERS / script).read_text()).body
    if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
]


@cache
def results(script: str) -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "FASTVIT_BACKEND")}
    environment["PYTHONPATH"] = os.pathsep.join([str(HELPERS.parents[1]), str(HELPERS)])
    command = [sys.executable, str(HELPERS / script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(("script", "check"), CHECKS)
def test_launches(script: str, check: str) -> None:
    problem = results(script)[check]
    assert not problem, problem
