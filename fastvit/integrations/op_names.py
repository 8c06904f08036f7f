"""The names of the ops that run a described module, for the report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from fastvit.blocks.grid import GridAttention, GridBlock
from fastvit.blocks.run import runs_in_steps
from fastvit.blocks.spec import AdaptedLinear, AttentionSpec, HalfSpec, MlpSpec, PlainLinear
from fastvit.blocks.submodules import class_name
from fastvit.blocks.windows import WindowBlock
from fastvit.integrations.forward import parts_of
from fastvit.ops import Norm


def ops_that_run(module: nn.Module, description: Any, ops: str = "") -> str:
    """Return the names of the ops that run a module, and the layers that run as modules. ops: the names, if the
    description does not determine them."""
    ops = ops or ", ".join(dict.fromkeys(_ops(description)))
    called = {id(call.module): call.module for call in parts_of(description, AdaptedLinear)}
    if not called:
        return ops
    names = [name for name, inner in module.named_modules() if id(inner) in called]
    return f"{ops}; {', '.join(names)} as {', '.join(sorted(set(map(_kind, called.values()))))}"


def _kind(layer: nn.Module) -> str:
    """Return the name of its class, and of its weight's class if that is not nn.Parameter."""
    weight = layer._parameters.get("weight")
    own = weight is not None and type(weight) is not nn.Parameter
    return class_name(type(layer)) + f" with {class_name(type(weight))}" * own


def _ops(part: Any) -> Iterator[str]:
    if isinstance(part, WindowBlock | GridBlock):
        half = part.attention
        yield f"{half.norm.kind}_norm" if half.branch.adapted else "layer_norm_linear"
        yield from _attention(half.branch, part.window is not None or part.positions.tables is not None)
        yield from _ops(part.mlp)
    elif isinstance(part, GridAttention):
        yield from _attention(part.attention, part.positions.tables is not None)
    elif isinstance(part, HalfSpec):
        is_attention = isinstance(part.branch, AttentionSpec)
        if runs_in_steps(part.branch):
            yield "layer_norm_linear" if is_attention and not part.branch.adapted else f"{part.norm.kind}_norm"
            yield from _ops(part.branch)
        else:
            yield "layer_norm_attention" if is_attention else "layer_norm_mlp"
    elif isinstance(part, AttentionSpec):
        yield from _attention(part, False)
    elif isinstance(part, MlpSpec):
        if not runs_in_steps(part):
            yield "mlp"
            return
        if PlainLinear in map(type, (part.fc1, part.value, part.fc2)):
            yield "linear"
        yield from _ops(part.inner_norm)
    elif isinstance(part, Norm):
        yield f"{part.kind}_norm"
    elif isinstance(part, tuple):
        for one in part:
            yield from _ops(one)


def _attention(attn: AttentionSpec, in_windows: bool) -> Iterator[str]:
    packed = len(attn.qkv) == 1 and attn.qk_norm is None and not attn.in_steps
    if attn.qk_norm is not None:
        yield f"{attn.qk_norm[0].kind}_norm" if attn.in_steps else "qk_norm"
    yield "attention_windows" if in_windows else "attention_qkvpacked" if packed else "attention"
    yield from _ops(attn.scale_norm)
    if isinstance(attn.proj, PlainLinear):
        yield "linear"
