"""Draw the memory study: peak memory of a training step against tokens, for light and for dark pages.

    python -m benchmarks.report.plot benchmarks/results/cpu/float32.json benchmarks/results/cpu

writes memory_light.svg and memory_dark.svg into the folder.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import conditions, table
from benchmarks.harness.program import parser
from benchmarks.harness.record import Record
from benchmarks.harness.timing import Ceilings
from fastvit.cli.terminal import check_picture, guarded, write_figure
from fastvit.study.memory.peak import growth_exponent
from fastvit.study.memory.plot import Curves, draw

FILES = {"light": "memory_light.svg", "dark": "memory_dark.svg"}
ALT = "Peak memory of a training step against the number of tokens"


def read(paths: Sequence[Path]) -> tuple[list[Record], Ceilings, list[str]]:
    """Return the records of one run, the limits of its machine, and lines that say where and when it was.

    Raises:
        ValueError: no benchmark in the files, or several devices or dtypes.
    """
    try:
        runs = [json.loads(path.read_text()) for path in paths]
        info = [b["extra_info"] for run in runs for b in run["benchmarks"]]
    except (ValueError, KeyError, TypeError):  # no JSON, or another
        info = []
    if not info:
        files = ", ".join(map(str, paths))
        raise ValueError(f"no benchmark in {files}: pytest benchmarks --benchmark-json FILE writes such files")
    devices = {(i["environment"]["device"], i["environment"]["dtype"]) for i in info}
    if len(devices) > 1:
        raise ValueError(f"one table of several devices or dtypes: {sorted(devices)}")
    during = [conditions.Conditions.read(run["conditions"]) for run in runs]
    ceilings = conditions.best([*(Ceilings(**i["ceilings"]) for i in info), *(state.end for state in during)])
    records = [Record.read(i) for i in info]
    commit = runs[0]["commit_info"]
    dirty = " with local changes" * commit["dirty"]
    when = f"{runs[0]['datetime'][:10]}, commit {commit['id'][:10]}{dirty}"
    where = [*table.header(info[0]["environment"], ceilings), when]
    where += [line for state in during for line in conditions.lines(state, records, ceilings)]
    return records, ceilings, where


def picture(folder: str, files: dict[str, str] = FILES, alt: str = ALT) -> str:
    """Return HTML that shows the light or the dark file, as the reader's page is. alt: the picture in words."""
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{folder}/{files["dark"]}">'
        f'<img alt="{alt}" src="{folder}/{files["light"]}"></picture>\n'
    )


def save(records: Sequence[Record], where: str, folder: Path) -> list[Path]:
    """Write both files and return their paths; a ValueError if the memory study is not among the records."""
    studies = table.growth(records)
    if not studies:
        raise ValueError("the memory study did not run: no picture")
    if any(len(tokens) < 2 for curves in studies.values() for tokens, _ in curves.values()):
        raise ValueError("no picture: the memory study ran at one number of tokens (with --quick it does)")
    shape = next(r.shape for r in records if r.op in studies)
    panels = {op.removeprefix("memory, "): curves for op, curves in studies.items()}
    caption = f"{where}; batch {shape['B']}, {shape['H']} heads" + _fitted(studies)
    for theme, name in FILES.items():
        write_figure(folder / name, draw(panels, caption, theme, "peak memory of a training step"))
    return [folder / name for name in FILES.values()]


def _fitted(studies: dict[str, Curves]) -> str:
    """Say which sizes the exponents are fitted to."""
    fits = {growth_exponent(*curve) for curves in studies.values() for curve in curves.values()} - {None}
    ranges = {f"{fit.first} to {fit.last}" for fit in fits if fit}
    return f"; exponents: from N = {', '.join(sorted(ranges))}" * bool(ranges)


def main() -> None:
    result, folder = paths("benchmarks.report.plot", __doc__)
    records, _, where = read([result])
    save(records, where[0], folder)


def paths(program: str, about: str | None) -> tuple[Path, Path]:
    """Read the two arguments of a program that draws a picture: a result file and a folder, which has to be there."""
    options = parser(program, about)
    options.add_argument("result", type=Path, help="a result file")
    options.add_argument("folder", type=Path, help="where the picture goes, for light and for dark pages")
    chosen = options.parse_args()
    for name in ("light.svg", "dark.svg"):
        check_picture("folder", chosen.folder / name)
    return chosen.result, chosen.folder


if __name__ == "__main__":
    sys.exit(guarded(main, name="benchmarks.report.plot"))
