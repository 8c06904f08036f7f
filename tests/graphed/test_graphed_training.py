"""`fastvit.graphs` in training: losses, gradients and parameters are those without graphs, bit by bit."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from graphed_models import assert_equal, replays
from host_recorder import HostRecorder
from library_models import hugging_face, output_of, vit
from torch import Tensor, nn

import fastvit
from fastvit.graphed import captured
from fastvit.study.fitting.choices import BLOCK, Choice, put_on

DROPOUT: dict[str, Any] = {
    "pos_drop_rate": 0.1, "proj_drop_rate": 0.2, "attn_drop_rate": 0.2, "drop_path_rate": 0.5
}  # fmt: skip


def ours(**options: Any) -> nn.Module:
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 5}
    return fastvit.VisionTransformer(**sizes, init_values=0.1, **options)  # type: ignore[arg-type]


def accelerated() -> nn.Module:
    model = vit(depth=2, drop_path_rate=0.3)
    assert fastvit.accelerate(model).accelerated
    return model


def frozen() -> nn.Module:
    model = ours()
    model.patch_embed.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    return model


def checkpointed() -> nn.Module:
    model = ours(**DROPOUT)
    model.set_grad_checkpointing()
    return model


def fitted() -> nn.Module:
    model = ours(**DROPOUT)
    put_on(model.blocks[0], Choice("all", "all"))
    put_on(model.blocks[1], BLOCK)
    return model


class TwoHeads(nn.Module):
    """Returns a dict with a tensor twice, a number, an output without gradient, and one that no loss reads. One layer
    is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.read, self.unread = nn.Linear(3072, 8), nn.Linear(8, 5), nn.Linear(8, 5)
        self.norm, self.unused = nn.BatchNorm1d(8), nn.Linear(8, 5)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        x = self.norm(self.body(x.flatten(1))) * scale
        out = self.read(x)
        unread, fixed = self.unread(x), out.detach() + 1
        return {"logits": out, "again": [out], "unread": unread, "most": out.argmax(1), "rows": len(x), "fixed": fixed}


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: ours(**DROPOUT),
    "accelerated": accelerated,
    "transformers": lambda: hugging_face("ViTForImageClassification"),
    "frozen": frozen,
    "checkpointed": checkpointed,
    "fitted": fitted,
    "two heads": TwoHeads,
}


def logits(out: Any) -> Tensor:
    return out["logits"] if isinstance(out, dict) and "logits" in out else output_of(out)


def pair(model: nn.Module, **options: Any) -> tuple[nn.Module, nn.Module, Any]:
    """A model, and a copy of it with graphs."""
    graphed = copy.deepcopy(model.train())
    return model, graphed, fastvit.graphs(graphed, **options)


def train(model: nn.Module, steps: int, **options: Any) -> list[Tensor]:
    """Steps of two micro batches; the learning rate changes, gradients are clipped, and scaled under autocast."""
    amp, none = options.pop("amp", False), options.pop("set_to_none", True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, **options)
    scaler = torch.amp.GradScaler("cpu", enabled=amp)
    generator, losses = torch.Generator().manual_seed(1), []
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad(set_to_none=none)
        for _ in range(2):
            images = torch.randn(4, 3, 32, 32, generator=generator)
            with torch.autocast("cpu", torch.bfloat16) if amp else nullcontext():
                loss = logits(model(images)).float().square().mean()
            scaler.scale(loss).backward()
            losses.append(loss.detach())
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.param_groups[0]["lr"] *= 0.7
    return losses


@pytest.mark.parametrize("name", MODELS)
def test_models_train_as_without_graphs(name: str, recorders: list[HostRecorder]) -> None:
    model, graphed, report = pair(MODELS[name]())
    expected, losses = train(model, 4), train(graphed, 4)
    assert all(map(torch.equal, losses, expected))
    assert_equal(model, graphed)
    assert [g.replays for g in report.graphs] == [6]
    assert not report.reasons
    assert len(recorders) == 1


@pytest.mark.parametrize(
    "options", [{"amp": True}, {"set_to_none": False}, {"fused": True}, {"foreach": True}], ids=lambda o: next(iter(o))
)
def test_loops_train_as_without_graphs(options: dict[str, Any]) -> None:
    model, graphed, report = pair(ours(**DROPOUT))
    assert all(map(torch.equal, train(graphed, 4, **options), train(model, 4, **options)))
    assert_equal(model, graphed)
    assert len(report.graphs) == 1


