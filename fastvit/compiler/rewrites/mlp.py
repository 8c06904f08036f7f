"""The MLP of a transformer block, alone or with the norm before it:

    norm -> linear -> activation -> dropout -> linear -> dropout -> LayerScale, DropPath, residual
    norm -> gate and value -> activation(gate) * value -> norm -> linear -> ...

becomes `ops.layer_norm_mlp`, or `ops.mlp`. A norm is a LayerNorm or an RMSNorm; gate and value may be two layers or the
halves of one. The second layer may be a convolution of single pixels, which reads the tokens as an image.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch.fx import Node

from fastvit import ops
from fastvit.blocks.submodules import CannotFuse
from fastvit.compiler.match.calls import arguments, dropout_of, first, name_of, only_user, operands, scaled, words
from fastvit.compiler.match.layout import Layout, known_int
from fastvit.compiler.match.rewriter import Emitter, GraphRewriter
from fastvit.compiler.match.values import fake
from fastvit.compiler.match.views import follow, is_view, strip_views
from fastvit.compiler.rewrites.epilogue import replace_longest
from fastvit.compiler.rewrites.norm_linear import LinearCall, NormCall, is_norm, linear_of, norm_of, note_norm
from fastvit.ops.runtime.activations import GATED


class _Act(NamedTuple):
    """An activation: its name in the ops, its input, its last node, and all its nodes."""

    name: str
    x: Node
    root: Node
    matched: set[Node]


def rewrite(rewriter: GraphRewriter, node: Node) -> None:
    act = _activation(node)
    if act is not None and name_of(strip_views(act.x)[0]) == "linear":
        with rewriter.noting_refusals(node, "MLP"):
            _rewrite(rewriter, act, node)


def _activation(node: Node) -> _Act | None:
    name = name_of(node)
    if name == "gelu":
        x, approximate = arguments(node, input=None, approximate="none")
        return _Act("gelu" if approximate == "none" else "gelu_tanh", x, node, {node})
    if name in ("relu", "silu"):
        return _Act(name, first(node), node, {node}) if len(node.args) == 1 else None
    if name == "sigmoid":
        return _quick_gelu(node)
    return _tanh_gelu(node) if name == "tanh" else None


def _quick_gelu(sigmoid: Node) -> _Act | None:
    """x * sigmoid(1.702 * x)"""
    inner, root = scaled(first(sigmoid)), only_user(sigmoid)
    if inner is None or inner[1] != 1.702 or (inner[0], sigmoid) not in operands(root, "mul"):
        return None
    return _Act("quick_gelu", inner[0], root, {sigmoid, first(sigmoid), root})


def _tanh_gelu(tanh: Node) -> _Act | None:
    """0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))), terms and factors in any order"""
    inner = scaled(first(tanh))
    if inner is None or not math.isclose(inner[1], math.sqrt(2.0 / math.pi)):
        return None
    for x, term in operands(inner[0], "add"):
        cube = scaled(term)
        if cube is not None and cube[1] == 0.044715 and operands(cube[0], "pow")[:1] == [(x, 3.0)]:
            break
    else:
        return None
    for plus_one in tanh.users:
        for root in plus_one.users:
            halves = [half for one, half in operands(root, "mul") if one is plus_one and scaled(half) == (x, 0.5)]
            if halves and (tanh, 1.0) in operands(plus_one, "add"):
                matched = {tanh, first(tanh), inner[0], term, cube[0], plus_one, root, *halves}
                return _Act("gelu_tanh", x, root, matched)
    return None


def _rewrite(rewriter: GraphRewriter, act: _Act, site: Node) -> None:
    hidden, activation, matched = act.root, act.name, {*act.matched}
    gate_first: bool | None = True
    if name_of(user := only_user(hidden)) == "mul":
        hidden = user
        activation, fc1, gate_first, views = _gated(act, user)
        matched |= {user, *views}
    else:
        fc1 = [linear_of(act.x)]
    matched |= {linear.node for linear in fc1}
    hidden, drop1 = _past_dropout(hidden, matched)
    inner: Node | None = None
    if is_norm(only_user(hidden)) and not drop1:
        inner = hidden = only_user(hidden)
        matched.add(inner)
    _write_pixels_as_rows(rewriter, hidden, site)
    end = only_user(hidden)
    if name_of(end) != "linear" or first(end) is not hidden:
        raise CannotFuse(f"{words(end)} after its activation")
    fc2 = linear_of(end)
    matched.add(end)
    if drop1:  # the ops drop after both layers, with one probability
        end, drop2 = _past_dropout(end, matched)
        if drop1 != drop2:
            raise CannotFuse(f"its two dropouts differ: {drop1} and {drop2}")
    x = fc1[0].x

    def build(norm: NormCall | None, emit: Emitter, epilogue: dict[str, Any]) -> Node:
        options: dict[str, Any] = {"activation": activation, "dropout_p": drop1, **epilogue}
        if inner is not None:
            options["inner_norm"] = norm_of(inner).norm
        layers = *_first_layer(emit, fc1, gate_first), fc2.weight, fc2.bias
        if norm is None:
            return emit.call(ops.mlp, x, *layers, **options)
        return emit.call(ops.layer_norm_mlp, *norm.tensors, *layers, **norm.options, **options)

    try:
        norm = norm_of(x)
        replace_longest(rewriter, end, {*matched, x}, site, partial(build, norm))
        note_norm(rewriter, x, "layer_norm_mlp")
        detail = "layer_norm_mlp"
    except CannotFuse as reason:
        replace_longest(rewriter, end, matched, site, partial(build, None))
        detail = f"mlp ({reason})"
    rewriter.note(site, "MLP", detail)
    if inner is not None:
        note_norm(rewriter, inner, detail.partition(" ")[0])


def _write_pixels_as_rows(rewriter: GraphRewriter, hidden: Node, site: Node) -> None:
    """Replace a convolution of single pixels, if it reads hidden (..., C) as an image (B, C, h, w), by the linear layer
    that it is. Segmentation and depth heads have it after their readout."""
    at, views = hidden, list[Node]()
    while is_view(conv := only_user(at)) and first(conv) is at:
        views.append(at := conv)
    if name_of(conv) != "conv2d" or fake(conv).dim() != 4:
        return
    x, weight, bias, *window, groups = arguments(
        conv, input=None, weight=None, bias=None, stride=1, padding=0, dilation=1, groups=1
    )
    sizes = [tuple(t) if isinstance(t, tuple | list) else (t, t) for t in (*fake(weight).shape[2:], *window)]
    _, out, h, w = map(known_int, fake(conv).shape)
    if sizes[:-1] != [(1, 1), (1, 1), (1, 1), (0, 0)] or groups != 1 or None in (out, h, w) or x is not at:
        return
    image, B = follow(Layout.of(fake(hidden).shape), views), fake(conv).shape[0]
    if not image.permute((0, 2, 3, 1)).is_same(Layout.of((B, h, w, fake(hidden).shape[-1]))):
        return

    def build(emit: Emitter) -> Node:
        rows = emit.call(F.linear, hidden, emit.method("flatten", weight, 1), bias)
        return emit.method("permute", emit.method("reshape", rows, -1, h, w, out), 0, 3, 1, 2)

    rewriter.replace(conv, {*views}, build, site)


def _past_dropout(node: Node, matched: set[Node]) -> tuple[Node, float]:
    """Return the dropout after node and its probability, or node and 0."""
    user = only_user(node)
    if name_of(user) != "dropout":
        return node, 0.0
    matched.add(user)
    return user, dropout_of(user)


def _gated(act: _Act, product: Node) -> tuple[str, list[LinearCall], bool | None, list[Node]]:
    """Return what computes gate and value of act(gate) * value: the activation's name in the ops, the layers, whether
    the gate's rows come first in the one layer (None for two layers), and the views between layer and activation."""
    names = {plain: gated for gated, plain in GATED.items()}
    if act.name not in names:
        raise CannotFuse(f"a gate with {act.name}")
    a, b = arguments(product, input=None, other=None)
    value = b if a is act.root else a
    if not isinstance(value, Node):
        raise CannotFuse("an activation times a number")
    (gate_layer, gate_views), (value_layer, value_views) = strip_views(act.x), strip_views(value)
    if name_of(value_layer) != "linear":
        raise CannotFuse(f"a gate for {words(value_layer)}")
    gate, value_linear = linear_of(gate_layer), linear_of(value_layer)
    if gate_layer is not value_layer:
        if gate_views or value_views or gate.x is not value_linear.x:
            raise CannotFuse("gate and value are of different tensors")
        return names[act.name], [gate, value_linear], None, []
    whole = Layout.of(fake(gate_layer).shape)
    last, width = len(whole.dims) - 1, gate.out_features // 2
    halves = [whole.narrow(last, i * width, width) for i in (0, 1)]
    parts = [follow(whole, views) for views in (gate_views, value_views)]
    gate_first = parts[0].is_same(halves[0])
    if not all(map(Layout.is_same, parts if gate_first else reversed(parts), halves)):
        raise CannotFuse("gate and value are not the two halves of a layer")
    return names[act.name], [gate], gate_first, [*gate_views, *value_views]


def _first_layer(emit: Emitter, fc1: list[LinearCall], gate_first: bool | None) -> tuple[Any, Any]:
    """Return weights and biases for the ops: those of one layer, of two layers, or two views of a layer that has the
    value's rows first."""
    if gate_first is None:
        return tuple(linear.weight for linear in fc1), tuple(linear.bias for linear in fc1)
    (linear,) = fc1
    if gate_first:
        return linear.weight, linear.bias
    half = linear.out_features // 2

    def turned(t: Node | None) -> Any:
        return None if t is None else tuple(emit.method("narrow", t, 0, start, half) for start in (half, 0))

    return turned(linear.weight), turned(linear.bias)
