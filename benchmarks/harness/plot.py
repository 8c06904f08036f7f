"""The memory study as a picture: peak memory of a training step against tokens, for light and for dark pages.

    python -m benchmarks.harness.plot benchmarks/results/cpu/float32.json benchmarks/results/cpu

writes memory_light.svg and memory_dark.svg into the folder.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.memory import exponent
from benchmarks.harness.record import Record
from benchmarks.harness.table import growth

FILES = {"light": "memory_light.svg", "dark": "memory_dark.svg"}
Curve = tuple[list[int], list[int]]
Curves = dict[str, dict[str, Curve]]
INK = {"light": "#1f2328", "dark": "#e6edf3"}
FAINT = {"light": "#d1d9e0", "dark": "#3d444d"}
COLOURS = {
    "light": {"eager": "#cf222e", "sdpa": "#8250df", "compile": "#9a6700", "fused": "#1a7f37"},
    "dark": {"eager": "#ff7b72", "sdpa": "#d2a8ff", "compile": "#d29922", "fused": "#3fb950"},
}
NAMES = {"eager": "eager", "sdpa": "SDPA", "compile": "compile", "fused": "fastvit"}
LEVEL = 1.25  # peaks at the largest N within this factor share a label


def picture(folder: str) -> str:
    """HTML that shows the one that suits the reader's page."""
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{folder}/{FILES["dark"]}">'
        f'<img alt="Peak memory of a training step against the number of tokens" src="{folder}/{FILES["light"]}">'
        "</picture>\n"
    )


def draw(curves: Curves, caption: str, theme: str) -> Any:
    """A matplotlib figure, logarithmic, a panel for each op; every line is named at its end, with its slope there."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style: Any = {"font.family": "DejaVu Sans", "font.size": 11, "svg.hashsalt": "fastvit", "text.color": INK[theme]}
    with rc_context(style):
        figure = Figure(figsize=(9.2, 4.6), layout="constrained")
        figure.patch.set_alpha(0.0)
        panels = figure.subplots(1, len(curves), squeeze=False, sharey=True)[0]
        for panel, (op, by_provider) in zip(panels, curves.items(), strict=True):
            _panel(panel, op.removeprefix("memory, "), by_provider, theme)
        panels[0].set_ylabel("peak memory of a training step", color=INK[theme])
        figure.supxlabel(caption, fontsize=9, color=INK[theme], alpha=0.7)
        return figure


def _panel(panel: Any, title: str, by_provider: dict[str, Curve], theme: str) -> None:
    panel.set_facecolor("none")
    for name, (tokens, peaks) in by_provider.items():
        level = name == "sdpa" and "fused" in by_provider and _level(peaks[-1], by_provider["fused"][1][-1])
        panel.loglog(
            tokens, peaks, color=COLOURS[theme][name], linewidth=2.2, marker="o", markersize=5, zorder=3 + level,
            linestyle=(0, (3, 2.2)) if level else "-",  # so that the line below it is seen
        )  # fmt: skip
    for names in _level_ends(by_provider):
        words = [(_label(name, *by_provider[name]), COLOURS[theme][name], "bold") for name in names]
        words += [("the lines overlap", INK[theme], "normal")] * (len(names) > 1)
        for i, (text, colour, weight) in enumerate(words):
            tokens, peaks = by_provider[names[0]]
            panel.annotate(
                text, (tokens[-1], peaks[-1]), (9, 15 * ((len(words) - 1) / 2 - i)), textcoords="offset points",
                va="center", color=colour, fontweight=weight, fontsize=10.5, annotation_clip=False,
            )  # fmt: skip
    tokens = next(iter(by_provider.values()))[0]
    panel.set_title(title, loc="left", fontsize=13, fontweight="bold", color=INK[theme])
    panel.set_xlabel("tokens N", color=INK[theme])
    panel.set_xticks(
        tokens, [str(n) if i in (0, len(tokens) // 2, len(tokens) - 1) else "" for i, n in enumerate(tokens)]
    )
    panel.yaxis.set_major_formatter(lambda value, _: _size(value))
    panel.minorticks_off()
    panel.tick_params(colors=INK[theme], length=0)
    panel.grid(color=FAINT[theme], linewidth=0.8)
    for spine in panel.spines.values():
        spine.set_visible(False)


def _level(a: float, b: float) -> bool:
    return max(a, b) / min(a, b) < LEVEL


def _level_ends(by_provider: dict[str, Curve]) -> list[list[str]]:
    """Names of the lines that end at one height together, the highest first."""
    groups: list[list[str]] = []
    for name in sorted(by_provider, key=lambda name: -by_provider[name][1][-1]):
        if groups and _level(by_provider[groups[-1][-1]][1][-1], by_provider[name][1][-1]):
            groups[-1].append(name)
        else:
            groups.append([name])
    return groups


def _label(name: str, tokens: list[int], peaks: list[int]) -> str:
    if len(tokens) < 3:
        return f"{NAMES[name]} {_size(peaks[-1])}"
    return f"{NAMES[name]} {_size(peaks[-1])}, $\\mathregular{{N^{{{exponent(tokens[-3:], peaks[-3:]):.2f}}}}}$"


def _size(value: float) -> str:
    return f"{value / 1e9:.2g} GB" if value >= 1e9 else f"{value / 1e6:,.0f} MB"


def save(records: Sequence[Record], where: str, folder: Path) -> list[str]:
    """Writes both files, if the memory study is among the records; their paths, or why there is none."""
    curves = growth(records)
    if not curves:
        return ["none, the memory study did not run"]
    if importlib.util.find_spec("matplotlib") is None:
        return ["none, matplotlib is not installed (pip install fastvit[plot])"]
    from matplotlib import rc_context

    shape = next(r.shape for r in records if r.op in curves)
    folder.mkdir(parents=True, exist_ok=True)
    for theme, name in FILES.items():
        with rc_context({"svg.hashsalt": "fastvit"}):
            draw(curves, f"{where}; batch {shape['B']}, {shape['H']} heads", theme).savefig(
                folder / name, transparent=True, metadata={"Date": None}
            )
    return [str(folder / name) for name in FILES.values()]


def main() -> None:
    from benchmarks.harness.results import read

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("result", type=Path, help="of pytest --benchmark-json")
    parser.add_argument("folder", type=Path)
    chosen = parser.parse_args()
    records, _, where = read([chosen.result])
    print(*save(records, where[0], chosen.folder), sep="\n")


if __name__ == "__main__":
    main()
