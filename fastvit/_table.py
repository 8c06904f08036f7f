"""Format reports of modules as tables."""

from __future__ import annotations

import re
from collections.abc import Iterable

Row = tuple[str, str, str, str]


def table(header: Row, rows: Iterable[Row]) -> list[str]:
    """Return the table's lines; none without rows. A row begins with the name of a module. Numbered modules whose rows
    are otherwise equal share one row, such as blocks.* (12)."""
    groups: dict[Row, list[str]] = {}
    for name, first, second, third in rows:
        groups.setdefault((re.sub(r"\d+", "*", name), first, second, third), []).append(name)
    if not groups:
        return []
    shown = [header]
    for (pattern, first, second, third), names in groups.items():
        name = f"{pattern} ({len(names)})" if len(names) > 1 else names[0] or "(the model itself)"
        shown.append((name, first, second, third))
    widths = [max(len(row[i]) for row in shown) for i in range(3)]
    lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in shown]
    lines.insert(1, "-" * max(map(len, lines)))
    return [line.rstrip() for line in lines]
