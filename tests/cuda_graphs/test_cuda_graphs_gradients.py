"""`fastvit.graphs`: backward passes of every kind, and hooks of what they compute gradients of."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda_graphs_models import (
    DROPOUT,
    IMAGE,
    TwoHeads,
    assert_equal,
    assert_passes_agree,
    image,
    logits,
    of_gradients,
    ours,
    pair,
    replays,
    runs_plainly,
    twice,
    two_views,
    with_validation,
)
from graph_models import FunctionModule
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import fastvit
from fastvit.cuda_graphs.captured import Call


def of_parts(model: nn.Module) -> list[Tensor]:
    x = image(model).requires_grad_()
    loss = logits(model(x)).square().sum()
    return [*torch.autograd.grad(loss, [x, next(model.parameters())], retain_graph=True), *torch.autograd.grad(loss, x)]


def batched(model: nn.Module) -> list[Tensor]:
    out = logits(model(IMAGE))
    eye = torch.eye(out.numel()).view(-1, *out.shape)
    return [*torch.autograd.grad(out, list(model.parameters())[:1], eye, is_grads_batched=True)]


def mapped(model: nn.Module) -> list[Tensor]:
    out, weight = logits(model(IMAGE)), next(model.parameters())
    ones = torch.eye(out.numel()).view(-1, *out.shape)
    return [torch.func.vmap(lambda v: torch.autograd.grad(out, weight, v, retain_graph=True)[0])(ones)]


def another_output(model: nn.Module) -> None:
    model(IMAGE)["unread"].sum().backward()


def expanded(model: nn.Module) -> None:
    model(IMAGE[:1].expand(2, -1, -1, -1))["logits"].sum().backward()


def forgotten(model: nn.Module) -> None:
    """Calls whose gradients no one can ask for any more."""
    for seed in range(6):
        model(image(model, seed))
    logits(model(IMAGE)).sum().backward()


def again_later(model: nn.Module) -> None:
    """Reentrant checkpointing around the model: forward without gradients, then with them."""
    x = image(model).requires_grad_()
    torch.utils.checkpoint.checkpoint(lambda x: logits(model(x)), x, use_reentrant=True).square().sum().backward()


PASSES = [
    two_views, with_validation, twice, of_gradients, of_parts, batched, mapped, another_output, expanded, forgotten,
    again_later,
]  # fmt: skip


@pytest.mark.parametrize("backward", PASSES, ids=lambda f: f.__name__)
def test_backward_passes(backward: Callable[[nn.Module], Any]) -> None:
    assert_passes_agree(TwoHeads(), backward)


def test_outputs_want_gradients_as_without_graphs() -> None:
    model, graphed, _ = pair(TwoHeads())
    for _ in range(4):
        outputs = model(IMAGE), graphed(IMAGE)
        wants = [{name: t.requires_grad for name, t in out.items() if isinstance(t, Tensor)} for out in outputs]
        assert wants[0] == wants[1] == {"logits": True, "unread": True, "most": False, "fixed": False}
        outputs[1]["logits"].sum().backward()


def hooked(model: nn.Module, seen: list[str]) -> None:
    """Hooks that write down the parameter, and that cannot take None."""
    for name, p in model.named_parameters():
        p.register_hook(lambda g, name=name: seen.append(f"{name} {tuple(g.shape)}"))
        p.register_post_accumulate_grad_hook(lambda p, name=name: seen.append(f"{name} {tuple(p.grad.shape)} is there"))


def test_hooks_of_parameters_without_a_gradient_are_not_called() -> None:
    """Neither of those that a call does not use, nor of those of an output that a loss does not read; both if it does,
    and then its gradient is added to that of the others."""
    models = pair(TwoHeads())[:2]
    seen: tuple[list[str], list[str]] = [], []
    for model, names in zip(models, seen, strict=True):
        hooked(model, names)
    for read in (["logits"], ["logits"], ["logits"], ["logits"], ["unread"], ["logits", "unread"], ["logits"]):
        for model, names in zip(models, seen, strict=True):
            model.zero_grad()
            out = model(IMAGE)
            if model is models[0] and len(read) == 2:  # in two passes: which one is added first makes no difference
                out["logits"].sum().backward(retain_graph=True)
                out["unread"].sum().backward()
                names[:] = dict.fromkeys(names)
            else:
                sum(out[name].sum() for name in read).backward()
        assert sorted(seen[0]) == sorted(seen[1])
        assert any("unread" in name for name in seen[0]) == ("unread" in read)
        assert_equal(*models)
        seen[0].clear(), seen[1].clear()


class Scaled(nn.Module):
    """Computes one output from another, and divides by a running scale."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.linear(x) / self.scale.clone()
        with torch.no_grad():
            self.scale.mul_(0.9).add_(features.abs().mean(), alpha=0.1)
        return features, self.head(features.relu())


