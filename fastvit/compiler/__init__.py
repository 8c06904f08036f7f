"""Fused ops in any model by its graph: torch.compile, with fastvit's ops instead of the patterns that they compute.

    model = torch.compile(model, backend="fastvit")  # or, with a report of what was found:
    model = fastvit.compile(model, report=True)

Dynamo records which functions of torch a model calls. In that graph, before autograd, ops of fastvit replace attention,
norms, MLPs, projections and patch embeddings wherever that is provably the same. So the forward and the backward pass
are fused, and only the ops' own tensors are saved. The inner backend compiles the rest. `fastvit.accelerate` does the
same for known classes without compiling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from fastvit.report import Entry, Report

__all__ = ["Entry", "Report", "backend", "compile"]

Inner = str | Callable[..., Any]


def compile(
    model: nn.Module | Callable[..., Any],
    *,
    inner: Inner | None = None,
    report: bool | Callable[[Report], None] = False,
    **options: Any,
) -> Any:
    """Return torch.compile(model) with fastvit's ops in its graphs. Nothing is compiled before the first call.

    Args:
        model: a module or function. Its parameters stay where they are, and it may be trained.
        inner: the backend that gets the rewritten graphs: a name as `torch.compile` takes it, or a backend function;
            None for "inductor", or, where that cannot compile for the device (on the CPU without a C++ compiler, on a
            GPU without Triton), "aot_eager", with one warning.
        report: True prints a `Report` of every graph when it is compiled: what was found, which op runs there, and what
            was left and why, by line of the model's source. A function is called with the report instead.
        options: those of `torch.compile`: fullgraph, dynamic, mode, options.

    Returns:
        The compiled model, as `torch.compile` returns it. Each new kind of input is compiled at its first call.
    """
    from fastvit.compiler.dynamo import compile_graph

    if not callable(model):
        raise TypeError(f"model must be an nn.Module or a function, got {type(model).__name__}")
    compiler = partial(compile_graph, inner=inner, on_report=print if report is True else report or None)
    return torch.compile(model, backend=compiler, **options)


def backend(gm: GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """Compile a graph for torch.compile(model, backend="fastvit"). Reports go to the logger `fastvit.compiler` at INFO.

    Args:
        gm: a graph of torch functions from Dynamo.
        inputs: its inputs.
        options: torch.compile's mode and options, if they were given.

    Returns:
        The compiled graph, a function of the inputs.
    """
    from fastvit.compiler.dynamo import compile_graph

    return compile_graph(gm, inputs, **options)
