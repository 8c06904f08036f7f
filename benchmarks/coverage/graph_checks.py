"""Compare one model in eager float32, eager float64 and compiled float32: outputs in evaluation mode, outputs and all
gradients in training mode, by the rule

    error(compiled) <= factor * error(eager) + floor    on the maximum and on the RMS; factor 2, or 3 for gradients

`floor` is four roundings of the tensor's largest element, or of the largest gradient's.

error(eager) is that of one run. If the compiled model fails against it, error(eager) is the largest of up to 17 runs:
in the others every parameter is moved, by one rounding in the first four runs and by four in the last four. One run may
be lucky where a top-k, a ReLU or a divisor near zero makes much of a rounding. Another order of summing n terms moves
more than that: it is exact for operands moved by up to n roundings (Higham 2002, section 4.2), by about sqrt(n) where
roundings are random (Higham and Mary 2019). Four is what sums of 16 terms make; most of these models' sums are longer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fastvit.study.accuracy.rule import errors, misplaced

Compile = Callable[[nn.Module], Callable[..., Any]]
Tensors = dict[str, Tensor]
_ROUNDINGS = 4 * torch.finfo(torch.float32).eps
_NEIGHBOURS = 16  # largest number of eager runs with moved parameters


class Wrong(AssertionError):
    """The compiled model computes something else."""


class Inaccurate(Wrong):
    """The error is too large, which rounding may or may not explain."""


class Double(TorchFunctionMode):
    """Within it, float32 by name means float64: softmax(dtype=float32), x.float(), torch.zeros(n). Random numbers are
    those of float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        elif not getattr(func, "__name__", "").startswith("rand"):
            args, kwargs = tuple(map(_double, args)), {key: _double(value) for key, value in (kwargs or {}).items()}
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype == torch.float32:
            return result.double()
        return result


