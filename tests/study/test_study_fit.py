"""The planner of `fastvit.fit`: its search, the peaks that it plans, and what it says."""

import itertools
import random

import pytest
import torch
from torch import nn

import fastvit
from fastvit.study.fitting.choices import BLOCK, NOTHING, Choice, put_on
from fastvit.study.fitting.costs import FitStep, Trace, blocks_of, costs_of
from fastvit.study.fitting.planning import checked_budget, fit, in_words
from fastvit.study.fitting.search import BlockCosts, StepCosts
from fastvit.study.memory.measurement import measure
from fastvit.study.memory.step import Setting
from fastvit.study.sources.find import find
from fastvit.study.sources.from_module import ModuleSource

TINY = "vit_tiny_patch16_224"
OPTIONS = [NOTHING, Choice(mlp="all"), Choice("qkv", "all"), BLOCK]


def drawn_costs(seed, uniform):
    draw = random.Random(seed)

    def block():
        return {
            choice: BlockCosts(draw.randint(1, 30), draw.randint(30, 50), draw.randint(0, 60), i and draw.randint(1, 9))
            for i, choice in enumerate(OPTIONS)
        }

    blocks = [block()] * 5 if uniform else [block() for _ in range(5)]
    late = tuple(draw.randint(0, 20) for _ in blocks)
    return StepCosts(tuple(blocks), draw.randint(0, 20), draw.randint(0, 40), late, draw.randint(20, 60), 1000)


@pytest.mark.parametrize("uniform", [True, False])
def test_the_search_finds_what_trying_everything_finds(uniform):
    for seed in range(12):
        costs = drawn_costs(seed, uniform)
        every = [*itertools.product(OPTIONS, repeat=5)]
        peaks, again = [*map(costs.peak, every)], [*map(costs.recomputed, every)]
        assert costs.least_peak() == min(peaks)
        for budget in (min(peaks) - 1, min(peaks), *sorted(peaks)[:: len(peaks) // 7]):
            found = costs.cheapest(budget)
            least = min((flops for peak, flops in zip(peaks, again, strict=True) if peak <= budget), default=None)
            assert (None if found is None else costs.recomputed(found)) == least
            assert found is None or costs.peak(found) <= budget


@pytest.mark.parametrize(
    ("model", "size", "gpu"),
    [
        (TINY, 64, False),
        (TINY, 64, True),
        ("vit_small_patch16_dinov3", 64, False),
        ("eva02_tiny_patch14_224", 56, True),
    ],
)
def test_planned_peaks_are_those_of_a_trace(model, size, gpu):
    """The sums of what each block's choice costs are the peak of the whole step, to the byte."""
    if gpu:
        pytest.importorskip("triton")
    step = FitStep(find(model), (size, size), 64, Setting(dtype="float32", optimizer="none"), gpu)
    costs = costs_of(step)
    least, most = costs.least_peak(), costs.peak([NOTHING] * len(costs.blocks))
    assert least < 0.8 * most
    for budget in (least, (least + most) // 2):
        choices = costs.cheapest(budget)
        assert len({*choices}) > 1
        assert Trace(step, choices).peak == costs.peak(choices) <= budget


def test_a_measured_peak_is_the_planned_one():
    options = {"batch": 16, "image_size": 96, "dtype": "float32", "device": "cpu"}
    most = fit(TINY, budget="1TB", **options).peak
    found = fit(TINY, budget=int(0.7 * most), **options)
    assert found.fits
    assert found.recomputed == found.least_recomputed > 0
    measured = measure(
        find(TINY), "fused", (96, 96), 16, found.setting, torch.device("cpu"),
        prepare=lambda model: [put_on(*pair) for pair in zip(blocks_of(model).values(), found.choices, strict=True)],
    )  # fmt: skip
    assert abs(found.peak / measured - 1) < 0.03
    assert measured < 0.72 * most


def test_half_of_the_checkpointed_flops_suffice():
    """At a peak at which k checkpointed blocks are needed, parts of blocks cost at most 60 % of them."""
    for share in (0.25, 0.5, 0.75):
        costs = costs_of(FitStep(find("vit_base_patch16_224"), (224, 224), 4, Setting(dtype="bfloat16"), gpu=False))
        least, most = costs.least_peak(), costs.peak([NOTHING] * 12)
        whole = next(
            choices
            for k in range(13)
            if costs.peak(choices := [BLOCK] * k + [NOTHING] * (12 - k)) <= least + share * (most - least)
        )
        found = costs.cheapest(int(least + share * (most - least)))
        assert costs.recomputed(found) <= 0.6 * costs.recomputed(whole)


def test_a_batch_that_does_not_fit_is_accumulated():
    options = {"batch": 256, "image_size": 64, "dtype": "float32", "optimizer": "none", "device": "cpu"}
    whole = fit(TINY, budget="1TB", **options)
    budget = whole.frontier[0].peak * 3 // 4
    found = fit(TINY, budget=budget, **options)
    assert not found.fits
    assert found.accumulation * found.micro_batch >= 256 > found.largest_batch >= found.micro_batch > 1
    assert found.peak <= budget
    alone = fit(TINY, budget=budget, **{**options, "batch": found.largest_batch})
    assert alone.fits
    assert not fit(TINY, budget=budget, **{**options, "batch": found.largest_batch + 2}).fits
    assert f"{found.accumulation} batches of {found.micro_batch}" in str(found)
    alone = fit(TINY, budget=fit(TINY, budget="1TB", **{**options, "batch": 2}).frontier[0].peak, **options)
    assert (alone.accumulation, alone.micro_batch) == (0, alone.largest_batch)
    assert "nor do accumulated gradients next to one image" in str(alone)
    nothing = fit(TINY, budget="30MiB", **options)
    assert nothing.micro_batch == 0
    assert "not even one image fits" in str(nothing)


def test_words():
    assert in_words([NOTHING] * 3) == "every block: nothing"
    chosen = [BLOCK, *[Choice("qkv", "all")] * 2, Choice(mlp="activation"), Choice("all")]
    assert in_words(chosen) == (
        "block 0: the whole block; blocks 1 to 2: q, k, v and fc1; block 3: the MLP's activation; block 4: q, k, v "
        "and attention"
    )


@pytest.mark.parametrize("budget", ["24", "24 apples", "", "-1GiB", 0, -5, True, 2.5, None])
def test_wrong_budgets(budget):
    with pytest.raises(ValueError, match="budget must"):
        checked_budget(budget)


def test_budgets():
    assert checked_budget("24GiB") == 24 << 30
    assert checked_budget("1.5 kb") == checked_budget(1500) == 1500


def test_a_model_without_blocks():
    with pytest.raises(ValueError, match="Linear has no list of blocks of one class"):
        blocks_of(nn.Linear(2, 2))


def test_frozen_blocks_recompute_nothing():
    """They save nothing, and the first block that is trained is not taken for one without a backward pass."""
    model = fastvit.create_model(TINY, img_size=96, depth=6)
    for frozen in (model.patch_embed, *model.blocks[:3]):
        frozen.requires_grad_(False)
    model.pos_embed.requires_grad_(False)
    model.cls_token.requires_grad_(False)
    step = FitStep(ModuleSource(model), (96, 96), 32, Setting(dtype="float32", optimizer="none"), gpu=False)
    costs = costs_of(step)
    choices = costs.cheapest((costs.least_peak() + costs.peak([NOTHING] * 6)) // 2)
    assert choices[:3] == (NOTHING,) * 3
    assert costs.recomputed(choices) > 0
    assert Trace(step, choices).peak == pytest.approx(costs.peak(choices), rel=0.03)
