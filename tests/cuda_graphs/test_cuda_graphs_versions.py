"""`fastvit.graphs`: what a model holds, and how it changes between calls."""

import copy
import enum
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from cuda_graphs_models import IMAGE, check, ours, reads, replays, runs_plainly
from torch import Tensor, nn

import fastvit


def fewer(head: nn.Module) -> dict[str, Any]:
    """The first four classes, in the same memory and parameters."""
    for p in head.parameters():
        p.data = p.data[:4]
    return head._parameters


class Scale:
    """A callable object, as some models keep as their activation."""

    factor = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        return self.factor * x

    def method(self, x: Tensor) -> Tensor:
        return self.factor * x


class Nested:
    factor = 2.0

    def __init__(self, inside: Any = None) -> None:
        self.inside = inside


class Referring:
    def __init__(self, held: Any) -> None:
        self.object, self.reference = held, weakref.ref(held)


class Config(dict):  # type: ignore[type-arg]
    factor = 2.0


def scaled(x: Tensor, held: Any) -> Tensor:
    return x * held.factor


def in_order(x: Tensor, held: Any) -> Tensor:
    for number in held.values() if isinstance(held, dict) else held:
        x = x * 2 + number
    return x


def move_to_end(held: Any) -> None:
    held.move_to_end("a")


def set_factor(held: Any) -> None:
    held.factor = 3.0


def called(x: Tensor, held: Any) -> Tensor:
    return held(x)


# what is held, how it is read, and how it changes while it stays the same object
INSIDE: dict[str, tuple[Callable[[], Any], Callable[[Tensor, Any], Tensor], Callable[[Any], Any]]] = {
    "a callable object": (Scale, called, set_factor),
    "object of a method": (lambda: Scale().method, called, lambda method: set_factor(method.__self__)),
    "object of a partial": (lambda: partial(Scale.method, Scale()), called, lambda f: set_factor(f.args[0])),
    "order": (lambda: OrderedDict(a=1.0, b=2.0), in_order, move_to_end),
    "attribute of a dict": (Config, scaled, set_factor),
    "attribute of a class": (lambda: type("Factor", (), {"factor": 2.0}), scaled, set_factor),
    "object of a weak reference": (
        lambda: Referring(Nested()),
        lambda x, r: x * r.reference().factor,
        lambda r: setattr(r.object, "factor", 3.0),
    ),
    "object of a method of C": (
        lambda: {"factor": 2.0}.get,
        lambda x, get: x * get("factor"),
        lambda get: get.__self__.update(factor=3.0),
    ),
    "a complex number": (
        lambda: Nested(complex(5, 12345)),
        lambda x, n: x * n.inside.real,
        lambda n: setattr(n, "inside", complex(6)),
    ),
    "in a dict in an object": (lambda: Nested({}), lambda x, n: x + len(n.inside), lambda n: n.inside.update(a=1)),
}
for name, change in {
    "data": lambda t: setattr(t, "data", torch.full((4,), 3.0)),
    "set_": lambda t: t.set_(torch.full((4,), 3.0)),
    "another shape": lambda t: setattr(t, "data", t.data[:1]),
}.items():
    INSIDE[f"tensor, {name}"] = (lambda: torch.ones(4), torch.mul, change)
    INSIDE[f"tensor in a list, {name}"] = (
        lambda: [torch.ones(4)],
        lambda x, held: x * held[0],
        lambda held, change=change: change(held[0]),
    )
    INSIDE[f"tensor in an object, {name}"] = (
        lambda: Nested({"cache": torch.ones(4)}),
        lambda x, held: x * held.inside["cache"],
        lambda held, change=change: change(held.inside["cache"]),
    )


