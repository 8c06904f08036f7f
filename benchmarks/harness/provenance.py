"""Identify the code of a result, and write result files."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

from fastvit._base.output import write_file

ROOT = Path(__file__).resolve().parents[2]


def commit() -> str:
    """Return the checkout's commit, "-dirty" with local changes; "unknown" where there is no git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=False)
    except FileNotFoundError:
        return "unknown"
    return answer.stdout.strip() if answer.returncode == 0 else "unknown"


def sources() -> str:
    """Return a digest of the code that a result depends on, the same with and without git, and untouched by new
    results."""
    digest = hashlib.sha256()
    for folder in ("fastvit", "kernels", "benchmarks", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def write_text(path: Path, text: str) -> None:
    """Write a file by `write_file`, and create its folder: a reader sees the old text or the new, even after a
    crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, text)
