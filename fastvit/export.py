"""Models with fused ops, ours and accelerated ones, outside of Python.

    with torch.no_grad():  # else the program also writes what a backward pass would read
        program = torch.export.export(model.eval(), (images,))  # calls torch.ops.fastvit
    torch.export.save(program, "model.pt2")

Such a program runs the fused kernels, and loads where `import fastvit.ops` came before. `torch.export.load` imports
nothing by itself: without it, it logs "We failed to resolve torch.ops.fastvit..." and raises RuntimeError, "We ran
into an error when deserializing the saved file". `decompositions` makes a program that needs torch alone.

    torch.onnx.export(model.eval(), (images,), "model.onnx", dynamo=True, opset_version=23)

needs no table: while it traces, the ops appear as PyTorch's own, so that the graph has LayerNormalization, Gelu from
opset 20 on, and Attention from opset 23 on (below that MatMul and Softmax). PyTorch needs onnxscript for it.

A model of transformers keeps its fused ops. With "eager" attention, transformers makes a mask in every call that
torch.export traces; it looks like a user's mask, so the program reads it. With "sdpa", the default, it makes none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastvit.ops.runtime.registry import DECOMPOSITIONS


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return a table for `torch.export.ExportedProgram.run_decompositions` that replaces fastvit's ops by PyTorch's:

        program = program.run_decompositions(fastvit.export.decompositions())  # calls torch.ops.aten alone
        torch.onnx.export(program, f="model.onnx", dynamo=True, opset_version=23)

    Returns:
        {overload: function}, for every op that a program may call. Active dropout draws other masks than fastvit's.
    """
    return dict(DECOMPOSITIONS)
