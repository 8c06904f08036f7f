"""`fastvit.graphs`: calls that run as without graphs, with one warning that gives the reason."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from graphed_models import IMAGE, check, ours, replays, runs_plainly
from host_recorder import HostRecorder
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fastvit
from fastvit.graphed import graphed_parts


class Odd(nn.Module):
    """Does in a call what no graph can do."""

    def __init__(self, do: Callable[["Odd", Tensor], Any]) -> None:
        super().__init__()
        self.do, self.linear, self.calls = do, nn.Linear(32, 4), 0

    def forward(self, x: Tensor, option: Any = None) -> Any:
        self.do(self, x)
        return self.linear(x).sum((1, 2))


def set_attribute(m: Odd, x: Tensor) -> None:
    m.calls += 1


def set_buffer(m: Odd, x: Tensor) -> None:
    m.register_buffer("mean", x.mean())


def of_numpy(m: Odd, x: Tensor) -> None:
    np.random.rand()


ODD: dict[str, tuple[Callable[[Odd, Tensor], Any], str]] = {
    "numpy": (of_numpy, "random numbers on the host"),
    "host": (lambda m, x: random.random(), "random numbers on the host"),
    "in place": (lambda m, x: x.add_(1), "arguments in place"),
    "attribute": (set_attribute, "changes too often"),
    "buffer": (set_buffer, "changes too often"),
}


@pytest.mark.parametrize("name", ODD)
def test_models_that_no_graph_runs(name: str) -> None:
    do, reason = ODD[name]
    model = Odd(do)
    with torch.no_grad():
        runs_plainly(model, lambda: model(IMAGE.clone()), reason, calls=120)


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def with_mode(call: Callable[[], Any]) -> None:
    with Mode():
        call()


def with_saved_hooks(call: Callable[[], Any]) -> None:
    with torch.autograd.graph.save_on_cpu(), torch.enable_grad():
        call().sum().backward()


def with_device(call: Callable[[], Any]) -> None:
    with torch.device("cpu"):
        call()


def with_transform(call: Callable[[], Any]) -> None:
    torch.func.vmap(lambda _: call())(torch.zeros(2))


@pytest.mark.parametrize("around", [with_mode, with_transform, with_device, with_saved_hooks], ids=lambda f: f.__name__)
def test_calls_that_something_sees(around: Callable[[Callable[[], Any]], Any]) -> None:
    """After the capture too, and replays go on afterwards."""
    model = ours()
    report = fastvit.graphs(model)
    with torch.no_grad():
        check(model, copy.deepcopy(model), IMAGE)
    if around in (with_saved_hooks, with_device):
        reason = "hooks see what is saved" if around is with_saved_hooks else "torch.set_default_device"
        runs_plainly(model, lambda: around(lambda: model(IMAGE)), reason)
    else:
        with torch.no_grad():
            around(lambda: model(IMAGE))
        assert not report.reasons
    assert replays(report) == [2]
    with torch.no_grad():
        model(IMAGE)
    assert replays(report) == [3]


def test_hooks() -> None:
    model = ours()
    seen: list[None] = []
    handle = model.blocks[0].register_forward_hook(lambda *_: seen.append(None))
    with torch.no_grad():
        runs_plainly(model, lambda: model(IMAGE), "hooks on modules in it")
        assert len(seen) == 5
        handle.remove()
        with nn.modules.module.register_module_forward_hook(lambda *_: None):
            model(IMAGE)
        for _ in range(3):
            model(IMAGE)
    (part,) = graphed_parts(model)
    assert len(part.captured) == 1
    assert part.reasons.total() == 6


class Returns:
    """A class that pytree does not know."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Wraps(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(4, 4)
        self.listed = [self.linear.weight, nn.Linear(4, 4)]
        if kind == "alone":
            self.linear.requires_grad_(False)

    def forward(self, x: Tensor, state: Any = None) -> Any:
        if self.kind == "returns":
            return Returns(self.linear(x))
        if self.kind in ("outside", "alone"):
            return self.listed[1](self.linear(x))  # type: ignore[operator]
        return self.linear(x) * (1 if state is None else state.value)


def train_once(model: nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward()
    assert model.listed[1].weight.grad is not None  # type: ignore[index]
    model.listed[1].zero_grad()  # type: ignore[index]


@pytest.mark.parametrize(
    ("kind", "call", "reason"),
    [
        ("returns", lambda m: m(torch.ones(2, 4)), "returns a Returns"),
        ("state", lambda m: m(torch.ones(2, 4), Returns(2)), "an argument is a Returns"),
        ("sparse", lambda m: m(torch.ones(2, 4).to_sparse()), "a sparse or nested tensor"),
        ("outside", train_once, "no parameter of a module in it"),
        ("alone", train_once, "no parameter of a module in it"),
    ],
)
def test_what_graphs_cannot_hold(kind: str, call: Callable[[nn.Module], Any], reason: str) -> None:
    model = Wraps(kind)
    with torch.set_grad_enabled(call is train_once):
        runs_plainly(model, lambda: call(model), reason)


def test_arguments_of_inference_mode_changed_in_place() -> None:
    model = Odd(lambda m, x: x.add_(1))
    with torch.inference_mode():
        x = torch.zeros(2, 3, 32, 32)
        runs_plainly(model, lambda: model(x), "arguments in place")
        assert x.eq(5).all()


def test_no_backward_pass() -> None:
    model = ours()
    runs_plainly(model, lambda: model(IMAGE), "no backward pass came")


def test_an_operation_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostRecorder, "waits", "model.py:7")
    model = ours()
    with torch.no_grad():
        runs_plainly(model, lambda: model(IMAGE), "model.py:7 waits for the GPU")


def test_a_capture_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only calls of this kind run plainly from then on."""
    monkeypatch.setattr(HostRecorder, "refuses", "no")
    model = ours()
    report = fastvit.graphs(model)
    with torch.no_grad():
        runs_plainly(model, lambda: model(IMAGE), "capture failed")
        monkeypatch.setattr(HostRecorder, "refuses", None)
        for _ in range(3):
            model(IMAGE[:1])
    assert replays(report) == [1]
    assert report.reasons == {next(iter(report.reasons)): 3}


def test_many_calls_wait_for_their_backward_passes() -> None:
    model = ours().train()
    fastvit.graphs(model)
    for _ in range(3):
        model(IMAGE).sum().backward()
    with pytest.warns(UserWarning, match="4 earlier calls wait"):
        outputs = [model(IMAGE) for _ in range(5)]
    model.zero_grad()
    sum(out.sum() for out in outputs).backward()
    plain = ours().train()
    plain.load_state_dict(model.state_dict())
    (5 * plain(IMAGE).sum()).backward()
    torch.testing.assert_close(model.head.weight.grad, plain.head.weight.grad)
