"""Draws memory against tokens, for light and for dark pages."""

from __future__ import annotations

import textwrap
from typing import Any

from fastvit.study.memory.peak import growth_exponent

COLOURS = {
    "light": {"eager": "#cf222e", "sdpa": "#8250df", "compile": "#9a6700", "fastvit": "#1a7f37"}
    | {"ink": "#1f2328", "faint": "#d1d9e0"},
    "dark": {"eager": "#ff7b72", "sdpa": "#d2a8ff", "compile": "#d29922", "fastvit": "#3fb950"}
    | {"ink": "#e6edf3", "faint": "#3d444d"},
}
BACKGROUNDS = {"light": "#ffffff", "dark": "#0d1117"}
NAMES = {"eager": "eager", "sdpa": "SDPA", "compile": "compile", "fastvit": "fastvit"}
LEVEL = 1.25  # if the lines of SDPA and fastvit end within this factor, they share a label
Curves = dict[str, tuple[list[int], list[int]]]  # provider -> tokens, peaks


def draw(panels: dict[str, Curves], caption: str, theme: str, what: str) -> Any:
    """Draw a logarithmic matplotlib figure that is legible at half the width of a page. Every line is labelled at its
    end, with its slope there.

    Args:
        panels: title -> curves.
        caption: text below all panels.
        what: label of the vertical axis.
        theme: "light" or "dark".

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    ink = COLOURS[theme]["ink"]
    with rc_context({"font.family": "DejaVu Sans", "font.size": 9.5, "text.color": ink}):
        figure = Figure(figsize=(4.8, 4.4), layout="constrained")
        axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
        for axis, (title, curves) in zip(axes, panels.items(), strict=True):
            _panel(axis, title, curves, COLOURS[theme])
        axes[-1].set_xlabel("tokens N", color=ink)
        figure.supylabel(what, fontsize=9.5, color=ink)
        figure.supxlabel(textwrap.fill(caption, 68), fontsize=8, color=ink, alpha=0.7)
        return figure


def _panel(panel: Any, title: str, curves: Curves, colours: dict[str, str]) -> None:
    ends = {name: peaks[-1] for name, (_, peaks) in curves.items()}
    pair = sorted({"sdpa", "fastvit"} & ends.keys(), key=lambda name: -ends[name])
    level = len(pair) == 2 and ends[pair[0]] / ends[pair[1]] < LEVEL
    for name, (tokens, peaks) in curves.items():
        above = level and name == "sdpa"  # dashed, so that the line below stays visible
        panel.loglog(
            tokens, peaks, color=colours[name], linewidth=2.2, marker="o", markersize=5, zorder=3 + above,
            linestyle=(0, (3, 2.2)) if above else "-",
        )  # fmt: skip
    for names in [[name] for name in ends if not (level and name in pair)] + [pair] * level:
        words = [(_label(name, *curves[name]), colours[name], "bold") for name in names]
        words += [("the lines overlap", colours["ink"], "normal")] * (len(names) > 1)
        nudge = 0 if names == pair or names[0] not in pair else 4 if names[0] == pair[0] else -4  # points
        for i, (text, colour, weight) in enumerate(words):
            panel.annotate(
                text, (curves[names[0]][0][-1], ends[names[0]]), (9, nudge + 12 * ((len(words) - 1) / 2 - i)),
                textcoords="offset points", va="center", color=colour, fontweight=weight, annotation_clip=False,
            )  # fmt: skip
    tokens = next(iter(curves.values()))[0]
    labelled = (tokens[0], tokens[len(tokens) // 2], tokens[-1])
    style(panel, colours, title)
    panel.set_xticks(tokens, [str(n) if n in labelled else "" for n in tokens])
    bottom, top = panel.get_ylim()
    if top < 100 * bottom:  # there may be one power of ten in it, or none
        panel.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
    panel.yaxis.set_major_formatter(lambda value, _: _size(value))
    panel.minorticks_off()


def style(panel: Any, colours: dict[str, str], title: str = "") -> None:
    """Give a panel of matplotlib a title, a faint grid and no frame."""
    panel.set_facecolor("none")
    panel.set_title(title, loc="left", fontweight="bold", color=colours["ink"])
    panel.tick_params(colors=colours["ink"], length=0)
    panel.grid(color=colours["faint"], linewidth=0.8)
    panel.spines[:].set_visible(False)


def _label(name: str, tokens: list[int], peaks: list[int]) -> str:
    fit = growth_exponent(tokens, peaks)
    slope = f", $\\mathregular{{N^{{{fit.exponent:.2f}}}}}$" if fit else ""
    return f"{NAMES[name]} {_size(peaks[-1])}{slope}"


def _size(value: float) -> str:
    if value >= 1e12:
        return f"{value / 1e12:.2g} TB"
    if value >= 1e11:
        return f"{value / 1e9:,.0f} GB"
    return f"{value / 1e9:.2g} GB" if value >= 1e9 else f"{value / 1e6:,.0f} MB"
