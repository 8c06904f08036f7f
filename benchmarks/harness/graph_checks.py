"""One model in eager float32, eager float64 and compiled float32: outputs in evaluation mode, and outputs and all
gradients in training mode, by the rule

    error(compiled) <= factor * error(eager) + floor    on the maximum and on the RMS; factor 2, or 3 for gradients

`floor` is four roundings of the tensor's largest element, or of the largest gradient's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Compile = Callable[[nn.Module], Callable[..., Any]]
Tensors = dict[str, Tensor]
_ROUNDINGS = 4 * torch.finfo(torch.float32).eps


class Wrong(AssertionError):
    """Compiled, the model computes something else."""


class Double(TorchFunctionMode):
    """What a model does in float32 by name is float64: softmax(dtype=float32), x.float(), torch.zeros(n). Random
    numbers are those of float32."""

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
    """The floating tensors of an output, and where they are in it."""
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
    """Outputs, and the gradients of all parameters and images for fixed random cotangents."""
    given = {name: _leaf(value) for name, value in inputs.items()}
    wanted = {name: t for name, t in given.items() if isinstance(t, Tensor) and t.requires_grad}
    wanted |= {name: p for name, p in model.named_parameters() if p.requires_grad}
    torch.manual_seed(3)
    outputs = dict(tensors(function(**given)))
    through = {name: t for name, t in outputs.items() if t.requires_grad}
    generator = torch.Generator().manual_seed(7)
    cotangents = [torch.randn(t.shape, generator=generator).to(t) for t in through.values()]
    found = torch.autograd.grad(list(through.values()), list(wanted.values()), cotangents, allow_unused=True)
    gradients = {name: g for name, g in zip(wanted, found, strict=True) if g is not None}
    return {name: t.detach().clone() for name, t in outputs.items()}, gradients


def _leaf(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().clone().requires_grad_()
    return value


class Model:
    """A model with its inputs, and the exact results to compare with."""

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        self.model, self.inputs = model, inputs
        exact = copy.deepcopy(model).double()
        doubled = {name: _to_double(value) for name, value in inputs.items()}
        self.eager, self.exact = infer(model.eval(), inputs), self._double(infer, exact.eval(), doubled)
        self.state = {name: t.clone() for name, t in model.named_buffers()}
        self.eager_trained = train(self._training(), model, inputs)
        self.exact_trained = self._double(train, exact.train(), exact, doubled)

    @staticmethod
    def _double(run: Callable[..., Any], *arguments: Any) -> Any:
        with Double():
            return run(*arguments)

    def _training(self) -> nn.Module:
        """In training mode, with the buffers that it began with: batch normalisation counts."""
        for name, buffer in self.model.named_buffers():
            buffer.copy_(self.state[name])
        return self.model.train()

    def check(self, compile: Compile) -> float:
        """The largest error as a share of the one allowed; raises `Wrong`."""
        torch._dynamo.reset()
        self._training().eval()
        found = infer(compile(self.model), self.inputs)
        torch._dynamo.reset()
        outputs, gradients = train(compile(self._training()), self.model, self.inputs)
        return max(
            judge(found, self.eager, self.exact, 2.0, "in evaluation"),
            judge(outputs, self.eager_trained[0], self.exact_trained[0], 2.0, "in training"),
            judge(gradients, self.eager_trained[1], self.exact_trained[1], 3.0, "gradient of"),
        )


def _to_double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def judge(got: Tensors, eager: Tensors, exact: Tensors, factor: float, what: str) -> float:
    """The largest error of all tensors as a share of the one allowed."""
    if got.keys() != eager.keys():
        raise Wrong(f"{what}: other tensors, {sorted(got.keys() ^ eager.keys())[:3]}")
    scale = max((_largest(t) for t in exact.values()), default=0.0) if factor == 3.0 else 0.0
    worst = 0.0
    for name, want in exact.items():
        if got[name].shape != want.shape or got[name].dtype != eager[name].dtype:
            raise Wrong(f"{what} {name}: {got[name].dtype} of {tuple(got[name].shape)}")
        finite = want.isfinite()
        if not torch.equal(got[name].isfinite(), eager[name].isfinite()):
            raise Wrong(f"{what} {name}: finite elsewhere than in eager mode")
        finite &= eager[name].isfinite()
        if not finite.any():
            continue
        error, own = (got[name].double() - want)[finite].abs(), (eager[name].double() - want)[finite].abs()
        floor = _ROUNDINGS * max(scale, _largest(want))
        for e, allowed in ((error.max(), own.max()), (error.square().mean().sqrt(), own.square().mean().sqrt())):
            share = float(e) / (factor * float(allowed) + floor) if float(e) else 0.0
            worst = max(worst, share)
            if share > 1:
                raise Wrong(f"{what} {name}: error {float(e):.1e}, eager {float(allowed):.1e}, floor {floor:.1e}")
    return worst


def _largest(t: Tensor) -> float:
    t = t[t.isfinite()]
    return float(t.abs().max()) if t.numel() else 0.0