def _double(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def tensors(result: Any, name: str = "output") -> Iterator[tuple[str, Tensor]]:
    """Yield the floating tensors of an output, each with its place in the output."""
    if isinstance(result, Tensor):
        if result.is_floating_point():
            yield name, result
        return
    if isinstance(result, Mapping):
        items: list[tuple[Any, Any]] = list(result.items())
    elif isinstance(result, list | tuple):
        items = list(enumerate(result))
    else:
        items = list(vars(result).items()) if hasattr(result, "__dict__") else []
    for key, value in items:
        yield from tensors(value, f"{name}.{key}")


def infer(function: Callable[..., Any], inputs: Mapping[str, Any]) -> Tensors:
    torch.manual_seed(3)
    with torch.no_grad():
        return {name: t.clone() for name, t in tensors(function(**inputs))}


def train(function: Callable[..., Any], model: nn.Module, inputs: Mapping[str, Any]) -> tuple[Tensors, Tensors]:
    """Return the outputs, and the gradients of all parameters and images for fixed random cotangents."""
    given = _with_floats(inputs, lambda t: t.detach().clone().requires_grad_())
    wanted = {name: t for name, t in given.items() if isinstance(t, Tensor) and t.requires_grad}
    wanted |= {name: p for name, p in model.named_parameters() if p.requires_grad}
    torch.manual_seed(3)
    outputs = dict(tensors(function(**given)))
    through = {name: t for name, t in outputs.items() if t.requires_grad}
    generator = torch.Generator().manual_seed(7)
    cotangents = [torch.randn(t.shape, generator=generator).to(t) for t in through.values()]
    own = torch.autograd.grad(list(through.values()), list(wanted.values()), cotangents, allow_unused=True)
    gradients = {name: g for name, g in zip(wanted, own, strict=True) if g is not None}
    return {name: t.detach().clone() for name, t in outputs.items()}, gradients


def _with_floats(inputs: Mapping[str, Any], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Return the inputs with their floating tensors changed."""
    floats = {name for name, value in inputs.items() if isinstance(value, Tensor) and value.is_floating_point()}
    return {name: change(value) if name in floats else value for name, value in inputs.items()}


class Results(NamedTuple):
    """Outputs in evaluation mode; outputs and gradients in training mode."""

    evaluated: Tensors
    trained: Tensors
    gradients: Tensors


class Model:
    """A model with its inputs, its results in eager mode, and the exact ones to compare with.

    Attributes:
        eager: the results of one run, and of as many runs with moved parameters as were needed.
    """

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        self.model, self.inputs = model, inputs
        exact = copy.deepcopy(model).double()
        self._state = {name: t.clone() for name, t in model.named_buffers()}
        self.eager = [self._results(model, lambda model: model)]
        doubled = _with_floats(inputs, Tensor.double)
        with Double():
            self.exact = Results(infer(exact.eval(), doubled), *train(exact.train(), exact, doubled))

    def _results(self, model: nn.Module, compile: Compile) -> Results:
        """Run both modes, each from the initial buffers, because batch normalisation counts its calls."""
        for name, buffer in model.named_buffers():
            buffer.copy_(self._state[name])
        torch._dynamo.reset()
        evaluated = infer(compile(model.eval()), self.inputs)
        torch._dynamo.reset()
        return Results(evaluated, *train(compile(model.train()), model, self.inputs))

    def check(self, compile: Compile) -> float:
        """Return the largest error as a share of the allowed one. Raises `Wrong` if the model fails."""
        results = self._results(self.model, compile)
        for runs in range(1, _NEIGHBOURS + 1):
            try:
                return self._judge(results, runs)
            except Inaccurate:
                if len(self.eager) == runs:
                    self.eager.append(self._neighbour(seed=runs))
        return self._judge(results, _NEIGHBOURS + 1)

    def _judge(self, results: Results, runs: int) -> float:
        """Judge by the first runs of eager mode."""
        evaluated, trained, gradients = zip(results, zip(*self.eager[:runs], strict=True), self.exact, strict=True)
        return max(
            judge(*evaluated, 2.0, "in evaluation"),
            judge(*trained, 2.0, "in training"),
            judge(*gradients, 3.0, "gradient of"),
        )

    def _neighbour(self, seed: int) -> Results:
        """Run the model with every parameter moved up or down, by one rounding for seeds 1 to 4, two for 5 to 8, ..."""
        generator = torch.Generator().manual_seed(seed)
        neighbour = copy.deepcopy(self.model)
        with torch.no_grad():
            for p in neighbour.parameters():
                if p.is_floating_point():
                    up = torch.rand(p.shape, generator=generator) < 0.5
                    for _ in range(1 + (seed - 1) // 4):
                        p.copy_(torch.nextafter(p, torch.where(up, torch.inf, -torch.inf)))
        return self._results(neighbour, lambda model: model)


def judge(got: Tensors, eager: Sequence[Tensors], exact: Tensors, factor: float, what: str) -> float:
    """Return the largest error of all tensors as a share of the allowed one. eager: the results of all runs."""
    one, *_ = eager
    if got.keys() != one.keys():
        raise Wrong(f"{what}: other tensors, {sorted(got.keys() ^ one.keys())[:3]}")
    scale = max((_largest(t) for t in exact.values()), default=0.0) if factor == 3.0 else 0.0
    worst = 0.0
    for name, want in exact.items():
        if got[name].shape != want.shape or got[name].dtype != one[name].dtype:
            raise Wrong(f"{what} {name}: {got[name].dtype} of {tuple(got[name].shape)}")
        if misplaced(got[name], one[name]):
            raise Wrong(f"{what} {name}: finite elsewhere than in eager mode")
        floor = _ROUNDINGS * max(scale, _largest(want))
        by_run = [errors(got[name], run[name], want) for run in eager]
        for norm in zip(*by_run, strict=False):
            e, allowed = max(error.measured for error in norm), max(error.eager for error in norm)
            share = e / (factor * allowed + floor) if e else 0.0
            worst = max(worst, share)
            if share > 1:
                raise Inaccurate(f"{what} {name}: error {e:.1e}, eager {allowed:.1e}, floor {floor:.1e}")
    return worst


def _largest(t: Tensor) -> float:
    t = t[t.isfinite()]
    return float(t.abs().max()) if t.numel() else 0.0