def test_an_output_that_another_is_computed_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradient from within the model is none from outside, as the first replay tells. What is computed again has
    the buffers that the forward pass had."""
    recomputed: list[int] = []
    recompute = Call._recompute
    monkeypatch.setattr(Call, "_recompute", lambda *args: (recomputed.append(1), recompute(*args))[1])
    model, graphed, report = pair(Scaled())

    def step(*passes: list[int]) -> int:
        """Return how many passes computed the forward pass again. passes: the outputs that each reads."""
        recomputed.clear()
        x = torch.randn(4, 8)
        for each in (model, graphed):
            each.zero_grad()
            outputs = each(x)
            for read in passes:
                sum(outputs[i].square().sum() for i in read).backward(retain_graph=True)
        for p, q in zip(model.parameters(), graphed.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)  # of two passes, added in another order
        return len(recomputed)

    assert [step([1]) for _ in range(5)] == [0, 0, 1, 0, 0], "captured for the one that is read"
    assert (step([0]), step([1], [0]), step([1], [1]), step([0, 1]), step([1])) == (1, 1, 1, 1, 0)
    assert replays(report) == [7]
    model, graphed, report = pair(Scaled())
    assert [step([0, 1]) for _ in range(5)] == [0, 0, 0, 0, 0], "both are read"
    assert_equal(model, graphed)


@pytest.mark.parametrize("looks", [Tensor.retain_grad, lambda t: t.register_hook(lambda g: g * 2)])
def test_the_gradient_of_an_output_with_respect_to_another(looks: Callable[[Tensor], Any]) -> None:
    model, graphed, report = pair(Scaled())

    def step() -> None:
        x, seen = torch.randn(4, 8), []
        for each in (model, graphed):
            each.zero_grad()
            features, out = each(x)
            looks(features)
            (out.square().sum() + features.sum()).backward()
            seen.append(features.grad if features.retains_grad else None)
        assert_equal(model, graphed)
        assert seen[0] is seen[1] is None or torch.equal(*seen)

    reason = "the gradient of one output with respect to another"
    step()
    with pytest.warns(UserWarning, match=reason):
        step()
    for _ in range(3):
        step()
    assert reason in str(report).replace("\n        ", " ")


def test_a_result_in_warm_ups_is_the_models_own() -> None:
    """It may be changed in place."""
    model, graphed, report = pair(Scaled())
    for _ in range(5):
        x = torch.randn(4, 8)
        for each in (model, graphed):
            each.zero_grad()
            out = each(x)[1]
            out.mul_(2).square().sum().backward()
        assert_equal(model, graphed)
    assert replays(report) == [2]


def updates_a_frozen_copy(m: Any, x: Tensor) -> Tensor:
    """By `.data`, as contrastive learning does."""
    for key, query in zip(m.key.parameters(), m.query.parameters(), strict=True):
        key.data.mul_(0.5).add_(query.data, alpha=0.5)
    return m.query(x) * m.key(x)


def test_parameters_that_the_forward_pass_changes() -> None:
    key = nn.Linear(8, 8).requires_grad_(False)
    model = FunctionModule(updates_a_frozen_copy, query=nn.Linear(8, 8), key=key)
    runs_plainly(model, lambda: model(torch.ones(2, 8)).sum().backward(), "changes tensors of the model in place")


class Flips(nn.Module):
    """A hook on a tensor inside changes the model, which no replay does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.flag = nn.Linear(8, 8), False

    def flip(self, _: Tensor) -> None:
        self.flag = not self.flag

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        x.register_hook(self.flip)
        return x * (2 if self.flag else 1)


