"""`fastvit.graphs`: calls that run as without graphs, with one warning that gives the reason."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cuda_graphs_models import IMAGE, check, ours, replays, runs_plainly
from host_recorder import HostRecorder
from models import Calls
from torch import Tensor, nn

import fastvit
from fastvit.cuda_graphs import graphed_parts


class Returns:
    """A class that pytree does not know."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Odd(nn.Module):
    """Does in a call what no graph can do: a function of the module, its input and what would be its result."""

    def __init__(self, do: Callable[["Odd", Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.do, self.linear, self.calls, self.flag = do, nn.Linear(4, 4), 0, False
        self.outside = [nn.Linear(4, 4)]

    def forward(self, x: Tensor, option: Any = None) -> Any:
        out = self.linear(x)
        result = self.do(self, x, out)
        return out if result is None else result


def draw(m: Odd, x: Tensor, out: Tensor) -> None:
    random.random()


def draw_of_numpy(m: Odd, x: Tensor, out: Tensor) -> None:
    np.random.rand()


def write(m: Odd, x: Tensor, out: Tensor) -> None:
    x.add_(1)


def set_attribute(m: Odd, x: Tensor, out: Tensor) -> None:
    m.calls += 1


def set_buffer(m: Odd, x: Tensor, out: Tensor) -> None:
    m.register_buffer("mean", x.mean())


def flip(m: Odd, x: Tensor, out: Tensor) -> Tensor:
    m.flag = not m.flag
    return out * (2 if m.flag else 1)


def ask_for_gradients(m: Odd, x: Tensor, out: Tensor) -> Tensor:
    return m.linear(x.requires_grad_()).square()


def count(m: Odd, x: Tensor, out: Tensor) -> None:
    m.outside[0].weight.detach().add_(1)


def nothing(m: Odd, x: Tensor, out: Tensor) -> None: ...


def outside(m: Odd, x: Tensor, out: Tensor) -> Tensor:
    return m.outside[0](out)


def infer(model: Odd, x: Tensor | None = None, *options: Any) -> None:
    with torch.no_grad():
        model(torch.ones(2, 4) if x is None else x, *options)


def train(model: Odd) -> None:
    model(torch.ones(2, 4)).sum().backward()
    assert model.outside[0].weight.grad is not None
    model.outside[0].zero_grad()


def train_outside(model: Odd) -> None:
    model.linear.requires_grad_(False)
    train(model)


ODD: dict[str, tuple[Callable[[Odd, Tensor, Tensor], Any], Callable[[Odd], Any], str]] = {
    "numpy": (draw_of_numpy, infer, "random numbers on the host"),
    "host": (draw, infer, "random numbers on the host"),
    "in place": (write, infer, "arguments in place"),
    "flips": (flip, infer, "it changes the model"),
    "requires_grad": (ask_for_gradients, lambda m: m(torch.ones(2, 4)).sum().backward(), "arguments in place"),
    "a tensor": (count, infer, "tensors of the model in place that are no buffers"),
    "attribute": (set_attribute, infer, "changes too often"),
    "buffer": (set_buffer, infer, "changes too often"),
    "returns": (lambda m, x, out: Returns(out), infer, "returns a Returns"),
    "argument": (nothing, lambda m: infer(m, None, Returns(2)), "an argument is a Returns"),
    "sparse": (nothing, lambda m: infer(m, torch.ones(2, 4).to_sparse()), "a sparse or nested tensor"),
    "no backward pass": (nothing, lambda m: m(torch.ones(2, 4)), "no backward pass came"),
    "outside": (outside, train, "no parameter of a module in it"),
    "outside alone": (outside, train_outside, "no parameter of a module in it"),
}


@pytest.mark.parametrize("name", ODD)
def test_models_that_no_graph_runs(name: str) -> None:
    do, call, reason = ODD[name]
    model = Odd(do)
    runs_plainly(model, lambda: call(model), reason, calls=120 if "often" in reason else 5)


def test_arguments_of_inference_mode_changed_in_place() -> None:
    model = Odd(write)
    with torch.inference_mode():
        x = torch.zeros(2, 4)
        runs_plainly(model, lambda: model(x), "arguments in place")
        assert x.eq(5).all()


def test_containers_that_a_model_changes() -> None:
    class Appends(nn.Module):
        def forward(self, x: Tensor, kept: list[Tensor]) -> Tensor:
            kept.append(x + 1)
            return x + 2

    model, kept = Appends(), list[Tensor]()

    def call() -> None:
        kept.clear()
        model(torch.ones(2, 4), kept)
        assert len(kept) == 1

    with torch.no_grad():
        runs_plainly(model, call, "arguments in place")


def with_mode(call: Callable[[], Any]) -> None:
    with Calls():
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
        with (
            nn.modules.module.register_module_forward_hook(lambda *_: None),
            pytest.warns(UserWarning, match="hooks on all modules"),
        ):
            model(IMAGE)
        for _ in range(3):
            model(IMAGE)
    (part,) = graphed_parts(model)
    assert len(part.captured) == 1
    assert part.reasons.total() == 6


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
