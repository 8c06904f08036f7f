"""Show a comparison of training runs, the file of `train.py compare --json`."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path


def render(path: Path) -> list[str]:
    """Return the lines of the table and of what is below it."""
    found = json.loads(path.read_text())
    rows = [found["heads"], *found["rows"]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(n) if i > 1 else cell.ljust(n) for i, (cell, n) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return [*lines, *(line for note in found["notes"] for line in textwrap.wrap(note, 100))]
