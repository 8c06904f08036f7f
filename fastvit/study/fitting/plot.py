"""Draws what recomputation costs against the peak that it leaves, for light and for dark pages."""

from __future__ import annotations

from typing import Any

from fastvit.study.fitting.planning import Fit
from fastvit.study.fitting.words import count_of_images, size_in_words, step_in_words
from fastvit.study.memory.plot import BACKGROUNDS, COLOURS

_GIB = 2**30
_SEEN = 1.25  # a budget that is further from the peaks than this factor is not on the axis


def draw(fit: Fit, theme: str) -> Any:
    """Draw a matplotlib figure of the cheapest ways to recompute, next to checkpointing of the first k blocks.

    Args:
        theme: "light" or "dark".

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    colours = COLOURS[theme]
    ink = colours["ink"]
    with rc_context({"font.family": "DejaVu Sans", "font.size": 11, "text.color": ink}):
        figure = Figure(figsize=(9.2, 5.2), layout="constrained")
        axis = figure.subplots()
        _curves(axis, fit, colours)
        _limits(axis, fit)
        _budget(axis, fit, colours)
        _chosen(axis, fit, colours, BACKGROUNDS[theme])
        figure.legend(loc="outside upper left", frameon=False, labelcolor=ink, fontsize=10.5)
        axis.set_facecolor("none")
        axis.set_xlabel(f"planned peak of a step of {count_of_images(fit.micro_batch or 1)}, GiB", color=ink)
        axis.set_ylabel("share of the step's FLOPs computed again", color=ink)
        axis.tick_params(colors=ink, length=0)
        axis.grid(color=colours["faint"], linewidth=0.8)
        axis.spines[:].set_visible(False)
        figure.supxlabel(step_in_words(fit), fontsize=9, color=ink, alpha=0.7)
        return figure


def _curves(axis: Any, fit: Fit, colours: dict[str, str]) -> None:
    for points, label, colour, style in (
        (fit.frontier, "the cheapest choice of what each block recomputes", "fastvit", {"linewidth": 2.4}),
        (
            fit.whole_blocks, "checkpointing: the first blocks as a whole, one more at each point", "eager",
            {"linewidth": 1.6, "linestyle": (0, (4, 2.5))},
        ),
    ):  # fmt: skip
        peaks, shares = [p.peak / _GIB for p in points], [100 * p.recomputed for p in points]
        axis.plot(peaks, shares, color=colours[colour], label=label, marker="o", markersize=4.5, zorder=3, **style)


def _limits(axis: Any, fit: Fit) -> None:
    """Leave room for the name of the budget above the curves, and for that of a point below and left of it."""
    points = (*fit.frontier, *fit.whole_blocks)
    peaks, budget = [fit.peak / _GIB, *(p.peak / _GIB for p in points)], fit.budget / _GIB
    low, high = min(peaks), max(peaks)
    if low / _SEEN <= budget <= high * _SEEN:
        low, high = min(low, budget), max(high, budget)
    room = max(high - low, 0.02 * high)
    axis.set_xlim(low - 0.28 * room, high + 0.06 * room)
    top = max(10.0, *(100 * p.recomputed for p in points))
    axis.set_ylim(-0.16 * top, 1.2 * top)
    axis.yaxis.set_major_formatter(lambda share, _: "" if share < 0 else f"{share:g} %")


def _budget(axis: Any, fit: Fit, colours: dict[str, str]) -> None:
    """Draw the budget as a line and shade what is over it. A budget off the axis is named at the edge."""
    (low, high), at = axis.get_xlim(), fit.budget / _GIB
    text, right = f"budget {size_in_words(fit.budget)}", at > (low + high) / 2
    if at < low:
        text = f"\N{LEFTWARDS ARROW} {text}"
    elif at > high:
        text = f"{text} \N{RIGHTWARDS ARROW}"
    else:
        axis.axvline(at, color=colours["ink"], linewidth=1.4, zorder=2)
    at = min(max(at, low), high)
    axis.axvspan(at, high, color=colours["faint"], alpha=0.35, linewidth=0, zorder=1)
    axis.annotate(
        text, (at, 0.975), (-6 if right else 6, 0), xycoords=("data", "axes fraction"), textcoords="offset points",
        ha="right" if right else "left", va="top", fontweight="bold", color=colours["ink"],
    )  # fmt: skip


def _chosen(axis: Any, fit: Fit, colours: dict[str, str], background: str) -> None:
    """Mark the chosen point. Curves fall, so that nothing is below and left of it."""
    at = fit.peak / _GIB, 100 * fit.recomputed
    axis.plot(
        *at, linestyle="none", marker="o", markersize=12, markerfacecolor=background,
        markeredgecolor=colours["fastvit"], markeredgewidth=2.6, zorder=5,
    )  # fmt: skip
    name = "chosen" if fit.micro_batch else "least"
    axis.annotate(
        f"{name}: {size_in_words(fit.peak)}\n{at[1]:.1f} % again", at, (-9, -5), textcoords="offset points",
        ha="right", va="top", fontweight="bold", color=colours["fastvit"], zorder=6,
        bbox={"facecolor": background, "alpha": 0.85, "linewidth": 0, "pad": 1},
    )  # fmt: skip
