"""The planner of `fastvit.fit`: its search, the peaks that it plans, and what it says."""

import functools
import itertools
import random

import pytest
from library_imports import import_timm
from torch import nn

import fastvit
from fastvit import zoo
from fastvit.study.fitting import planning
from fastvit.study.fitting.choices import BLOCK, NOTHING, Choice, put_on
from fastvit.study.fitting.costs import Trace, blocks_of, costs_of
from fastvit.study.fitting.planning import fit, plan_fit
from fastvit.study.fitting.report import in_words
from fastvit.study.fitting.search import BlockCosts, Gap, StepCosts
from fastvit.study.memory.growth import checked_budget, measure
from fastvit.study.memory.step import Setting, StepSpec
from fastvit.study.sources.find import find, from_module

TINY = "vit_tiny_patch16_224"
PLAIN = Setting(dtype="float32", optimizer="none")
OPTIONS = [NOTHING, Choice(mlp="all"), Choice("qkv", "all"), BLOCK]


@pytest.fixture(autouse=True)
def _each_step_once(monkeypatch):
    """Several plans of one step in a test trace its costs once."""
    monkeypatch.setattr(planning, "costs_of", functools.cache(costs_of))


def drawn_costs(seed, uniform):
    draw = random.Random(seed)
    largest = draw.choice((2, 9, 10**9))  # FLOPs less than the ranks of five choices, or many

    def block():
        options = OPTIONS if uniform or draw.random() < 0.6 else [NOTHING, BLOCK]
        costs = {}
        for i, choice in enumerate(options):
            saved, forward, backward = draw.randint(1, 30), draw.randint(30, 50), draw.randint(0, 60)
            costs[choice] = BlockCosts(saved, forward, backward, i and draw.randint(1, largest))
        return costs

    blocks = [block()] * 5 if uniform else [block() for _ in range(5)]
    gaps = tuple(Gap(draw.randint(0, 5), draw.randint(0, 60)) for _ in blocks)
    late = tuple(draw.randint(0, 20) for _ in blocks)
    return StepCosts(tuple(blocks), gaps, late, draw.randint(0, 20), draw.randint(20, 60), 1000)


