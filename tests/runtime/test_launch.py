"""How kernels are called: fastvit.ops.runtime.launch, held against Triton's own launches without a GPU.

The checks are functions of a script, which runs in a process of its own, because this one may be Triton's interpreter.
"""

import ast
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from compiling import needs_triton

HELPERS = Path(__file__).parents[1] / "helpers"
SCRIPT = HELPERS / "stub_launches.py"
CHECKS = [
    node.name
    for node in ast.parse(SCRIPT.read_text()).body
    if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
]


@cache
def problems() -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "FASTVIT_BACKEND")}
    environment["PYTHONPATH"] = os.pathsep.join([str(HELPERS.parents[1]), str(HELPERS)])
    done = subprocess.run([sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@needs_triton
@pytest.mark.parametrize("check", CHECKS)
def test_launches(check: str) -> None:
    assert not problems()[check], problems()[check]
