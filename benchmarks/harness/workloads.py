"""The list of workloads, workloads.txt: which op at which sizes, and for which use. Benchmarks, the traffic count, the
sanitizer and ahead-of-time compilation take theirs from it; `Workload.runner` builds the same call for each."""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.harness.draw import Draw, Runner
from benchmarks.harness.providers import COMPILED, OPS, VIT_B_16, compiled
from benchmarks.harness.sdpa_backend import BY_NAME
from fastvit.cuda_graphs import graphs

Step = Callable[[], tuple[Tensor, ...]]
LIST = Path(__file__).with_name("workloads.txt")
INSTALLED = [name for name in VIT_B_16 if importlib.util.find_spec(name) is not None]  # libraries


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
        if provider == "graphs":
            runner = OPS[self.op].build("fastvit", draw, **sizes)
            assert runner.module is not None
            runner.report = graphs(runner.module)
            return runner
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


def workloads(*uses: str, ops: tuple[str, ...] = ()) -> list[Workload]:
    """Return the workloads of any of the uses and, if given, of these ops, in the order of the list."""
    if unknown := [op for op in ops if op not in OPS]:
        near = difflib.get_close_matches(unknown[0], OPS, 4, 0.3) or sorted(OPS)
        raise ValueError(f"no op {unknown[0]!r}; did you mean {', '.join(near)}?")
    chosen = [w for w in _all() if w.uses & {*uses} and (not ops or w.op in ops)]
    if not chosen:
        having = sorted({w.op for w in _all() if w.uses & {*uses}})
        raise ValueError(f"no workload of {', '.join(ops)} is for {' or '.join(uses)}; there are: {', '.join(having)}")
    return chosen


def on_the_page() -> set[tuple[str, str]]:
    """Return op and name of the most important workloads, whichever libraries are installed."""
    return {(w.op, str(w)) for w in _read() if "page" in w.uses}


@functools.cache
def _all() -> tuple[Workload, ...]:
    return tuple(w for w in _read() if w.sizes.get("library", "") in ("", *INSTALLED))


def _read() -> Iterator[Workload]:
    op = ""
    for line in LIST.read_text().splitlines():
        if line.startswith("["):
            op = line.strip("[]")
        elif line and not line.startswith("#"):
            words = line.split()
            pairs = [word.partition("=")[::2] for word in words if "=" in word]
            uses = frozenset(word for word in words if "=" not in word)
            for values in itertools.product(*(text.split(",") for _, text in pairs)):
                sizes: dict[str, Any] = {}
                for (name, _), text in zip(pairs, values, strict=True):
                    sizes[name] = _value(text, sizes)
                yield Workload(op, sizes, uses, sizes.pop("parts", 1), sizes.pop("max_rounds", 200))


def _value(text: str, sizes: dict[str, Any]) -> Any:
    """Read a number, True, a word, or a multiple or a part of D."""
    if found := re.fullmatch(r"(\d*)D(?:/(\d+))?", text):
        return int(found[1] or 1) * sizes["D"] // int(found[2] or 1)
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
