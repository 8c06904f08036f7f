"""`fastvit bench`: the benchmarks of a checkout, through pytest."""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path

_EPILOG = """Runs pytest on benchmarks/ of a checkout of fastvit: the one that is installed
(pip install --editable), or the current folder. One tiny case per op, in
about 100 s of one core; `make bench` runs all. The status is pytest's.

examples:
  fastvit bench
  fastvit bench -- -k attention --dtype bfloat16
  fastvit bench -- --providers eager,sdpa,fastvit
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "fastvit bench [-h] [-- ARGUMENT ...]"
    parser.epilog = _EPILOG
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="an argument for pytest, after --")


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
    """Return the folder of a checkout: the package's, or the current one. None if neither has the benchmarks."""
    for folder in (Path(__file__).parents[2], Path.cwd()):
        if (folder / "benchmarks/conftest.py").is_file() and (folder / "fastvit/cli").is_dir():
            return folder
    return None
