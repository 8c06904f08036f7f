"""Show a comparison of training runs, the file of `train.py compare --json`."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

from benchmarks.harness import columns


def render(path: Path) -> list[str]:
    """Return the lines of the table and of what is below it."""
    found = json.loads(path.read_text())
    table = columns.make(found["heads"], found["rows"], left=2)
    return [*table, "", *(line for note in found["notes"] for line in textwrap.wrap(note, columns.WIDTH))]
