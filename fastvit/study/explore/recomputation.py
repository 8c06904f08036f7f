"""Plans what blocks recompute where a training step is over a stop of the page's budget slider."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastvit.study.fitting.costs import FitStep, costs_of
from fastvit.study.fitting.words import in_words
from fastvit.study.memory.step import Setting
from fastvit.study.sources.model_source import ModelSource


def collect(
    source: ModelSource, size: tuple[int, int], gpu: bool, peaks: dict[str, dict[int, int]], budgets: Sequence[float]
) -> dict[str, Any]:
    """Return {dtype: {batch: {budget: the cheapest choice that fits, or None}}} for budgets that are below the peak.

    Costs grow with the batch on a straight line: two steps are traced for each dtype, of the least and of the largest
    batch.

    Args:
        size: the model's, (height, width).
        gpu: plan for a GPU; else for a CPU.
        peaks: {dtype: {batch: bytes of the fused step in training, as blocks are by default}}, for two batches or more,
            all above 1.
        budgets: in GiB.

    Raises:
        ValueError: the model has no list of blocks.
    """
    found: dict[str, Any] = {}
    for dtype, by_batch in peaks.items():
        least, most = min(by_batch), max(by_batch)
        first, last = (costs_of(FitStep(source, size, b, Setting("train", dtype), gpu)) for b in (least, most))
        found[dtype] = {}
        for batch, peak in by_batch.items():
            costs = first.towards(last, (batch - least) / (most - least))
            found[dtype][batch] = {}
            for gib in budgets:
                if (budget := int(gib * 2**30)) < peak:
                    choices = costs.cheapest(budget)
                    found[dtype][batch][gib] = choices and {
                        "words": in_words(choices),
                        "peak": costs.peak(choices),
                        "recomputed": round(costs.recomputed(choices) / costs.flops, 4),
                    }
    return found