def test_a_backward_pass_that_changes_the_model() -> None:
    model = Flips()
    runs_plainly(
        model, lambda: model(torch.ones(2, 8)).sum().backward(), "its backward pass changes the model", calls=8
    )
    assert not model.flag, "called every time"


@pytest.mark.parametrize("always", [True, False])
def test_outputs_that_are_leaves(always: bool) -> None:
    """A parameter, and the input."""
    layers = {"linear": nn.Linear(4, 4), "scale": nn.Parameter(torch.ones(4))}
    model, graphed, report = pair(FunctionModule(lambda m, x: (m.linear(x), m.scale, x), **layers))
    for i in range(6):
        gradients = []
        for each in (model, graphed):
            x = torch.ones(2, 4, requires_grad=True)
            each.zero_grad()
            sum(out.square().sum() for out in each(x)[: 3 if always or i > 3 else 1]).backward()
            gradients.append(x.grad)
        assert_equal(model, graphed)
        assert torch.equal(*gradients)
    assert replays(report) == [4]


@pytest.mark.parametrize("first", [nn.Identity, nn.Tanh], ids=["a leaf", "a result"])
@pytest.mark.parametrize("cache", [True, False])
def test_what_is_used_twice_under_autocast(first: type[nn.Module], cache: bool) -> None:
    """A weight and the input. Autocast casts a leaf once, and adds the gradients of its uses before it casts them
    back."""
    layers = {"linear": nn.Linear(16, 16), "other": nn.Linear(16, 16)}
    tied = FunctionModule(lambda m, x: m.linear(torch.relu(m.linear(x))) + m.other(x), **layers)
    model, graphed, report = pair(tied)
    for _ in range(6):
        x, gradients = torch.randn(8, 16), []
        for each in (model, graphed):
            leaf = x.clone().requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
                loss = each(first()(leaf)).float().square().mean()
            for retain in (True, False):
                gradients.append(torch.autograd.grad(loss, [leaf, *each.parameters()], retain_graph=retain))
        for got, expected in zip(gradients[:2], gradients[2:], strict=True):
            assert all(map(torch.equal, got, expected))
    assert replays(report) == [4]


def test_a_second_backward_pass_draws_and_casts_as_the_forward_pass_did() -> None:
    model, graphed, report = pair(ours(**DROPOUT))
    for step in range(5):
        for each in (model, graphed):
            torch.manual_seed(step)
            with torch.autocast("cpu", torch.bfloat16):
                loss = each(IMAGE).float().square().mean()
            torch.rand(3)
            loss.backward(retain_graph=True)
            loss.backward()
        assert_equal(model, graphed)
    assert replays(report) == [3]


@torch.no_grad()
def double_head(model: nn.Module) -> None:
    model.head.weight.mul_(2)  # type: ignore[union-attr,operator]


@pytest.mark.parametrize(
    ("before", "change", "message"),
    [
        (None, double_head, "modified in place"),
        ({}, nn.Module.zero_grad, "second time"),
        ({"retain_graph": True}, nn.Module.eval, "the model has changed"),
    ],
)
def test_errors_of_backward_passes(
    before: dict[str, bool] | None, change: Callable[[nn.Module], Any], message: str
) -> None:
    """before: options of an earlier backward pass, or None without one."""
    model = ours().train()
    fastvit.graphs(model)
    for _ in range(3):
        model(IMAGE).sum().backward()
    loss = model(IMAGE).sum()
    if before is not None:
        loss.backward(**before)
    change(model)
    with pytest.raises(RuntimeError, match=message):
        loss.backward()


def test_a_call_that_waits_holds_the_memory_that_its_graphs_read() -> None:
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    model.table = torch.ones(4)  # type: ignore[assignment]
    report = fastvit.graphs(model)
    for _ in range(3):
        model(x).sum().backward()
    out, memory = model(x), StorageWeakRef(model.table.untyped_storage())  # type: ignore[union-attr,operator]
    model.table = torch.ones(4)  # type: ignore[assignment]
    assert replays(report) == [2]
    assert not memory.expired()
    out.sum().backward()
    del out
    assert memory.expired()
