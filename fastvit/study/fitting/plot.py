"""Draws what recomputation costs against the peak that it leaves, for light and for dark pages."""

from __future__ import annotations

from typing import Any

from fastvit.study.fitting.planning import Fit
from fastvit.study.fitting.words import rows, size_in_words, step_in_words
from fastvit.study.memory.plot import COLOURS

_GIB = 2**30


def draw(fit: Fit, theme: str) -> Any:
    """Draw a matplotlib figure of the cheapest ways to recompute, next to checkpointing of the first k blocks. What is
    over the budget is shaded.

    Args:
        theme: "light" or "dark".

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    colours = COLOURS[theme]
    ink = colours["ink"]
    curves = (
        (fit.frontier, "the cheapest choice of what each block recomputes", "fastvit", "-"),
        (fit.whole_blocks, "checkpointing: the first blocks as a whole, one more at each point", "eager", "--"),
    )
    name, peak, again = rows(fit)[0]
    with rc_context({"font.family": "DejaVu Sans", "font.size": 11, "text.color": ink}):
        figure = Figure(figsize=(9.2, 5.2), layout="constrained")
        axis = figure.subplots()
        for points, label, colour, style in curves:
            peaks, shares = [p.peak / _GIB for p in points], [100 * p.recomputed for p in points]
            axis.plot(peaks, shares, color=colours[colour], label=label, marker="o", linestyle=style, zorder=3)
        axis.plot(
            peak / _GIB, 100 * again, marker="o", markersize=12, markeredgewidth=2.6, linestyle="none", zorder=4,
            color=colours["fastvit"], fillstyle="none", label=f"{name}: {size_in_words(peak)}, {100 * again:.1f} %",
        )  # fmt: skip
        low, high = axis.get_xlim()
        over, budget = min(max(fit.budget / _GIB, low), high), f"over the budget of {size_in_words(fit.budget)}"
        axis.axvspan(over, high, color=colours["faint"], alpha=0.35, linewidth=0, zorder=1, label=budget)
        axis.set_xlim(low, high)
        figure.legend(loc="outside upper left", frameon=False, labelcolor=ink, fontsize=10)
        axis.set_facecolor("none")
        axis.set_xlabel("planned peak, GiB", color=ink)
        axis.set_ylabel("% of the step's FLOPs computed again", color=ink)
        axis.tick_params(colors=ink, length=0)
        axis.grid(color=colours["faint"], linewidth=0.8)
        axis.spines[:].set_visible(False)
        figure.supxlabel(step_in_words(fit), fontsize=9, color=ink, alpha=0.7)
        return figure
