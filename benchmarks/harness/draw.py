"""`Draw`, the data of a workload, equal for every provider; and `Runner`, a workload as one provider runs it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.harness.photographs import photographs
from fastvit.cuda_graphs import GraphsReport
from fastvit.study.accuracy.cases import WITHOUT_GRADIENT, values


class Draw:
    """Deterministic data: the same calls give the same numbers for every provider and precision.

    Numbers are rounded to `dtype`, the precision under test, and then held in `compute`, so that a float64 run gives
    the exact answer for the inputs that the others get. On the "meta" device nothing is computed. number: which of
    several draws; each has other numbers.
    """

    def __init__(
        self, dtype: torch.dtype, device: torch.device | str, compute: torch.dtype | None = None, number: int = 0
    ) -> None:
        self.dtype = dtype
        self.device = torch.device(device)
        self.compute = compute or dtype
        self._seeds = itertools.count(number << 20)  # generators on the CPU see 32 bits

    def _random(self, shape: tuple[int, ...]) -> Tensor:
        seed = next(self._seeds)
        if self.device.type == "meta":
            return torch.empty(shape, device="meta")
        return torch.randn(shape, generator=torch.Generator(self.device).manual_seed(seed), device=self.device)

    def _rounded(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).to(self.compute)

    def normal(self, *shape: int) -> Tensor:
        """Draw a leaf that requires a gradient."""
        return self._rounded(self._random(shape)).requires_grad_()

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Draw the tensor of an op that has this name in the table of ops. What takes no gradient, bytes aside, is
        float32 in every precision."""
        x = values(name, self._random(shape))
        return x if name in WITHOUT_GRADIENT else self._rounded(x).requires_grad_()

    def cotangents(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Draw gradients of the outputs."""
        return tuple(self.normal(*out.shape).detach() for out in outputs)

    def photographs(self, count: int, size: int) -> Tensor:
        """Return (count, 3, size, size), normalised, in this draw's precision, without a gradient."""
        meta = self.device.type == "meta"
        return self._rounded(self._random((count, 3, size, size)) if meta else photographs(count, size).to(self.device))

    def module(self, factory: Callable[[], nn.Module]) -> nn.Module:
        """Build a module and draw its parameters in the order of their names, so that none has the degenerate values of
        an initialisation."""
        with torch.device(self.device):
            module = factory().to(self.compute)
        with torch.no_grad():
            for name, parameter in sorted(module.named_parameters()):
                mean = 1.0 if "norm" in name and name.endswith("weight") else 0.0
                parameter.copy_(self._rounded(self._random(tuple(parameter.shape)) * 0.02 + mean))
        return module


@dataclass
class Runner:
    """A workload as one provider runs it. `forward()` computes from tensors that it already holds. report: of
    `fastvit.graphs` on the module, if that was called."""

    forward: Callable[[], Tensor | tuple[Tensor, ...]]
    inputs: tuple[Tensor, ...]
    parameters: tuple[Tensor, ...] = ()
    module: nn.Module | None = None
    report: GraphsReport | None = None

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return tuple(t for t in (*self.inputs, *self.parameters) if t.requires_grad)

    def outputs(self) -> tuple[Tensor, ...]:
        out = self.forward()
        return out if isinstance(out, tuple) else (out,)

    def gradients(self, gradients: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        """Run forward and backward; return the leaves' gradients, without accumulation. gradients: of the outputs, ones
        unless given."""
        outputs = self.outputs()
        return torch.autograd.grad(outputs, self.leaves, gradients or [torch.ones_like(out) for out in outputs])

    def infer(self) -> tuple[Tensor, ...]:
        with torch.inference_mode():
            return self.outputs()

    def train(self, training: bool) -> Runner:
        if self.module is not None:
            self.module.train(training)
        return self
