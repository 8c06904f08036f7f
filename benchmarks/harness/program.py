"""The command line of a program of the benchmarks."""

from __future__ import annotations

from benchmarks.harness.columns import terminal_width, wrapped
from fastvit.cli.terminal import Parser


def parser(module: str, about: str | None) -> Parser:
    """Return a parser whose help begins with the module's docstring, its paragraphs as wide as the terminal."""
    parts = (about or "").strip().split("\n\n")
    lines = [
        [part] if part[0] == " " else wrapped([" ".join(part.split())], terminal_width(), indent=0) for part in parts
    ]
    return Parser(f"python -m {module}", "\n\n".join(map("\n".join, lines)))
