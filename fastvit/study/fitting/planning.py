"""Plan what a training step recomputes so that it fits into a memory budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fastvit.modules.arguments import Pair
from fastvit.study.fitting.choices import BLOCK, BY_DEFAULT, NOTHING, Choice
from fastvit.study.fitting.costs import Trace, costs_of
from fastvit.study.fitting.report import Fit, FitPoint, in_words
from fastvit.study.fitting.search import StepCosts
from fastvit.study.memory.growth import Progress, check_batch, checked_budget, checked_device, silent
from fastvit.study.memory.search import largest_that_fits
from fastvit.study.memory.step import Setting, StepSpec
from fastvit.study.sources.find import find

_POINTS = 16  # budgets of the frontier
_TRIES = 4  # plans, each for a budget that is lower by what the last one was over


def fit(
    model: str, *, budget: int | str, batch: int, image_size: Pair | None = None, dtype: str = "bfloat16",
    optimizer: str = "adamw", device: str | None = None, progress: Progress = silent,
) -> Fit:  # fmt: skip
    """Find the cheapest choice of what each block of a model recomputes, so that a training step fits into a budget.

    Each block recomputes nothing, its MLP's activation, fc1, q, k and v, attention, or a combination; or all of it, as
    checkpointing does; blocks that do not run as fused halves have the last choice only. Nothing is allocated, and no
    GPU is needed: the step runs on fake tensors, as in `fastvit.study.memory`.

        fit = fastvit.study.fit("vit_large_patch16_224", budget="24GiB", batch=64, image_size=512, device="cuda")
        print(fit)

    Args:
        model: as in `fastvit.study.memory`.
        budget: bytes, or text such as "24GiB" or "80 GB".
        batch: images of one step.
        image_size: an integer or (height, width), a multiple of the patch size; None for the model's.
        dtype, optimizer, device: as in `fastvit.study.memory`.
        progress: called with a text before every part.

    Raises:
        ValueError: an unknown model, one without a list of blocks, and other wrong arguments.
    """
    source = find(model)
    size, _ = source.sizes(image_size)
    step = StepSpec(source, size, batch, Setting("train", dtype, optimizer), checked_device(device) == "cuda")
    return plan_fit(step, checked_budget(budget), progress)


def plan_fit(whole: StepSpec, budget: int, progress: Progress = silent) -> Fit:
    """Return the result of `fit` for a step of the fused model."""
    check_batch(whole.batch)
    name, device = whole.source.name, "cuda" if whole.gpu else "cpu"
    progress("what each choice costs")
    costs = costs_of(whole)
    room, tries = budget, _TRIES
    while tries:
        plan = _plan(whole, costs, room, progress)
        trace = Trace(plan.step, plan.choices)
        over = trace.peak - budget
        tries = tries - 1 if over > 0 and plan.largest_batch else 0
        # The search took the peak for lower than it is. This is below the sum of this plan, which cannot come again
        room = plan.costs.peak(plan.choices) - over
    if over > 0 and plan.largest_batch:
        raise ValueError(f"no plan for {name}: a step takes {over:,} bytes more than its blocks do one by one")
    costs = plan.costs
    n = len(costs.blocks)

    def point(name: str, chosen: Sequence[Choice]) -> FitPoint:
        return FitPoint(name, costs.peak(chosen), costs.recomputed(chosen) / costs.flops)

    usual = {"nothing": NOTHING, "activations, as by default": BY_DEFAULT, "every block": BLOCK}
    alternatives = [
        point(what, [choice] * n)
        for what, choice in usual.items()
        if all(choice in options for options in costs.blocks)
    ]
    off = abs(trace.peak - costs.peak(plan.choices))
    bound = costs.recomputed(_cheapest(costs, max(budget, trace.peak) + off))
    fits = trace.peak <= budget
    return Fit(
        model=name, device=device, image_size=whole.image_size, batch=whole.batch, setting=whole.setting, budget=budget,
        blocks=trace.names, choices=plan.choices, micro_batch=plan.step.batch * fits,
        accumulation=plan.accumulation * fits, largest_batch=plan.largest_batch * fits,
        peak=trace.peak, recomputed=costs.recomputed(plan.choices) / costs.flops,
        least_recomputed=bound / costs.flops, alternatives=tuple(alternatives), frontier=tuple(_frontier(costs)),
        whole_blocks=tuple(point(f"{k} blocks", [BLOCK] * k + [NOTHING] * (n - k)) for k in range(n + 1)),
    )  # fmt: skip


class _Plan(NamedTuple):
    """A step that fits by its costs, or if none does, the least step of one image. Numbers as in `Fit`."""

    step: StepSpec
    costs: StepCosts
    choices: tuple[Choice, ...]
    largest_batch: int
    accumulation: int


def _plan(step: StepSpec, costs: StepCosts, budget: int, progress: Progress) -> _Plan:
    """Plan a step with these costs, or one of fewer images."""
    whole, at_once, accumulation = step, step.batch, 1
    if costs.least_peak() > budget:
        progress("the largest batch")
        at_once, accumulation = _largest_batch(whole, budget), 0
        step = whole._replace(batch=max(at_once, 1))
        if at_once:
            progress("gradient accumulation")
            if most := _largest_batch(whole._replace(accumulates=True), budget):
                accumulation = -(-whole.batch // most)
                step = whole._replace(batch=-(-whole.batch // accumulation), accumulates=True)
        costs = costs_of(step)
    progress("the cheapest choice")
    return _Plan(step, costs, _cheapest(costs, max(budget, costs.least_peak())), at_once, accumulation)


def _cheapest(costs: StepCosts, budget: int) -> tuple[Choice, ...]:
    found = costs.cheapest(budget)
    assert found is not None, "the budget is at least the least peak"
    return found


def _frontier(costs: StepCosts) -> list[FitPoint]:
    """Return the cheapest choices between the least peak and that of no recomputation."""
    least, most = costs.least_peak(), costs.peak([NOTHING] * len(costs.blocks))
    found: dict[int, FitPoint] = {}
    for i in range(_POINTS + 1):
        choices = _cheapest(costs, least + (most - least) * i // _POINTS)
        peak = costs.peak(choices)
        found[peak] = FitPoint(in_words(choices), peak, costs.recomputed(choices) / costs.flops)
    return [found[peak] for peak in sorted(found)]


def _largest_batch(step: StepSpec, budget: int) -> int:
    """Return the largest batch below the step's that fits; 0 for none."""
    if step.batch == 1:
        return 0
    return largest_that_fits(lambda batch: costs_of(step._replace(batch=batch)).least_peak(), budget, step.batch - 1)
