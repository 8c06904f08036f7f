"""`fastvit.graphs` in training: losses, gradients and parameters are those without graphs, bit by bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda_graphs_models import (
    DROPOUT,
    TwoHeads,
    assert_equal,
    assert_trains_as_without,
    checkpointed,
    frozen,
    ours,
    pair,
    train,
)
from host_recorder import HostRecorder
from library_models import hugging_face, vit
from torch import Tensor, nn

import fastvit
from fastvit.cuda_graphs import captured
from fastvit.study.fitting.choices import BLOCK, Choice, put_on


def accelerated() -> nn.Module:
    model = vit(depth=2, drop_path_rate=0.3)
    assert fastvit.accelerate(model).accelerated
    return model


def fitted() -> nn.Module:
    model = ours(**DROPOUT)
    put_on(model.blocks[0], Choice("all", "all"))
    put_on(model.blocks[1], BLOCK)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: ours(**DROPOUT),
    "accelerated": accelerated,
    "transformers": lambda: hugging_face("ViTForImageClassification"),
    "frozen": lambda: frozen(ours()),
    "checkpointed": lambda: checkpointed(ours(**DROPOUT)),
    "fitted": fitted,
    "two heads": TwoHeads,
}


@pytest.mark.parametrize("name", MODELS)
def test_models_train_as_without_graphs(name: str, recorders: list[HostRecorder]) -> None:
    report = assert_trains_as_without(MODELS[name]())
    assert [g.replays for g in report.graphs] == [6]
    assert not report.reasons
    assert len(recorders) == 1


@pytest.mark.parametrize(
    "options", [{"amp": True}, {"set_to_none": False}, {"fused": True}, {"foreach": True}], ids=lambda o: next(iter(o))
)
def test_loops_train_as_without_graphs(options: dict[str, Any]) -> None:
    assert len(assert_trains_as_without(ours(**DROPOUT), **options).graphs) == 1


def test_groups_of_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under DistributedDataParallel a gradient is there as soon as its group is computed, and later ones are not."""
    monkeypatch.setattr(captured, "_GROUP_BYTES", 20_000)
    monkeypatch.setattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", object())
    model, graphed, _ = pair(ours(depth=3))
    train(model, 2), train(graphed, 2)
    order: list[tuple[str, int]] = []
    for name, p in graphed.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: order.append((name, made.replays)))
    (made,) = HostRecorder.made
    before = made.replays + 1  # the forward pass
    train(graphed, 1), train(model, 1)
    assert_equal(model, graphed)
    half = len(order) // 2
    group_of = {name: replays - before for name, replays in order[:half]}
    assert sorted({*group_of.values()}) == [*range(1, 6)]
    assert group_of["head.weight"] == 1
    assert group_of["patch_embed.proj.weight"] == 4
    assert order == sorted(order, key=lambda one: one[1])


def test_ddp_with_a_parameter_that_has_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """DistributedDataParallel(find_unused_parameters=True) finds it in autograd's graph of a call without graphs."""
    monkeypatch.setattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", object())
    model, graphed, report = pair(TwoHeads())
    with pytest.warns(UserWarning, match="a parameter has no gradient"):
        train(graphed, 2)
    train(model, 2)
    assert_equal(model, graphed)
    assert not report.graphs


def test_gradients_are_copies() -> None:
    """A gradient that is kept, and one that a hook sees, are not those of later steps; hooks run once."""
    model = ours()
    fastvit.graphs(model)
    seen: list[Tensor] = []
    model.head.bias.register_hook(seen.append)
    outputs = []
    for _ in range(5):
        outputs.append(model(torch.randn(2, 3, 32, 32)))
        outputs[-1].square().sum().backward()
    total = torch.zeros(5)
    for g in seen:
        total += g
    assert len(seen) == 5
    assert len({g.data_ptr() for g in seen}) == 5
    torch.testing.assert_close(model.head.bias.grad, total)
    assert len({out.data_ptr() for out in outputs}) == 5
    assert all(out.isfinite().all() for out in outputs)


def test_an_optimizer_in_hooks_of_gradients() -> None:
    """It has changed parameters when the part of an output that was not expected computes again."""
    models = pair(TwoHeads())[:2]

    def step(p: Tensor) -> None:
        p.data.sub_(p.grad, alpha=0.01)
        with torch.no_grad():
            p.add_(0)  # which counts as a change
        p.grad = None

    for model in models:
        model.norm = nn.Identity()
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
    for i in range(6):
        for model in models:
            out = model(torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(i)))
            (out["logits"].sum() + (out["unread"].sum() if i > 3 else 0)).backward()
        for name, t in models[0].state_dict().items():
            torch.testing.assert_close(models[1].state_dict()[name], t)
