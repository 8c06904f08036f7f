"""Format a table of at most 100 columns, for a terminal or a file."""

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
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i < left else "right", no_wrap=i > 0, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console(width=WIDTH, file=io.StringIO(), color_system=None, markup=False, emoji=False, highlight=False)
    console.width = min(WIDTH, max(width, console.measure(table).minimum))  # with less, numbers would be cut
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip().replace("─", "-") for line in captured.get().splitlines()]
