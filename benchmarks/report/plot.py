"""Draw the memory study: peak memory of a training step against tokens, for light and for dark pages.

    python -m benchmarks.report.plot benchmarks/results/cpu/float32.json benchmarks/results/cpu

writes memory_light.svg and memory_dark.svg into the folder.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.record import Record
from benchmarks.harness.table import growth
from benchmarks.report.read import read
from fastvit._output import write_file
from fastvit.study.memory.peak import growth_exponent
from fastvit.study.memory.plot import Curves, draw

FILES = {"light": "memory_light.svg", "dark": "memory_dark.svg"}
ALT = "Peak memory of a training step against the number of tokens"


def picture(folder: str, name: str = "memory", alt: str = ALT) -> str:
    """Return HTML that shows name_light.svg or name_dark.svg, as the reader's page is. alt: the picture in words."""
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{folder}/{name}_dark.svg">'
        f'<img alt="{alt}" src="{folder}/{name}_light.svg"></picture>\n'
    )


def save(records: Sequence[Record], where: str, folder: Path) -> list[Path]:
    """Write both files and return their paths; a ValueError if the memory study is not among the records."""
    studies = growth(records)
    if not studies:
        raise ValueError("the memory study did not run: no picture")
    shape = next(r.shape for r in records if r.op in studies)
    panels = {op.removeprefix("memory, "): curves for op, curves in studies.items()}
    caption = f"{where}; batch {shape['B']}, {shape['H']} heads" + _fitted(studies)
    for theme, name in FILES.items():
        write_svg(folder / name, draw(panels, caption, theme, "peak memory of a training step"))
    return [folder / name for name in FILES.values()]


def write_svg(path: Path, figure: Any, description: str = "") -> None:
    """Write the same file in every run. description: what the picture shows, for readers that cannot see it."""
    from matplotlib import rc_context

    svg = io.BytesIO()
    with rc_context({"svg.hashsalt": "fastvit"}):
        about = {"Description": description} if description else {}
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None, **about})
    write_file(path, svg.getvalue())


def _fitted(studies: dict[str, Curves]) -> str:
    """Say which sizes the exponents are fitted to."""
    fits = {growth_exponent(*curve) for curves in studies.values() for curve in curves.values()} - {None}
    ranges = {f"{fit.first} to {fit.last}" for fit in fits if fit}
    return f"; exponents: from N = {', '.join(sorted(ranges))}" * bool(ranges)


if __name__ == "__main__":
    found, _, where = read([Path(sys.argv[1])])
    print(*save(found, where[0], Path(sys.argv[2])), sep="\n")
