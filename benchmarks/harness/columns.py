"""Format tables of 100 columns, more where numbers would be cut, for a terminal or a file."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

WIDTH = 100


def make(columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1, width: int = WIDTH) -> list[str]:
    """Return the lines of a table, `width` columns wide where that suffices. The first `left` columns hold words, the
    others numbers; the first is broken where there is no room."""
    from rich.box import SIMPLE_HEAD  # here, so that measuring needs no rich
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    rows = list(rows)
    for i, name in enumerate(columns):
        longest = max(len(line) for row in (columns, *rows) for line in row[i].split("\n"))
        least = longest if i else min(longest, 10)
        table.add_column(name, justify="left" if i < left else "right", no_wrap=i > 0, overflow="fold", min_width=least)
    for row in rows:
        table.add_row(*row)
    console = Console(
        width=10 * WIDTH, file=io.StringIO(), color_system=None, markup=False, emoji=False, highlight=False
    )
    console.width = max(min(width, WIDTH), console.measure(table).minimum)
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip().replace("─", "-") for line in captured.get().splitlines()]


def fenced(lines: Iterable[str]) -> str:
    """Return lines of text for a page in Markdown."""
    return "\n".join(["```text", *lines, "```", ""])
