"""Small modules around attention and MLPs, compiled by `fastvit.compile` and compared with eager mode."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from oracle import GRADIENT, assert_as_accurate
from torch import Tensor, nn

import fastvit
from benchmarks.coverage.graph_checks import Double
from fastvit.graph import Report

B, N, H, D = 2, 9, 2, 32
EPS = 1e-5


class FunctionModule(nn.Module):
    """A module of layers whose forward is a function(self, *inputs)."""

    def __init__(self, forward: Callable[..., Any], **layers: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self._function = forward

    def forward(self, *inputs: Tensor) -> Any:
        return self._function(self, *inputs)


class RMSNorm(nn.Module):
    """The spelling of transformers' Llama."""

    def __init__(self, size: int = D) -> None:
        super().__init__()
        self.weight = nn.Parameter(1.0 + 0.1 * torch.randn(size))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
        return self.weight * x.to(dtype)


NORMS = {"RMSNorm": RMSNorm, "LayerNorm": lambda size=D: nn.LayerNorm(size, EPS, bias=False)}


def half(forward: Callable[..., Any], qkv: int = 3 * D, **layers: Any) -> FunctionModule:
    """Return a module with norm, qkv, proj and more layers."""
    return FunctionModule(forward, norm=nn.LayerNorm(D), qkv=nn.Linear(D, qkv), proj=nn.Linear(D, D), **layers)


def mlp(forward: Callable[..., Any], hidden: int = 3 * D, widened: int = 1, **layers: Any) -> FunctionModule:
    """Return a module with norm, fc1, fc2 and more layers."""
    fc1, fc2 = nn.Linear(D, widened * hidden), nn.Linear(hidden, D)
    return FunctionModule(forward, norm=nn.LayerNorm(D), fc1=fc1, fc2=fc2, **layers)


def together(forwards: Iterable[Callable[..., Any]]) -> Callable[..., tuple[Tensor, ...]]:
    """Return the forward that returns the outputs of all of these for the same inputs: one graph instead of many."""
    forwards = list(forwards)
    return lambda m, *inputs: tuple(t for forward in forwards for t in tensors(forward(m, *inputs)))


def heads(qkv: Tensor) -> tuple[Tensor, ...]:
    """(B, N, 3 * D) -> three of (B, H, N, d)"""
    return qkv.reshape(*qkv.shape[:2], 3, H, -1).permute(2, 0, 3, 1, 4).unbind(0)


def joined(attended: Tensor) -> Tensor:
    """(B, H, N, d) -> (B, N, D)"""
    return attended.transpose(1, 2).flatten(2)


def tensors(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, tuple | list) else [result]


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


def compile_and_check(model: nn.Module, *inputs: Tensor, **options: Any) -> Report:
    """Check that outputs and all gradients of the compiled model are as accurate as the eager model's, and return the
    report of its only graph."""
    torch._dynamo.reset()
    model.to(inputs[0].device)
    reports: list[Report] = []
    compiled = fastvit.compile(model, inner="aot_eager", report=reports.append, fullgraph=True, **options)
    exact = copy.deepcopy(model).double()
    doubles = [t.double() if t.is_floating_point() else t for t in inputs]
    torch.manual_seed(5)
    with Double():  # what is float32 by name is float64
        want = run(exact, list(exact.parameters()), doubles)
    torch.manual_seed(5)
    eager = run(model, list(model.parameters()), list(inputs))
    torch.manual_seed(5)
    got = run(compiled, list(model.parameters()), list(inputs))
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
