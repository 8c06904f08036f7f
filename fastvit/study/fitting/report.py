"""The result of a fit: what blocks recompute in words, the table of what that costs, and its picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from fastvit._base.output import wrapped
from fastvit.study.fitting.choices import Choice
from fastvit.study.memory.plot import COLOURS, style
from fastvit.study.memory.step import Setting
from fastvit.study.sources.model_source import pixels


@dataclass(frozen=True)
class FitPoint:
    """One way to recompute.

    Attributes:
        name: what is recomputed.
        peak: planned bytes.
        recomputed: FLOPs that are computed again, over those of the step without recomputation.
    """

    name: str
    peak: int
    recomputed: float


@dataclass(frozen=True, repr=False)
class Fit:
    """The result of `fit`, shown as a few sentences.

    Attributes:
        model, device, image_size, batch, setting, budget: as asked for; budget in bytes.
        blocks: names of the model's blocks.
        choices: for each block, what it recomputes, for batches of `micro_batch`.
        micro_batch: images at a time: `batch` if a step of it fits; 0 if not even one image does.
        accumulation: batches of `micro_batch` whose gradients make a step of `batch`; 0 if gradients of earlier batches
            leave no room for an image: `micro_batch` is `largest_batch` then.
        largest_batch: the most images at a time that fit without accumulation, at most `batch`.
        peak: planned bytes of a step of `micro_batch` with the choices, from a trace of that step.
        recomputed: FLOPs that are computed again, over those of the step without recomputation.
        least_recomputed: no choice that fits recomputes less than this share, if the sum that the search takes for its
            peak is no further from a trace than that of `choices`. It is `recomputed` where that sum is exact.
        alternatives: the usual ways, for `micro_batch`: nothing, what blocks do by default, every block. Their peaks,
            and those of the next two, are sums of the search.
        frontier: the cheapest choice at several budgets.
        whole_blocks: the first k blocks checkpointed, for k from none to all.
    """

    model: str
    device: str
    image_size: tuple[int, int]
    batch: int
    setting: Setting
    budget: int
    blocks: tuple[str, ...]
    choices: tuple[Choice, ...]
    micro_batch: int
    accumulation: int
    largest_batch: int
    peak: int
    recomputed: float
    least_recomputed: float
    alternatives: tuple[FitPoint, ...]
    frontier: tuple[FitPoint, ...]
    whole_blocks: tuple[FitPoint, ...]

    @property
    def fits(self) -> bool:
        """Whether a step of `batch` fits as a whole."""
        return self.micro_batch == self.batch

    def __repr__(self) -> str:
        return wrapped(lines(self))


def in_words(choices: Sequence[Choice]) -> str:
    """Say what each block recomputes, such as "blocks 0 to 4: fc1; blocks 5 to 11: nothing"."""
    runs, first = [], 0
    for choice, group in groupby(choices):
        last = first + len([*group]) - 1
        runs.append(f"{f'block {first}' if first == last else f'blocks {first} to {last}'}: {choice}")
        first = last + 1
    return "; ".join(runs) if len(runs) > 1 else f"every block: {choices[0]}"


def size_in_words(nbytes: int) -> str:
    """Write bytes in GiB, or in MiB or bytes if they are less than one of it."""
    if nbytes < 2**20:
        return f"{nbytes:,} bytes"
    return f"{nbytes / 2**30:,.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"


def count_of_images(count: int) -> str:
    """Write a number of images."""
    return f"{count} image{'s' * (count > 1)}"


def step_in_words(fit: Fit) -> str:
    """Describe the step that has to fit, in one line."""
    where, s = "GPU" if fit.device == "cuda" else "CPU", fit.setting
    return f"{fit.model}, batch {fit.batch}, {pixels(fit.image_size)} px, {s.dtype}, {s.optimizer}, {where}"


def policy(fit: Fit) -> list[str]:
    """Return lines that say what each block recomputes, and which batch fits where the whole one does not."""
    budget = size_in_words(fit.budget)
    if not fit.micro_batch:
        return [f"not even one image fits into {budget}: the least is {size_in_words(fit.peak)}"]
    head = f"within {budget}, recompute:"
    if not fit.accumulation:
        head = (
            f"{count_of_images(fit.batch)} do not fit into {budget}, nor do accumulated gradients next to one image; "
            f"recompute, with {count_of_images(fit.micro_batch)}:"
        )
    elif not fit.fits:
        head = (
            f"{count_of_images(fit.batch)} do not fit into {budget}, {fit.largest_batch} would; recompute, with "
            f"{fit.accumulation} batches of {fit.micro_batch} whose gradients are accumulated:"
        )
    return [head, *(f"  {part}" for part in in_words(fit.choices).split("; "))]


def rows(fit: Fit) -> list[tuple[str, int, float]]:
    """Return name, peak and share of FLOPs computed again, of the choices and then of the usual ways."""
    chosen = "chosen" if fit.micro_batch else "the least peak"
    return [(chosen, fit.peak, fit.recomputed), *((p.name, p.peak, p.recomputed) for p in fit.alternatives)]


def bound(fit: Fit) -> list[str]:
    """Return a line on choices that the search could not confirm to fit, or none if there are no such choices."""
    if fit.least_recomputed >= fit.recomputed:
        return []
    return [f"no choice that fits computes less than {100 * fit.least_recomputed:.1f} % again"]


def lines(fit: Fit) -> list[str]:
    """Return a report of a few lines."""
    found = [step_in_words(fit), *policy(fit)]
    if not fit.micro_batch:
        return found
    figures = f"planned peak {size_in_words(fit.peak)}, {100 * fit.recomputed:.1f} % of the step's FLOPs computed again"
    return [*found, figures, *bound(fit)]


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
        for points, label, colour, line in curves:
            peaks, shares = [p.peak / 2**30 for p in points], [100 * p.recomputed for p in points]
            axis.plot(peaks, shares, color=colours[colour], label=label, marker="o", linestyle=line, zorder=3)
        axis.plot(
            peak / 2**30, 100 * again, marker="o", markersize=12, markeredgewidth=2.6, linestyle="none", zorder=4,
            color=colours["fastvit"], fillstyle="none", label=f"{name}: {size_in_words(peak)}, {100 * again:.1f} %",
        )  # fmt: skip
        low, high = axis.get_xlim()
        over, budget = min(max(fit.budget / 2**30, low), high), f"over the budget of {size_in_words(fit.budget)}"
        axis.axvspan(over, high, color=colours["faint"], alpha=0.35, linewidth=0, zorder=1, label=budget)
        axis.set_xlim(low, high)
        figure.legend(loc="outside upper left", frameon=False, labelcolor=ink, fontsize=10)
        style(axis, colours)
        axis.set_xlabel("planned peak, GiB", color=ink)
        axis.set_ylabel("% of the step's FLOPs computed again", color=ink)
        figure.supxlabel(step_in_words(fit), fontsize=9, color=ink, alpha=0.7)
        return figure
