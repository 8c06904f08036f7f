"""`fastvit.graphs`: which calls are alike, the report, copies and errors."""

import contextlib
import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda_graphs_models import IMAGE, check, ours, reads, replays, runs_plainly
from graph_models import FunctionModule
from library_models import vit
from torch import Tensor, nn

import fastvit
from fastvit.blocks.recompute import recompute_all
from fastvit.cuda_graphs import graphed_parts

# ---- kinds of calls ----


def test_arguments_that_are_one_tensor() -> None:
    model = FunctionModule(lambda m, a, b: a * 3 if a is b else a + b)
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
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
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
    """A function that reads them has the right results after each change."""
    read, put = SETTINGS[name]
    before, model = read(), reads(None, lambda x, _: x.float() + read()).requires_grad_(False)
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


def recomputed() -> nn.Module:
    block = fastvit.Block(16, 1)
    recompute_all(block)
    return block


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
        ((recomputed(),), ValueError, "model is a block that fastvit.fit lets recompute"),
    ],
)
def test_errors(arguments: Any, error: type[Exception], message: str) -> None:
    model, *options = arguments
    with pytest.raises(error, match=message):
        fastvit.graphs(model, **(options[0] if options else {}))
    assert not isinstance(model, nn.Module) or not [*graphed_parts(model)]
