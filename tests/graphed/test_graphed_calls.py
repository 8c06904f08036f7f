"""`fastvit.graphs`: which calls are alike, the report, copies and errors."""

import contextlib
import copy
import enum
import inspect
import pickle
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from graphed_models import IMAGE, check, ours, replays, runs_plainly
from library_models import vit
from torch import Tensor, nn

import fastvit
from fastvit.graphed import graphed_parts

# ---- kinds of calls ----


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


class Calls(nn.Module):
    """Calls objects that hold numbers, in the ways in which modules keep them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        scale = Scale()
        self.linear, self.cycle = nn.Linear(4, 4), {"self": scale}
        of: dict[str, Any] = {"object": scale, "method": scale.method, "partial": partial(Scale.method, scale)}
        self.act = of.get(kind, scale)
        self.register_buffer("shift", torch.zeros(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.linear(x)) + self.shift.sum()


@pytest.mark.parametrize("kind", ["object", "method", "partial"])
def test_an_object_changes_inside(kind: str) -> None:
    model = Calls(kind)
    plain = copy.deepcopy(model)
    report = fastvit.graphs(model)
    x = torch.randn(2, 4)
    with torch.no_grad():
        check(model, plain, x)
        assert replays(report) == [2]
        for changed in (model, plain):
            changed.cycle["self"].factor = 5.0  # type: ignore[union-attr,operator,index]
        check(model, plain, x)


class Reads(nn.Module):
    """Computes with what it holds: a function of its input and of that object."""

    def __init__(self, held: Any, read: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__()
        self.linear, self.held, self.read = nn.Linear(4, 4), held, read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.linear(x), self.held)


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


# what is held, how it is read, and how it changes while it stays the same object
INSIDE: dict[str, tuple[Callable[[], Any], Callable[[Tensor, Any], Tensor], Callable[[Any], Any]]] = {
    "order": (lambda: OrderedDict(a=1.0, b=2.0), in_order, move_to_end),
    "attribute of a dict": (Config, scaled, set_factor),
    "attribute of a class": (lambda: type("Factor", (), {"factor": 2.0}), scaled, set_factor),
    "behind a weak reference": (
        lambda: Referring(Nested()),
        lambda x, r: x * r.reference().factor,
        lambda r: setattr(r.object, "factor", 3.0),
    ),
    "behind a method of C": (
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
    models = [nn.Sequential(Reads(held(), read)) if in_submodule else Reads(held(), read) for _ in range(2)]
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


def test_numbers_on_another_device_are_refused() -> None:
    """A kernel has them among its arguments, whatever they become."""
    model = Reads(torch.ones((), device="meta"), lambda x, _: x)
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
    model = Reads({"held": [HIDDEN[name]]}, lambda x, _: x)
    with torch.no_grad():
        runs_plainly(model, lambda: model(torch.ones(2, 4)), f"the model holds a {name}, which could", calls=120)


class Color(enum.IntEnum):
    RED = 1


PLAIN = [torch.Size([2]), Color.RED, enum.IntFlag("Bits", "A"), type("Text", (str,), {})("a"), 2j, np.float64(1.5)]


@pytest.mark.parametrize("held", PLAIN, ids=lambda held: type(held).__name__)
def test_values_that_cannot_change(held: Any) -> None:
    model = Reads(held, lambda x, _: x)
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
    model = Reads(make(), lambda x, _: x)
    with torch.no_grad():
        runs_plainly(model, lambda: model(torch.ones(2, 4)), "values than can be compared", calls=120)


class Same(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a * 3 if a is b else a + b


def test_arguments_that_are_one_tensor() -> None:
    model = Same()
    plain = copy.deepcopy(model)
    report = fastvit.graphs(model)
    for one in (True, False, True):
        for _ in range(5):
            results = []
            for each in (model, plain):
                x = torch.arange(4.0).requires_grad_()
                out = each(x, x if one else x + 1)
                results += [out, *torch.autograd.grad(out.sum(), x)]
            assert torch.equal(results[0], results[2])
            assert torch.equal(results[1], results[3])
    assert sorted(replays(report)) == [3, 8]


def test_grad_mode_belongs_to_the_kind() -> None:
    model = Reads(None, lambda x, _: x * (2 if torch.is_grad_enabled() else 1)).requires_grad_(False)
    plain = copy.deepcopy(model)
    fastvit.graphs(model)
    for grad in (True, False) * 5:
        with torch.set_grad_enabled(grad):
            check(model, plain, torch.ones(2, 4), calls=1)


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


def test_kinds_of_calls() -> None:
    """Shapes, strides, dtypes, other arguments, gradients and settings; a kind that was captured is found again."""
    model = ours()
    plain = copy.deepcopy(model)
    report = fastvit.graphs(model)
    mask = torch.rand(17, 17)
    calls: list[Callable[[nn.Module], Tensor]] = [
        lambda m: m(IMAGE),
        lambda m: m(IMAGE[:1]),
        lambda m: m(IMAGE.to(memory_format=torch.channels_last)),
        lambda m: m(IMAGE, attn_mask=mask),
        lambda m: m(IMAGE, attn_mask=mask, is_causal=False),
        lambda m: m(x=IMAGE, is_causal=True),
    ]
    for grad in (torch.no_grad, torch.inference_mode):
        for _ in range(2):
            for call in calls:
                with grad():
                    for _ in range(4):
                        assert torch.equal(call(model), call(plain))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        check(model, plain, IMAGE)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        with torch.no_grad():
            check(model, plain, IMAGE)
    finally:
        torch.backends.cuda.matmul.fp32_precision = "ieee"
    assert replays(report)[-1] == 2
    assert len(report.graphs) == 8, "those used last"
    assert not report.reasons


def deterministic(on: bool) -> None:
    torch.use_deterministic_algorithms(on, warn_only=True)


SETTINGS: dict[str, tuple[Callable[[], float], Callable[[bool], Any]]] = {
    "deterministic": (lambda: torch.are_deterministic_algorithms_enabled(), deterministic),
    "precision": (
        lambda: torch.get_float32_matmul_precision() == "high",
        lambda on: torch.set_float32_matmul_precision("high" if on else "highest"),
    ),
    "dtype": (
        lambda: torch.get_default_dtype() is torch.float64,
        lambda on: torch.set_default_dtype(torch.float64 if on else torch.float32),
    ),
    "autocast": (lambda: torch.is_autocast_enabled("cpu"), lambda on: torch.set_autocast_enabled("cpu", on)),
    "autocast's dtype": (
        lambda: torch.get_autocast_dtype("cpu") is torch.float16,
        lambda on: torch.set_autocast_dtype("cpu", torch.float16 if on else torch.bfloat16),
    ),
    "autocast's cache": (lambda: torch.is_autocast_cache_enabled(), torch.set_autocast_cache_enabled),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_belong_to_the_kind(name: str) -> None:
    """As a function that reads them shows."""
    read, put = SETTINGS[name]
    before, model = read(), Reads(None, lambda x, _: x.float() + read())
    plain = copy.deepcopy(model)
    report, x = fastvit.graphs(model), torch.ones(2, 4)
    with torch.no_grad():
        try:
            for on in (False, True, False, True):
                put(on)
                check(model, plain, x)
        finally:
            put(bool(before))
    assert sum(replays(report)) == 12


def test_only_so_many_captures() -> None:
    model = ours(dynamic_img_size=True)
    report = fastvit.graphs(model, keep=1)
    with torch.no_grad():
        for n in range(1, 17):
            for _ in range(3):
                model(IMAGE[:1].expand(n, -1, -1, -1))
        model(IMAGE[:1].expand(17, -1, -1, -1)), model(IMAGE[:1].expand(17, -1, -1, -1))
        with pytest.warns(UserWarning, match="16 captures"):
            model(IMAGE[:1].expand(17, -1, -1, -1))
    assert len(report.graphs) == 1


# ---- report, copies, errors ----


def suppressed(model: nn.Module, image: Tensor) -> None:
    with contextlib.suppress(ValueError):  # the op's own error
        model(image)


def test_report() -> None:
    model = ours()
    signature = inspect.signature(model.forward)
    report = fastvit.graphs(model)
    assert inspect.signature(model.forward) == signature
    with pytest.raises(TypeError, match=r"graphs changes the model in place .* `report = fastvit.graphs\(model\)`"):
        report(IMAGE)  # type: ignore[operator]
    assert str(report) == "nothing is captured yet: the third call of a kind will be"
    with torch.no_grad():
        for _ in range(5):
            model(IMAGE)
    for _ in range(3):
        model(IMAGE).sum().backward()
    runs_plainly(model, lambda: suppressed(model, IMAGE.to("meta")), "a tensor is elsewhere", calls=1)
    first, second = report.graphs
    assert (first.training, first.replays, second.training, second.replays) == (False, 3, True, 1)
    assert first.bytes == IMAGE.nbytes + 2 * 5 * 4 * 2  # static input and output (twice in the recorder)
    parameters = sum(p.nbytes for p in model.parameters())
    assert second.bytes - first.bytes == parameters + 40, "the gradients, and that of the output"
    lines = str(report).splitlines()
    assert lines[0].split() == ["inputs", "passes", "replays", "MiB"]
    assert lines[2].startswith("(2, 3, 32, 32) float32  forward, backward  1")
    assert lines[3] == "1 without graphs: a tensor is elsewhere"
    assert all(len(line) <= 80 for line in lines)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
@pytest.mark.parametrize("library", ["ours", "timm"])
def test_copies_have_their_own_graphs(how: Callable[[Any], Any], library: str) -> None:
    model = ours() if library == "ours" else vit(depth=2).eval()
    fastvit.accelerate(model)
    fastvit.graphs(model, batches=(1, 2))
    with torch.no_grad():
        for _ in range(3):
            expected = model(IMAGE)
        other = how(model)
        nn.init.zeros_(model.head.weight)
        for _ in range(4):
            assert torch.equal(other(IMAGE), expected)
    parts = [*graphed_parts(other)]
    assert [part.model for part in parts] == [other] * len(parts)
    assert len(parts[0].captured) == 1
    fastvit.restore(other)
    assert not [*graphed_parts(other)]


def test_restore() -> None:
    model = vit(depth=2).eval()
    before = {name: {**vars(m)} for name, m in model.named_modules()}
    fastvit.accelerate(model)
    report = fastvit.graphs(model)
    with torch.no_grad():
        for _ in range(3):
            model(IMAGE)
    with pytest.raises(ValueError, match="model has graphs already"):
        fastvit.graphs(model)
    with pytest.raises(ValueError, match="model has graphs already"):
        fastvit.accelerate(model)
    assert len(report.graphs) == 1
    fastvit.restore(model)
    assert not report.graphs, "released, although the report is there"
    for name, m in model.named_modules():
        assert vars(m).keys() == before[name].keys()


def test_compile_and_export_see_the_model() -> None:
    model = ours()
    plain = copy.deepcopy(model)
    report = fastvit.graphs(model)
    with torch.no_grad():
        for _ in range(3):
            model(IMAGE)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert torch.equal(compiled(IMAGE), plain(IMAGE))
        program = torch.export.export(model, (IMAGE,))
        assert torch.equal(program.module()(IMAGE), plain(IMAGE))
    assert replays(report) == [1]


class Sharded(Tensor):
    pass


def sharded() -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("shard", torch.ones(2).as_subclass(Sharded))
    return model


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((IMAGE,), TypeError, "model must be an nn.Module"),
        ((ours(), {"keep": 0}), ValueError, "keep must be"),
        ((ours(), {"batches": (0, 2)}), ValueError, r"batches\[0\] must be"),
        ((ours(), {"batches": (1.5,)}), TypeError, r"batches\[0\] must be"),
        ((torch.compile(ours()),), ValueError, "model is compiled"),
        ((nn.DataParallel(ours()),), ValueError, "model is in a DataParallel"),
        ((sharded(),), ValueError, "the model has a Sharded"),
    ],
)
def test_errors(arguments: Any, error: type[Exception], message: str) -> None:
    model, *options = arguments
    with pytest.raises(error, match=message):
        fastvit.graphs(model, **(options[0] if options else {}))
    assert not isinstance(model, nn.Module) or not [*graphed_parts(model)]
