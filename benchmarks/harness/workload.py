"""One op at one shape: its names, and how providers run it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.harness.draw import Draw, Runner
from benchmarks.harness.providers import COMPILED, OPS, compiled
from benchmarks.harness.sdpa_backend import BY_NAME

Step = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Workload:
    """One op at one shape, forward and backward. sizes: arguments of the op's builder in harness/providers.py."""

    op: str
    sizes: dict[str, Any]
    uses: frozenset[str] = frozenset()
    parts: int = 1
    max_rounds: int = 200

    def __str__(self) -> str:
        return " ".join(_words(self.sizes))

    @property
    def id(self) -> str:
        return f"{self.op} {self}".replace(",", "").replace(" ", "-")

    @property
    def check(self) -> dict[str, Any]:
        return OPS[self.op].check(self.sizes)

    @property
    def providers(self) -> tuple[str, ...]:
        """Those that run the op. With "sdpa" go its kernels by name, within `sdpa_backend.kernel_of`."""
        own = OPS[self.op].providers
        return (*own, *BY_NAME) if "sdpa" in own else own

    def runner(self, provider: str, draw: Draw, *, check: bool = False) -> Runner:
        sizes = {**self.sizes, **self.check} if check else self.sizes
        provider = "sdpa" if provider in BY_NAME else provider
        if provider not in COMPILED:
            return OPS[self.op].build(provider, draw, **sizes)
        # the best plain PyTorch for this op
        runner = OPS[self.op].build("sdpa" if "sdpa" in self.providers else "eager", draw, **sizes)
        torch.compiler.reset()
        runner.forward = compiled(provider, runner.forward)
        return runner

    def step(self, provider: str, mode: str, draw: Draw) -> tuple[Step, Runner]:
        """Return the function that is timed: forward (mode "inference"), or forward and backward ("training") with
        random gradients of the outputs."""
        runner = self.runner(provider, draw).train(mode == "training")
        if mode == "inference":
            return runner.infer, runner
        gradients = draw.cotangents(runner.outputs())
        return (lambda: runner.gradients(gradients)), runner

    def cost(self, mode: str, dtype: torch.dtype) -> tuple[int, int]:
        """Return the FLOPs that eager needs and the bytes that must move, from shapes alone, on the meta device."""
        draw = Draw(dtype, "meta")
        runner = self.runner("eager", draw)
        with FlopCounterMode(display=False) as counter:
            outputs = runner.outputs()
            if mode == "training":
                torch.autograd.backward(outputs, draw.cotangents(outputs))  # the counter's hooks refuse grad()
        into, out, leaves = (
            sum(t.nbytes for t in tensors) for tensors in ((*runner.inputs, *runner.parameters), outputs, runner.leaves)
        )
        # backward reads inputs and parameters again and the outputs' gradients, and writes the leaves'
        moved = into + out if mode == "inference" else 2 * into + 2 * out + leaves
        return counter.get_total_flops(), moved


def _words(sizes: dict[str, Any]) -> Iterator[str]:
    """{"B": 1, "d": 64, "activation": "gelu", "scales": True} -> B1 d64 gelu scales"""
    for name, value in sizes.items():
        if isinstance(value, str):
            yield value
        elif isinstance(value, bool):
            if value:
                yield name
        else:
            yield f"{name}{value}"
