"""fastvit bench"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path

_EPILOG = """It is pytest over the folder benchmarks/ of a checkout of fastvit: the one that
is installed (pip install --editable), or the folder that the command is called
in. One tiny case per op, under a minute; `make bench` runs all of them. The
status is pytest's.

examples:
  fastvit bench
  fastvit bench -- -k attention --dtype bfloat16
  fastvit bench -- --providers eager,sdpa,fused
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "fastvit bench [-h] [-- ARGUMENT ...]"
    parser.epilog = _EPILOG
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="an argument of pytest, after --")


def run(args: argparse.Namespace) -> int:
    root = checkout()
    if root is None:
        print(
            "fastvit bench: the benchmarks are in a checkout, not in the package: clone the repository, "
            "pip install --editable '.[bench]' there, and call it again",
            file=sys.stderr,
        )
        return 2
    if missing := [name for name in ("pytest", "pytest_benchmark") if importlib.util.find_spec(name) is None]:
        print(f"fastvit bench: {missing[0]} is not installed: pip install 'fastvit[bench]'", file=sys.stderr)
        return 2
    command = [sys.executable, "-m", "pytest", "benchmarks", "--benchmark-only", "--quick", *args.arguments]
    return subprocess.run(command, cwd=root).returncode


def checkout() -> Path | None:
    """The folder that has the benchmarks: of the package, or the current one."""
    for folder in (Path(__file__).parents[2], Path.cwd()):
        if (folder / "benchmarks/conftest.py").is_file() and (folder / "fastvit/cli").is_dir():
            return folder
    return None
