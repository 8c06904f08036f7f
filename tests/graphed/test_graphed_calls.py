"""`fastvit.graphs`: which calls are replayed and which run as without graphs, rounding, report, copies and errors."""

import contextlib
import copy
import inspect
import pickle
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from host_recorder import HostRecorder
from library_models import vit
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fastvit
from fastvit.graphed import graphed_parts

IMAGE = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))


def ours(**options: Any) -> fastvit.VisionTransformer:
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}
    return fastvit.VisionTransformer(**sizes, **options).eval()  # type: ignore[arg-type]


def check(model: nn.Module, plain: nn.Module, *args: Any, calls: int = 4, **kwargs: Any) -> None:
    """Every call has the results of the model without graphs."""
    for _ in range(calls):
        torch.testing.assert_close(model(*args, **kwargs), plain(*args, **kwargs), rtol=0, atol=0)


def replays(report: Any) -> list[int]:
    return [graph.replays for graph in report.graphs]


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
        self.cycle["cycle"] = self.cycle if kind == "cycle" else None  # type: ignore[assignment]
        of: dict[str, Any] = {"object": scale, "method": scale.method, "partial": partial(Scale.method, scale)}
        self.act = of.get(kind, scale)
        if kind == "slots":
            self.config = Slots(1.0)
        self.register_buffer("shift", torch.zeros(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.linear(x)) + self.shift.sum()


@dataclass(slots=True)
class Slots:
    number: float


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


@pytest.mark.parametrize("kind", ["slots", "cycle"])
def test_objects_that_cannot_be_compared(kind: str) -> None:
    model = Calls(kind)
    with torch.no_grad():
        runs_plainly(model, lambda: model(torch.randn(2, 4)), "values than can be compared")


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
    gone = change in ("a parameter", "moved", "data", "loaded", "a module", "in place", "other strides", "fewer values")
    assert len(report.graphs) == (1 if gone else 2), "graphs of tensors that are gone are released"
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


# ---- as without graphs ----


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
    """What pytree does not know."""

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


# ---- rounding ----


@pytest.mark.parametrize("library", ["ours", "timm"])
def test_batches(library: str, recorders: list[HostRecorder]) -> None:
    model = ours() if library == "ours" else vit(depth=2).eval()
    plain = copy.deepcopy(model)
    report = fastvit.graphs(model, batches=(4, 1, 2))
    sizes = [1, 2, 3, 4, 3, 2, 1, 4, 3, 3, 4]
    with torch.no_grad():
        for size in sizes:
            images = torch.randn(size, 3, 32, 32)
            out = model(images)
            assert out.shape == (size, plain.num_classes)
            torch.testing.assert_close(out, plain(images))
        assert [graph.inputs.split(",")[0] for graph in report.graphs] == ["(4"]
        for size in (1, 1, 2, 2, 3):
            model(torch.randn(size, 3, 32, 32))
        assert sorted(graph.inputs.split(",")[0] for graph in report.graphs) == ["(1", "(2", "(4"]
        with pytest.warns(UserWarning, match="a batch of 5 is larger"):
            check(model, plain, torch.randn(5, 3, 32, 32))
    model.train(), plain.train()
    for _ in range(4):
        out = model(IMAGE)
        out.sum().backward()
        assert torch.equal(out, plain(IMAGE))
    assert [graph.training for graph in report.graphs][-1], "exact sizes in training"


class AcrossTheBatch(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        out = self.linear(x)
        if self.kind == "mean":
            return out, out.mean()
        if self.kind == "pairs":
            return out @ out.T
        if self.kind == "masked":
            return F.dropout(out).masked_fill(out > 0, -torch.inf)
        return out + out.mean(0)


@pytest.mark.parametrize("kind", ["mean", "pairs", "centred"])
def test_results_that_depend_on_the_whole_batch_are_not_rounded(kind: str) -> None:
    model = AcrossTheBatch(kind).eval()
    plain = copy.deepcopy(model)
    report = fastvit.graphs(model, batches=(4,))
    x = torch.randn(4, 4)
    with torch.no_grad():
        check(model, plain, x)
        assert replays(report) == [2]
        with pytest.warns(UserWarning, match="depend on the batch size"):
            check(model, plain, x[:3])
        check(model, plain, x)
        with pytest.warns(UserWarning, match="batch size is not clear"):
            check(model, plain, x, torch.ones(3))


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "eva02_tiny_patch14_224"])
@pytest.mark.parametrize("pool", ["avg", "map"])
def test_lists_of_images(name: str, pool: str) -> None:
    """Graphs by budgets of tokens; results are those without graphs."""
    sizes = {"patch_size": 8, "embed_dim": 48, "num_heads": 3, "depth": 2, "num_classes": 5}
    model = fastvit.create_model(name, img_size=32, global_pool=pool, **sizes).eval()
    plain = copy.deepcopy(model)
    report = fastvit.graphs(model, batches=(1, 4, 2))
    of = torch.Generator().manual_seed(0)
    lists = [[(16, 24), (8, 8)], [(24, 24), (16, 16)], [(24, 16), (16, 24), (8, 8)], [(16, 8), (16, 16)]]
    with torch.no_grad():
        for _ in range(3):
            for pixels in lists:
                images = [torch.randn(3, h, w, generator=of) for h, w in pixels]
                torch.testing.assert_close(model(images), plain(images))
                torch.testing.assert_close(model.forward_features(images), plain.forward_features(images))
        assert 1 <= len(report.graphs) <= 4
        assert sum(replays(report)) >= 10
        images = [torch.randn(3, 96, 96)]
        with pytest.warns(UserWarning, match="number of tokens of"):
            out = model(images)
        torch.testing.assert_close(out, plain(images))


def test_comparing_draws_nothing() -> None:
    """Results with infinities can be compared, and the comparison leaves the generator where the call left it."""
    model = AcrossTheBatch("masked").eval()
    plain = copy.deepcopy(model)
    report = fastvit.graphs(model, batches=(4,))
    results = []
    for each in (model, plain):
        torch.manual_seed(0)
        with torch.no_grad():
            each(torch.ones(3, 4))
            results.append(torch.rand(()))
    assert torch.equal(*results)
    assert not report.reasons or "depend" in str(report)


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
