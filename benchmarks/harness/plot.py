"""The memory study as a picture."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from benchmarks.harness.memory import exponent

Curves = dict[str, dict[str, tuple[list[int], list[int]]]]
COLOURS = {"eager": "tab:red", "sdpa": "tab:blue", "compile": "tab:orange", "fused": "tab:green"}
MARKERS = {"eager": "o", "sdpa": "s", "compile": "^", "fused": "D"}


def plot_growth(curves: Curves, directory: Path) -> str:
    """Peak memory against tokens, logarithmic, one panel per op; the file's path, or why there is none."""
    if importlib.util.find_spec("matplotlib") is None:
        return "none, matplotlib is not installed (pip install fastvit[plot])"
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(curves), 4.4), layout="constrained")
    panels = figure.subplots(1, len(curves), squeeze=False)[0]
    for panel, (op, by_provider) in zip(panels, curves.items(), strict=True):
        for name, (tokens, peaks) in by_provider.items():
            label = name
            if len(tokens) >= 3:
                label += f": $N^{{{exponent(tokens[-3:], peaks[-3:]):.2f}}}$"
            style = {"color": COLOURS[name], "marker": MARKERS[name], "markersize": 5}
            if name == "sdpa":  # lies under fused where both keep O(N)
                style |= {"linestyle": "--", "markerfacecolor": "none", "markersize": 9}
            panel.loglog(tokens, [peak / 1e6 for peak in peaks], label=label, **style)
        panel.set(title=op.removeprefix("memory, "), xlabel="tokens N", ylabel="peak of a training step, MB")
        panel.set_xticks(tokens, [str(n) for n in tokens])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
        panel.legend(title="exponent over the largest three N", frameon=False)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "memory.png"
    figure.savefig(path, dpi=150)
    return str(path)