@pytest.mark.parametrize("name", INSIDE)
@pytest.mark.parametrize("in_submodule", [False, True])
def test_what_a_model_holds_changes_inside(name: str, in_submodule: bool) -> None:
    held, read, change = INSIDE[name]
    models = [nn.Sequential(reads(held(), read)) if in_submodule else reads(held(), read) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    report = fastvit.graphs(models[0])
    x = torch.randn(2, 4)
    with torch.no_grad():
        check(*models, x)
        assert replays(report) == [2]
        for model in models:
            change(model[0].held if isinstance(model, nn.Sequential) else model.held)
        check(*models, x)
    assert not report.reasons


@pytest.mark.parametrize(
    ("held", "other"),
    [
        ([0, 1], (0, 1)), ([], ()), ({}, Config()), ({1, 2}, [1, 2]), ({1}, frozenset({1})), (0j, complex(-0.0, 0)),
    ],
)  # fmt: skip
def test_a_container_of_another_type_with_the_same_members(held: Any, other: Any) -> None:
    model = reads(held, lambda x, _: x)
    report = fastvit.graphs(model)
    with torch.no_grad():
        for _ in range(3):
            model(torch.ones(2, 4))
        model.held = other
        model(torch.ones(2, 4))
    assert replays(report) == [1]


def test_a_parameter_swapped_for_a_sparse_one() -> None:
    """Which has no address. The parameter stays the same object."""
    model, plain = nn.Linear(8, 8), nn.Linear(8, 8)
    fastvit.graphs(model)
    with torch.no_grad():
        for _ in range(3):
            model(torch.ones(2, 8))
        for each in (model, plain):
            sparse = (torch.eye(8) * 2).to_sparse_csr()
            torch.utils.swap_tensors(each.weight, nn.Parameter(sparse))
        plain.bias.copy_(model.bias)
        with pytest.warns(UserWarning, match="a sparse or nested tensor"):
            check(model, plain, torch.ones(2, 8))


def test_numbers_on_another_device_are_refused() -> None:
    """A kernel has them among its arguments, whatever they become."""
    model = reads(torch.ones((), device="meta"), lambda x, _: x)
    with torch.no_grad():
        runs_plainly(model, lambda: model(torch.ones(2, 4)), "tensors on several devices")


class Slots:
    __slots__ = ("number",)


class WithSlots(Slots):
    pass


class Array(np.ndarray):  # type: ignore[type-arg]
    pass


class Queue(deque):  # type: ignore[type-arg]
    pass


class Part(partial):  # type: ignore[type-arg]
    pass


HIDDEN: dict[str, Any] = {
    "Slots": Slots(), "WithSlots": WithSlots(), "ndarray": np.ones(2), "Array": np.ones(2).view(Array),
    "deque": deque([1]), "Queue": Queue([1]), "Part": Part(in_order), "module": copy, "generator": (i for i in "a"),
}  # fmt: skip


@pytest.mark.parametrize("name", HIDDEN)
def test_objects_that_cannot_be_compared(name: str) -> None:
    model = reads({"held": [HIDDEN[name]]}, lambda x, _: x)
    with torch.no_grad():
        runs_plainly(model, lambda: model(torch.ones(2, 4)), f"the model holds a {name}, which could", calls=120)


class Color(enum.IntEnum):
    RED = 1


PLAIN = [torch.Size([2]), Color.RED, enum.IntFlag("Bits", "A"), type("Text", (str,), {})("a"), 2j, np.float64(1.5)]


@pytest.mark.parametrize("held", PLAIN, ids=lambda held: type(held).__name__)
def test_values_that_cannot_change(held: Any) -> None:
    model = reads(held, lambda x, _: x)
    report = fastvit.graphs(model)
    with torch.no_grad():
        check(model, copy.deepcopy(model), torch.ones(2, 4))
    assert replays(report) == [2]


def cycle() -> Any:
    held: list[Any] = []
    held.append(held)
    return held


class Unhashable(type):
    def __eq__(cls, other: object) -> bool:
        return cls is other


@pytest.mark.parametrize("make", [cycle, Unhashable("Odd", (), {})], ids=["cycle", "unhashable class"])
def test_more_than_can_be_compared(make: Callable[[], Any]) -> None:
    model = reads(make(), lambda x, _: x)
    with torch.no_grad():
        runs_plainly(model, lambda: model(torch.ones(2, 4)), "values than can be compared", calls=120)


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "mode": lambda m: m.train(),
    "an attribute": lambda m: setattr(m.blocks[1].norm1, "eps", 0.5),
    "a parameter": lambda m: setattr(m.blocks[0].mlp.fc1, "weight", nn.Parameter(torch.randn(128, 32))),
    "a module": lambda m: setattr(m, "head", nn.Linear(32, 7)),
    "a forward": lambda m: setattr(m.blocks[0], "forward", lambda x, **_: 2 * x),
    "a hook of the model": lambda m: m.register_forward_hook(lambda m, args, out: 3 * out),
    "moved": lambda m: m.double().float(),
    "data": lambda m: setattr(m.head.weight, "data", torch.randn(5, 32)),
    "other strides": lambda m: setattr(m.blocks[0].attn.proj.weight, "data", m.blocks[0].attn.proj.weight.data.t()),
    "fewer values": lambda m: setattr(m.head, "_parameters", fewer(m.head)),
    "swapped": lambda m: torch.utils.swap_tensors(m.head.weight, nn.Parameter(torch.randn(5, 32))),
    "loaded": lambda m: m.load_state_dict({n: t + 1 for n, t in m.state_dict().items()}, assign=True),
    "in place": lambda m: m.load_state_dict({n: t + 1 for n, t in m.state_dict().items()}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_never_stale(change: str) -> None:
    model = ours(drop_path_rate=0.5)
    plain = copy.deepcopy(model)
    report = fastvit.graphs(model)
    with torch.no_grad():
        check(model, plain, IMAGE)
        assert replays(report) == [2]
        for changed in (model, plain):
            torch.manual_seed(1)
            CHANGES[change](changed)
        torch.manual_seed(3)
        got = [model(IMAGE) for _ in range(4)]
        torch.manual_seed(3)
        assert all(torch.equal(out, plain(IMAGE)) for out in got)
    assert replays(report)[-1] == (6 if change == "in place" else 2)
    gone = change in ("a parameter", "moved", "data", "swapped", "loaded", "a module", "in place")
    assert len(report.graphs) == (1 if gone else 2), "graphs of memory that was freed are released"
    assert not report.reasons
