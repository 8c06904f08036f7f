"""Say in words what blocks recompute, and report a fit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from fastvit.study.fitting.choices import Choice
from fastvit.study.sources.model_source import pixels

if TYPE_CHECKING:
    from fastvit.study.fitting.planning import Fit


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
