"""`fastvit.graphs(batches=...)`: batches and lists of images that run as larger ones."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cuda_graphs_models import IMAGE, check, ours, replays
from graph_models import FunctionModule
from host_recorder import HostRecorder
from library_models import vit
from torch import Tensor, nn

import fastvit


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


def in_steps_of_127(m: Any, x: Tensor, out: Tensor) -> Tensor:
    scale = x.abs().amax() / 127
    return m.linear((x / scale).round() * scale)


KINDS: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {  # of the module, its input and its linear layer's output
    "mean": lambda m, x, out: (out, out.mean()),
    "pairs": lambda m, x, out: out @ out.T,
    "masked": lambda m, x, out: out.masked_fill(out > 0, -torch.inf),
    "draws": lambda m, x, out: F.dropout(out),
    "scale": in_steps_of_127,
    "number": lambda m, x, out: {"out": out, "rows": len(x)},
    "table": lambda m, x, out: (out, m.linear.weight * 1),
    "size": lambda m, x, out: out * (1 + 1e-4 * len(x)),
    "centred": lambda m, x, out: out + out.mean(0),
    "weakly": lambda m, x, out: out + 1e-5 * out.mean(0),
}


def across_the_batch(kind: str) -> nn.Module:
    model = FunctionModule(lambda m, x, *_: KINDS[kind](m, x, m.linear(x)), linear=nn.Linear(4, 4))
    return model.eval()


@pytest.mark.parametrize("kind", ["mean", "pairs", "centred", "weakly", "scale", "size", "number"])
def test_results_that_depend_on_the_whole_batch_are_not_rounded(kind: str) -> None:
    model = across_the_batch(kind)
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


def test_tables_that_have_as_many_rows_as_a_batch_and_empty_batches() -> None:
    model = across_the_batch("table")
    plain = copy.deepcopy(model)
    fastvit.graphs(model, batches=(8,))
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        for rows in (4, 4, 4, 4, 3, 0, 3):
            check(model, plain, torch.ones(rows, 4), calls=1)
        model = nn.Linear(4, 4)
        fastvit.graphs(model, batches=(8,))
        assert [len(model(torch.ones(rows, 4))) for rows in (0, 3, 3, 3, 0, 0)] == [0, 3, 3, 3, 0, 0]


def test_rows_of_earlier_calls_are_gone() -> None:
    """All rows are scaled by their largest value, where that is large."""
    model = FunctionModule(lambda _, x: x / x.abs().amax().clamp(min=50)).eval()
    plain = copy.deepcopy(model)
    report = fastvit.graphs(model, batches=(4,))
    with torch.no_grad():
        for rows, size in [(3, 1), (3, 1), (3, 1), (4, 500), (3, 1), (2, 1)]:
            x = size * torch.randn(rows, 4).clamp(-2, 2)
            torch.testing.assert_close(model(x), plain(x))
    assert replays(report) == [4]


@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [*((d, False) for d in (torch.float32, torch.bfloat16, torch.float16)), (torch.float32, True)],
)
def test_rounding_is_no_difference(dtype: torch.dtype, autocast: bool) -> None:
    model = ours(init_values=0.5).to(dtype)
    report = fastvit.graphs(model, batches=(7,))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for rows in (1, 2, 3, 5):
            model(torch.randn(rows, 3, 32, 32, dtype=dtype))
    assert replays(report) == [2]
    assert not report.reasons


def counted(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    return x + 1


@pytest.mark.parametrize("count", [nn.Buffer(torch.zeros(1)), torch.zeros(1)], ids=["buffer", "tensor"])
def test_comparing_leaves_tensors_as_they_are(count: Any) -> None:
    model = FunctionModule(counted, calls=count).eval()
    fastvit.graphs(model, batches=(4,))
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        for _ in range(5):
            model(torch.ones(3, 4))
    assert model.calls == 5


def test_results_with_infinities_are_compared() -> None:
    model = across_the_batch("masked")
    plain = copy.deepcopy(model)
    report = fastvit.graphs(model, batches=(4,))
    x = torch.randn(3, 4)
    x[1] = torch.nan
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(model(x), plain(x), equal_nan=True)
    assert replays(report) == [2]


def checks_values(_: nn.Module, x: Tensor) -> Tensor:
    if x.max() > 1:
        raise ValueError("images are in [0, 1]")
    return x


def test_an_error_while_rows_are_compared_is_no_error_of_the_call() -> None:
    model = FunctionModule(checks_values).eval()
    report = fastvit.graphs(model, batches=(8,))
    with torch.no_grad(), warnings.catch_warnings(record=True) as seen:
        check(model, FunctionModule(checks_values), torch.rand(3, 4))
    assert "with more samples it fails: images are in [0, 1]" in str(seen[0].message)
    assert not report.graphs


def test_comparing_draws_nothing() -> None:
    """The comparison leaves the generator where the call left it."""
    model = across_the_batch("draws")
    plain = copy.deepcopy(model)
    fastvit.graphs(model, batches=(4,))
    results = []
    for each in (model, plain):
        torch.manual_seed(0)
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):
            each(torch.ones(3, 4))
        results.append(torch.rand(()))
    assert torch.equal(*results)