def test_groups_of_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under DistributedDataParallel a gradient is there as soon as its group is computed, and later ones are not."""
    monkeypatch.setattr(captured, "_GROUP_BYTES", 20_000)
    monkeypatch.setattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", object())
    model, graphed, _ = pair(ours())
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
    assert sorted({*group_of.values()}) == [*range(1, 8)]
    assert group_of["head.weight"] == 1
    assert group_of["patch_embed.proj.weight"] >= 6
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


def grads(model: nn.Module, backward: Callable[[nn.Module], Any]) -> list[Tensor | None]:
    model.zero_grad()
    torch.manual_seed(7)
    extra = backward(model)
    return [*(p.grad for p in model.parameters()), *(extra if extra is not None else ())]


def image(seed: int = 2) -> Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def two_views(model: nn.Module) -> None:
    a, b = logits(model(image(2))), logits(model(image(3)))
    (a - b).square().sum().backward()


def with_validation(model: nn.Module) -> None:
    loss = logits(model(image())).square().sum()
    with torch.no_grad():
        model(image(3))
    loss.backward()


def twice(model: nn.Module) -> None:
    loss = logits(model(image())).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def of_gradients(model: nn.Module) -> list[Tensor]:
    x = image().requires_grad_()
    out = logits(model(x))
    (g,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    (out.sum() + g.square().sum()).backward()
    return [g.detach(), x.grad]


def of_parts(model: nn.Module) -> list[Tensor]:
    x = image().requires_grad_()
    loss = logits(model(x)).square().sum()
    return [*torch.autograd.grad(loss, [x, next(model.parameters())], retain_graph=True), *torch.autograd.grad(loss, x)]


def batched(model: nn.Module) -> list[Tensor]:
    out = logits(model(image()))
    eye = torch.eye(out.numel()).view(-1, *out.shape)
    return [*torch.autograd.grad(out, list(model.parameters())[:1], eye, is_grads_batched=True)]


def mapped(model: nn.Module) -> list[Tensor]:
    out, weight = logits(model(image())), next(model.parameters())
    ones = torch.eye(out.numel()).view(-1, *out.shape)
    return [torch.func.vmap(lambda v: torch.autograd.grad(out, weight, v, retain_graph=True)[0])(ones)]


def another_output(model: nn.Module) -> None:
    model(image())["unread"].sum().backward()


def expanded(model: nn.Module) -> None:
    model(image()[:1].expand(2, -1, -1, -1))["logits"].sum().backward()


def forgotten(model: nn.Module) -> None:
    """Calls whose gradients no one can ask for any more."""
    for seed in range(6):
        model(image(seed))
    logits(model(image())).sum().backward()


def again_later(model: nn.Module) -> None:
    """Reentrant checkpointing around the model: forward without gradients, then with them."""
    x = image().requires_grad_()
    torch.utils.checkpoint.checkpoint(lambda x: logits(model(x)), x, use_reentrant=True).square().sum().backward()


PASSES = [
    two_views, with_validation, twice, of_gradients, of_parts, batched, mapped, another_output, expanded, forgotten,
    again_later,
]  # fmt: skip


@pytest.mark.parametrize("backward", PASSES, ids=lambda f: f.__name__)
def test_backward_passes(backward: Callable[[nn.Module], Any]) -> None:
    """The usual call is captured before, and these passes come again when all that is new in them is captured."""
    model, graphed, report = pair(TwoHeads())
    for _ in range(3):
        logits(graphed(image())).square().sum().backward()
        logits(model(image())).square().sum().backward()
    for _ in range(4):
        for got, expected in zip(grads(graphed, backward), grads(model, backward), strict=True):
            assert (got is None) == (expected is None)
            assert got is None or torch.equal(got, expected)
    assert_equal(model, graphed)
    assert report.graphs


def test_outputs_want_gradients_as_without_graphs() -> None:
    model, graphed, _ = pair(TwoHeads())
    for _ in range(4):
        outputs = model(image()), graphed(image())
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
            out = model(image())
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


class WithLeaves(nn.Module):
    """Also returns leaves: a parameter, and its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.linear(x), self.scale, x


@pytest.mark.parametrize("always", [True, False])
def test_outputs_that_are_leaves(always: bool) -> None:
    model, graphed, report = pair(WithLeaves())
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
            out = model(image(i))
            (out["logits"].sum() + (out["unread"].sum() if i > 3 else 0)).backward()
        for name, t in models[0].state_dict().items():
            torch.testing.assert_close(models[1].state_dict()[name], t)


class Tied(nn.Module):
    """Uses its weight and its input twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.relu(self.linear(x))) + self.other(x)


@pytest.mark.parametrize("first", [nn.Identity, nn.Tanh], ids=["a leaf", "a result"])
@pytest.mark.parametrize("cache", [True, False])
def test_what_is_used_twice_under_autocast(first: type[nn.Module], cache: bool) -> None:
    """Autocast casts a leaf once, and adds the gradients of its uses before it casts them back."""
    model, graphed, report = pair(Tied())
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
                loss = each(image()).float().square().mean()
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
    model = ours()
    fastvit.graphs(model)
    for _ in range(3):
        model(image()).sum().backward()
    loss = model(image()).sum()
    if before is not None:
        loss.backward(**before)
    change(model)
    with pytest.raises(RuntimeError, match=message):
        loss.backward()
