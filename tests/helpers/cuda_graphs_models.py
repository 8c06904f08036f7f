"""Models for the tests of `fastvit.graphs`, how they are trained, and what is compared of them."""

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graph_models import FunctionModule
from library_models import output_of
from torch import Tensor, nn

import fastvit
from fastvit.cuda_graphs import graphed_parts

IMAGE = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))
SIZES: dict[str, Any] = {
    "img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5
}  # fmt: skip
DROPOUT: dict[str, Any] = {
    "pos_drop_rate": 0.1, "proj_drop_rate": 0.2, "attn_drop_rate": 0.2, "drop_path_rate": 0.5
}  # fmt: skip


def ours(**options: Any) -> fastvit.VisionTransformer:
    return fastvit.VisionTransformer(**{**SIZES, **options}).eval()


def frozen(model: Any) -> nn.Module:
    """Freeze the first parts of a ViT."""
    model.patch_embed.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    return model


def checkpointed(model: Any) -> nn.Module:
    model.set_grad_checkpointing()
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


def reads(held: Any, read: Callable[[Tensor, Any], Tensor]) -> nn.Module:
    """Return a model that computes with what it holds: a function of its input and of that object."""
    return FunctionModule(lambda m, x: read(m.linear(x), m.held), linear=nn.Linear(4, 4), held=held)


class Ends(nn.Module):
    """Does something in a capture, of its forward or its backward pass, that ends it."""

    def __init__(self, way: Callable[[Tensor], object], where: str) -> None:
        super().__init__()
        self.body, self.way, self.where = nn.Linear(3072, 8), way, where

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.body(x.flatten(1)), training=self.training)
        if self.where == "forward":
            self.end(x)
        elif x.requires_grad:
            x.register_hook(self.end)
        return 2 * x

    def end(self, x: Tensor) -> None:
        if torch.cuda.is_current_stream_capturing():
            self.way(x)


def check(model: nn.Module, plain: nn.Module, *args: Any, calls: int = 4, **kwargs: Any) -> None:
    """Every call has the results of the model without graphs."""
    for _ in range(calls):
        torch.testing.assert_close(model(*args, **kwargs), plain(*args, **kwargs), rtol=0, atol=0)


def replays(report: Any) -> list[int]:
    return [graph.replays for graph in report.graphs]


def runs_plainly(model: nn.Module, call: Callable[[], Any], reason: str, calls: int = 5) -> None:
    """With one warning for all calls."""
    report = fastvit.graphs(model) if not any(graphed_parts(model)) else None
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(calls):
            call()
    messages = [str(w.message) for w in seen if "fastvit.graphs" in str(w.message)]
    assert len(messages) == 1
    assert reason in messages[0]
    assert report is None or (not report.graphs and reason in " ".join(str(report).split()))


# ---- training ----


def pair(model: nn.Module, training: bool = True, **options: Any) -> tuple[nn.Module, nn.Module, Any]:
    """A model, a copy of it with graphs, and their report."""
    graphed = copy.deepcopy(model.train(training))
    return model, graphed, fastvit.graphs(graphed, **options)


def image(model: nn.Module, seed: int = 2) -> Tensor:
    """Draw two images, and put them where the model is."""
    of = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, 32, 32, generator=of).to(next(model.parameters()).device)


def logits(out: Any) -> Tensor:
    return out["logits"] if isinstance(out, dict) and "logits" in out else output_of(out)


def train(model: nn.Module, steps: int = 4, **options: Any) -> list[Tensor]:
    """Steps of two micro batches; the learning rate changes, gradients are clipped, and scaled under autocast."""
    amp, none = options.pop("amp", False), options.pop("set_to_none", True)
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, **options)
    scaler = torch.amp.GradScaler(device.type, enabled=amp)
    generator, losses = torch.Generator().manual_seed(1), []
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad(set_to_none=none)
        for _ in range(2):
            images = torch.randn(4, 3, 32, 32, generator=generator).to(device)
            with torch.autocast(device.type, torch.bfloat16) if amp else nullcontext():
                loss = logits(model(images)).float().square().mean()
            scaler.scale(loss).backward()
            losses.append(loss.detach())
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.param_groups[0]["lr"] *= 0.7
    return losses


def assert_equal(model: nn.Module, graphed: nn.Module) -> None:
    """Parameters, buffers and gradients."""
    state, other = model.state_dict(), graphed.state_dict()
    assert [name for name, t in state.items() if not torch.equal(t, other[name])] == []
    for (name, p), q in zip(model.named_parameters(), graphed.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or torch.equal(p.grad, q.grad), name


def assert_trains_as_without(model: nn.Module, **options: Any) -> Any:
    """Losses, gradients and parameters are those without graphs, bit by bit. Return the report."""
    model, graphed, report = pair(model)
    assert all(map(torch.equal, train(graphed, **options), train(model, **options)))
    assert_equal(model, graphed)
    return report


# ---- backward passes: each returns gradients next to those of the parameters, if there are any ----


def two_views(model: nn.Module) -> None:
    a, b = logits(model(image(model))), logits(model(image(model, 3)))
    (a - b).square().sum().backward()


def with_validation(model: nn.Module) -> None:
    loss = logits(model(image(model))).square().sum()
    with torch.no_grad():
        model(image(model, 3))
    loss.backward()


def twice(model: nn.Module) -> None:
    loss = logits(model(image(model))).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def of_gradients(model: nn.Module) -> list[Tensor]:
    x = image(model).requires_grad_()
    out = logits(model(x))
    (g,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    (out.sum() + g.square().sum()).backward()
    return [g.detach(), x.grad]


def assert_passes_agree(of: nn.Module, backward: Callable[[nn.Module], Any]) -> None:
    """The usual call is captured before, and these passes come again when all that is new in them is captured."""
    model, graphed, report = pair(of)
    for _ in range(3):
        for each in (model, graphed):
            torch.manual_seed(6)
            logits(each(image(each))).square().sum().backward()
    with pytest.warns(UserWarning, match="create_graph") if backward is of_gradients else nullcontext():
        for _ in range(4):
            results = []
            for each in (graphed, model):
                each.zero_grad()
                torch.manual_seed(7)
                more = backward(each)
                results.append([*(p.grad for p in each.parameters()), *(more or ())])
            for got, expected in zip(*results, strict=True):
                assert (got is None) == (expected is None)
                assert got is None or torch.equal(got, expected)
    assert_equal(model, graphed)
    assert report.graphs
