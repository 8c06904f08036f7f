"""Format tables of a given width, for a terminal or a file, in which nothing is cut and no word broken."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Sequence

WIDTH = 100  # of a page
Rows = Sequence[Sequence[str]]


def terminal_width() -> int:
    """Return the width of the terminal or $COLUMNS; of a pipe or a file, which breaks no line, a number above all."""
    return shutil.get_terminal_size((1 << 16, 24)).columns


def make(columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1, width: int = WIDTH) -> list[str]:
    """Return the lines of a table. The first `left` columns hold words, the others numbers. Where `width` has no room
    for it, the cells of the first column are lines of their own, and numbers without room follow in another table."""
    rows = [[*row, *[""] * (len(columns) - len(row))] for row in rows]
    widths = [max(len(line) for row in (columns, *rows) for line in row[c].split("\n")) for c in range(len(columns))]
    if sum(widths) + 2 * (len(widths) - 1) <= width:
        return _lines(columns, rows, widths, left)
    tables: list[list[int]] = []  # the columns of numbers in each
    room = 0
    for c in range(left, len(columns)):
        if room < widths[c] + 2 or not tables:
            tables.append([])
            room = width - sum(w + 2 for w in widths[1:left])  # the first of all is two columns to the right
        room -= widths[c] + 2
        tables[-1].append(c)
    return [line for numbers in tables for line in _below_names(rows, columns, widths, left, numbers, width)]


def _below_names(
    rows: Rows, columns: Sequence[str], widths: Sequence[int], left: int, numbers: Sequence[int], width: int
) -> list[str]:
    """Return a table of some columns of numbers, without the first column, whose cells are lines above their rows."""
    chosen = [*range(1, left), *numbers]
    cells = [[row[c] for c in chosen] for row in (columns, *rows)]
    table = [f"  {line}" for line in _lines(cells[0], cells[1:], [widths[c] for c in chosen], left - 1)]
    heads = len(table) - len(rows)
    lines, name = table[:heads], ""
    for row, line in zip(rows, table[heads:], strict=True):
        if row[0] not in ("", name):
            name = row[0]
            lines += wrapped([name], width)
        lines.append(line)
    return lines if numbers[0] == left else ["", *lines]


def _lines(columns: Sequence[str], rows: Rows, widths: Sequence[int], left: int) -> list[str]:
    """Return the heads, whose last lines stand side by side, a rule, and a line for each row."""
    heads = [name.split("\n") for name in columns]
    depth = max(map(len, heads))
    above = zip(*([""] * (depth - len(head)) + head for head in heads), strict=True)
    rule = ["-" * (sum(widths) + 2 * (len(widths) - 1))]
    each = [*above, rule, *rows]
    pads = [str.ljust if c < left else str.rjust for c in range(len(widths))]
    return ["  ".join(pad(cell, w) for pad, cell, w in zip(pads, row, widths)).rstrip() for row in each]  # noqa: B905


def wrapped(lines: Iterable[str], width: int = WIDTH, indent: int = 2) -> list[str]:
    """Break lines that are longer than `width`, or than a page, between words. indent: of what follows a break."""
    wrapper = textwrap.TextWrapper(
        min(width, WIDTH), subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
    return [part for line in lines for part in wrapper.wrap(line) or [""]]


def fenced(lines: Iterable[str]) -> str:
    """Return lines of text for a page in Markdown."""
    return "\n".join(["```text", *lines, "```", ""])
