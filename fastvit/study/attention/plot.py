"""Draws attention distances and the evolution of CLS by layer, for light and for dark pages."""

from __future__ import annotations

from typing import Any

from fastvit.study.attention.distance import AttentionDistance
from fastvit.study.attention.evolution import ClsEvolution
from fastvit.study.memory.plot import COLOURS


def draw(distance: AttentionDistance, evolution: ClsEvolution, caption: str, theme: str) -> Any:
    """Draw a matplotlib figure: a dot for each head by layer, as figure 7 of Dosovitskiy et al. 2021
    (arXiv:2010.11929), and the cosine by block.

    Args:
        caption: text below both panels.
        theme: "light" or "dark".

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    colours = COLOURS[theme]
    with rc_context({"font.family": "DejaVu Sans", "font.size": 11, "text.color": colours["ink"]}):
        figure = Figure(figsize=(9.2, 4.2), layout="constrained")
        heads, states = figure.subplots(1, 2)
        _heads(heads, distance, colours)
        _states(states, evolution, colours)
        for panel in (heads, states):
            panel.set_facecolor("none")
            panel.xaxis.get_major_locator().set_params(integer=True)
            panel.tick_params(colors=colours["ink"], length=0)
            panel.grid(color=colours["faint"], linewidth=0.8)
            panel.set_axisbelow(True)
            panel.spines[:].set_visible(False)
        figure.supxlabel(caption, fontsize=9, color=colours["ink"], alpha=0.7)
        return figure


def _heads(panel: Any, found: AttentionDistance, colours: dict[str, str]) -> None:
    layers = [layer for layer in found.layers for _ in found.heads]
    panel.scatter(layers, found.distance.flatten().tolist(), s=26, color=colours["sdpa"], alpha=0.75, linewidths=0)
    panel.plot(found.layers, found.distance.mean(1).tolist(), color=colours["sdpa"], linewidth=1.6)
    panel.axhline(found.uniform, color=colours["ink"], linewidth=1.3, linestyle=(0, (4, 3)))
    panel.set_ylim(0, 1.05 * max(found.uniform, found.distance.max().item()))
    panel.set_title("mean attention distance, px", loc="left", fontsize=12, fontweight="bold", color=colours["ink"])
    panel.set_xlabel(f"layer (dots: heads; line: mean; dashes: uniform, {found.uniform:.0f} px)", color=colours["ink"])


def _states(panel: Any, found: ClsEvolution, colours: dict[str, str]) -> None:
    blocks = range(found.cosine.shape[1])
    for image in found.cosine if len(found.cosine) > 1 else ():
        panel.plot(blocks, image.tolist(), color=colours["fastvit"], linewidth=0.8, alpha=0.45)
    panel.plot(blocks, found.mean.tolist(), color=colours["fastvit"], linewidth=2.2, marker="o", markersize=4.5)
    panel.set_ylim(min(0.0, found.cosine.min().item()) - 0.05, 1.05)
    panel.set_title(
        f"cosine of {found.state} to its last state", loc="left", fontsize=12, fontweight="bold", color=colours["ink"]
    )
    panel.set_xlabel(
        "after block (thin: images; thick: mean)" if len(found.cosine) > 1 else "after block", color=colours["ink"]
    )
