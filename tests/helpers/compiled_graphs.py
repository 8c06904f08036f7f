"""Models through `fastvit.compile`, compared with eager mode."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from graph_models import tensors
from oracle import GRADIENT, assert_as_accurate
from torch import Tensor, nn

import fastvit
from benchmarks.coverage.graph_checks import Double
from fastvit.compiler import Report


def run(model: Callable[..., Any], parameters: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Return the outputs, and all gradients for a fixed random cotangent."""
    if not torch.is_grad_enabled():
        return tensors(model(*(t.clone() for t in inputs)))
    inputs = [t.detach().clone().requires_grad_() if t.is_floating_point() else t for t in inputs]
    wanted = [t for t in (*inputs, *parameters) if t.requires_grad]
    outputs = tensors(model(*inputs))
    cotangents = [torch.randn(t.shape, generator=torch.Generator().manual_seed(7)).to(t) for t in outputs]
    gradients = torch.autograd.grad(outputs, wanted, cotangents, allow_unused=True)
    return [*(t.detach() for t in outputs), *(torch.zeros(()) if g is None else g for g in gradients)]


def compiled(
    function: Callable[..., Any], inner: str = "aot_eager", **options: Any
) -> tuple[Callable[..., Any], list[Report]]:
    """Return the function through `fastvit.compile`, and the list to which it appends its reports."""
    torch._dynamo.reset()
    reports: list[Report] = []
    return fastvit.compile(function, inner=inner, report=reports.append, **options), reports


def graph_for_inner(function: Callable[..., Any], *inputs: Tensor, **options: Any) -> torch.fx.Graph:
    """Return the rewritten graph that the inner backend gets."""
    graphs: list[torch.fx.Graph] = []

    def inner(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(gm.graph)
        return gm.forward

    torch._dynamo.reset()
    fastvit.compile(function, inner=inner, **options)(*inputs)
    return graphs[0]


def check_under_autocast(model: nn.Module, x: Tensor, dtype: torch.dtype, *, within: bool = False) -> Report:
    """Check that outputs and all gradients under autocast have eager's dtypes, and its values up to the rounding of the
    operands. within: autocast is part of the graph."""

    def autocast(enabled: bool = True) -> torch.autocast:
        return torch.autocast(x.device.type, dtype, enabled=enabled)

    def call(x: Tensor) -> Any:
        with autocast():
            return model(x)

    eager = call if within else model.to(x.device)
    function, reports = compiled(eager)
    with autocast(not within):
        got, want = (run(f, list(model.parameters()), [x]) for f in (function, eager))
    largest = max(w.abs().max().item() for w in want[1:])
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert g.dtype == w.dtype
        torch.testing.assert_close(g, w, atol=0.02 * (largest if i else w.abs().max().item()), rtol=0)
    return reports[0]


def compile_and_check(model: nn.Module, *inputs: Tensor, dynamic: bool = False, aot: bool = False) -> Report:
    """Check that outputs and all gradients of the compiled model are as accurate as the eager model's, and return the
    report of its only graph.

    aot: whether AOT autograd traces the rewritten graph, too, which takes most of the time. It does if sizes are
        symbolic, because Dynamo leaves the eps of norms symbolic otherwise.
    """
    model.to(inputs[0].device)
    inner = "aot_eager" if dynamic or aot else "eager"
    function, reports = compiled(model, inner, fullgraph=True, dynamic=dynamic or None)
    exact = copy.deepcopy(model).double()
    doubles = [t.double() if t.is_floating_point() else t for t in inputs]
    torch.manual_seed(5)
    with Double():  # what is float32 by name is float64
        want = run(exact, list(exact.parameters()), doubles)
    torch.manual_seed(5)
    eager = run(model, list(model.parameters()), list(inputs))
    torch.manual_seed(5)
    got = run(function, list(model.parameters()), list(inputs))
    outputs = len(got) - (len(inputs) + len(list(model.parameters()))) * torch.is_grad_enabled()
    assert len(got) == len(eager) == len(want)
    largest = max((t.abs().max().item() for t in want[outputs:] if t.numel()), default=0.0)
    for i, (g, e, w) in enumerate(zip(got, eager, want, strict=True)):
        if i >= outputs and w.abs().max() < 1e-5 * largest:  # zero in exact arithmetic, as the key bias's gradient
            assert g.abs().max() <= 1e-4 * largest
            continue
        assert_as_accurate(g, e, w, factor=2.0 if i < outputs else GRADIENT, what=f"tensor {i}")
    (report,) = reports
    return report


def details(report: Report, kind: str) -> list[str]:
    """Return for every place of that kind the op, or "left: reason"."""
    return [entry.detail if entry.fused else f"left: {entry.detail}" for entry in report.entries if entry.kind == kind]


# How a module spells it, and the outcome as `details` has it; "...": its beginning
Row = tuple[Callable[..., Any], str]


def check_rows(
    kind: str, rows: dict[str, Row], build: Callable[[list[Callable[..., Any]]], nn.Module], *inputs: Tensor,
    dynamic: bool = False,
) -> Report:  # fmt: skip
    """Check numbers and outcomes of a table's rows, which are compiled as one model.

    build: makes the model that returns the outputs of all these spellings, in their order.
    """
    report = compile_and_check(build([spelling for spelling, _ in rows.values()]), *inputs, dynamic=dynamic)
    for (name, (_, expected)), outcome in zip(rows.items(), details(report, kind), strict=True):
        beginning = expected.removesuffix("...")
        same = outcome.startswith(beginning) if expected != beginning else outcome == expected
        assert same, f"{name}: {outcome!r}, expected {expected!r}"
    return report