@pytest.mark.parametrize("uniform", [True, False])
def test_the_search_finds_what_trying_everything_finds(uniform):
    for seed in range(20):
        costs = drawn_costs(seed, uniform)
        every = [*itertools.product(*costs.blocks)]
        peaks, again = [*map(costs.peak, every)], [*map(costs.recomputed, every)]
        assert costs.least_peak() == min(peaks)
        for budget in (min(peaks) - 1, min(peaks), *sorted(peaks)[:: len(peaks) // 7]):
            cheapest = costs.cheapest(budget)
            least = min((flops for peak, flops in zip(peaks, again, strict=True) if peak <= budget), default=None)
            assert (None if cheapest is None else costs.recomputed(cheapest)) == least
            assert cheapest is None or costs.peak(cheapest) <= budget


class Keyword(nn.Module):
    """Calls its blocks by keyword."""

    def __init__(self):
        super().__init__()
        self.model = fastvit.create_model(TINY, img_size=96, depth=5)

    def forward(self, x):
        x = self.model._embedded(x)
        for block in self.model.blocks:
            x = block(x=x)
        return self.model.forward_head(self.model.norm(x))


def frozen():
    model = fastvit.create_model(TINY, img_size=96, depth=6)
    for part in (model.patch_embed, *model.blocks[:3]):
        part.requires_grad_(False)
    model.pos_embed.requires_grad_(False)
    model.cls_token.requires_grad_(False)
    return model


def swin():
    return import_timm().create_model("swin_tiny_patch4_window7_224", img_size=96, window_size=3, depths=(1, 1, 3, 1))


def zoo_model(name):
    return fastvit.create_model(name, img_size=64, depth=5)


@pytest.mark.parametrize(
    ("make", "gpu", "exact"),
    [
        (functools.partial(zoo_model, TINY), True, True),
        (functools.partial(zoo_model, "vit_small_patch16_dinov3"), False, True),
        (Keyword, False, False),
        (frozen, False, False),
        (swin, False, False),
    ],
)
def test_planned_costs_are_those_of_a_trace(make, gpu, exact):
    """Bytes and FLOPs of the whole step are the sums of what each block's choice costs: also with blocks by keyword,
    blocks without a backward pass, and stages with layers between them."""
    if gpu:
        pytest.importorskip("triton")
    size, batch = ((64, 64), 64) if exact else ((96, 96), 16)
    step = StepSpec(from_module(make()), size, batch, PLAIN, gpu)
    costs = costs_of(step)
    nothing = Trace(step, [NOTHING] * len(costs.blocks))
    assert (nothing.peak, nothing.flops) == (costs.peak(nothing.choices), costs.flops)
    for share in (0, 0.5):
        choices = costs.cheapest(int(costs.least_peak() * (1 - share) + nothing.peak * share))
        assert not exact or len({*choices}) > 1
        trace = Trace(step, choices)
        assert trace.peak == pytest.approx(costs.peak(choices), rel=0 if exact else 0.003)
        assert trace.flops - nothing.flops == pytest.approx(costs.recomputed(choices), rel=1e-3)
        assert trace.flops > nothing.flops


def test_a_plan_whose_peaks_are_too_low_gives_way(monkeypatch):
    """The search runs again for a lower budget until the traced peak fits, or says that there is no plan."""
    source = from_module(fastvit.create_model(TINY, img_size=64, depth=4))
    plan = functools.partial(plan_fit, StepSpec(source, (64, 64), 64, PLAIN, gpu=False))
    budget, more = plan(budget=1 << 40).frontier[8].peak, [10**6, 1]

    class Higher(Trace):
        def __init__(self, step, choices):
            super().__init__(step, choices)
            self.peak += more[0]
            more[0] *= more[1]

    monkeypatch.setattr(planning, "Trace", Higher)
    report = plan(budget=budget)
    assert report.fits
    assert report.peak <= budget
    assert 0 < report.least_recomputed < report.recomputed
    more[1] = 2
    with pytest.raises(ValueError, match="no plan for VisionTransformer"):
        plan(budget=budget)


def test_budgets_just_below_a_peak_that_the_search_takes_for_lower():
    """The first block, whose costs stand for those of its kind, lacks the stochastic depth of the others."""
    model = fastvit.create_model(TINY, img_size=32, depth=5, drop_path_rate=0.3)
    for name, p in model.blocks.named_parameters():
        p.requires_grad_("norm" in name)

    def planned(budget):
        return plan_fit(StepSpec(from_module(model), (32, 32), 16, PLAIN, gpu=False), budget)

    free = planned(1 << 40)
    assert free.alternatives[0].peak < free.peak
    for less in (1, 200):
        report = planned(free.peak - less)
        assert report.fits
        assert report.peak <= free.peak - less


def test_a_measured_peak_is_the_planned_one(monkeypatch):
    monkeypatch.setitem(zoo.CONFIGS, TINY, zoo.CONFIGS[TINY] | {"depth": 6})
    options = {"batch": 32, "image_size": 96, "dtype": "float32", "optimizer": "none", "device": "cpu"}
    most = fit(TINY, budget="1TB", **options).peak
    report = fit(TINY, budget=int(0.7 * most), **options)
    assert report.fits
    assert report.recomputed == report.least_recomputed > 0

    def make(provider, img_size):
        model = fastvit.create_model(TINY, img_size=img_size)
        for block, choice in zip(blocks_of(model).values(), report.choices, strict=True):
            put_on(block, choice)
        return model

    source = find(TINY)
    source.make = make
    measured = measure(StepSpec(source, (96, 96), 32, report.setting, gpu=False))
    assert abs(report.peak / measured - 1) < 0.03
    assert measured < 0.72 * most


def test_a_batch_that_does_not_fit_is_accumulated():
    step = StepSpec(from_module(fastvit.create_model(TINY, img_size=32, depth=2)), (32, 32), 256, PLAIN, gpu=False)
    plan = functools.partial(plan_fit, step)

    def least_peak(batch):
        return planning.costs_of(step._replace(batch=batch)).least_peak()

    budget = least_peak(256) * 3 // 4
    report = plan(budget=budget)
    assert not report.fits
    assert report.accumulation * report.micro_batch >= 256 > report.largest_batch >= report.micro_batch > 1
    assert report.peak <= budget
    assert least_peak(report.largest_batch) <= budget
    assert least_peak(report.largest_batch + 1) > budget
    alone = plan(budget=least_peak(2))
    assert (alone.accumulation, alone.micro_batch) == (0, alone.largest_batch)
    assert plan(budget=1 << 20).micro_batch == 0


def test_words():
    assert in_words([NOTHING] * 3) == "every block: nothing"
    chosen = [BLOCK, *[Choice("qkv", "all")] * 2, Choice(mlp="activation"), Choice("all")]
    assert in_words(chosen) == (
        "block 0: the whole block; blocks 1 to 2: q, k, v and fc1; block 3: the MLP's activation; block 4: q, k, v "
        "and attention"
    )


@pytest.mark.parametrize("budget", ["24", "24 apples", "-1GiB", 0, True, 2.5, None, 1 << 51])
def test_budgets(budget):
    assert checked_budget("24GiB") == 24 << 30
    assert checked_budget("1.5 kb") == checked_budget(1500) == 1500
    with pytest.raises(ValueError, match="budget must"):
        checked_budget(budget)
