"""The attention half of a pre-norm block, around an `ops.attention` that `attention.py` has written:

    norm -> linear, packed or three -> q, k, v -> attention -> linear -> LayerScale, DropPath, residual

becomes `ops.layer_norm_attention`, one node that saves x, q, k, v and attention's output. Optional parts: norms of q
and k over each head, rotary positions of both, a mask or bias of the scores, a norm before the last projection. A norm
is a LayerNorm or an RMSNorm. If k and v have fewer heads than q, another length, or another input, attention stays
`ops.attention`. If the pattern fails but one layer computes q, k and v, attention becomes `ops.attention_qkvpacked`,
whose gradient is one tensor.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from fastvit import ops
from fastvit.blocks.submodules import CannotFuse
from fastvit.compiler.match.calls import first, name_of, scaled, user_of, words
from fastvit.compiler.match.layout import Layout, Size, known_equal, same_shape
from fastvit.compiler.match.rewriter import Emitter, GraphRewriter
from fastvit.compiler.match.values import fake
from fastvit.compiler.match.views import follow, is_view, strip_views, widened
from fastvit.compiler.rewrites.epilogue import replace_longest
from fastvit.compiler.rewrites.norm_linear import LinearCall, NormCall, is_norm, linear_of, norm_of, note_norm
from fastvit.compiler.rewrites.rotary import rotation_of, same_positions
from fastvit.ops import Rotary


def rewrite(rewriter: GraphRewriter, node: Node) -> None:
    if node.target is not ops.attention:
        return
    qkv: _Projections | None = None
    try:
        qkv = _Projections(node)
        _rewrite_half(rewriter, node, qkv)
        detail = "layer_norm_attention"
    except CannotFuse as reason:
        packed = qkv is not None and _rewrite_packed(rewriter, node, qkv)
        detail = f"{'attention_qkvpacked' if packed else 'attention'} ({reason})"
    rewriter.note(node, "attention", detail)


@dataclass
class _Path:
    """How q, k or v comes out of a linear layer: by views of its output, and for q and k by factors, rotary positions
    and a norm. matched: all nodes after the layer."""

    linear: Node
    views: list[Node]
    matched: set[Node]
    factor: float = 1.0  # belongs to the scale of the scores
    rotary: Rotary | None = None  # of nodes
    norm: NormCall | None = None


def _path_to(t: Any, *, scores: bool) -> _Path:
    """Return how t comes out of a linear layer. scores: whether it is q or k, which may be more than a view."""
    at, views = strip_views(t)
    path = _Path(at, views, set())
    while scores:
        matched = frozenset((at,))
        if path.norm is not None:
            if not widened(at):  # the op computes in float32, too
                break
            before = first(at)
        elif is_norm(at):
            path.norm = norm_of(at)
            if not follow(Layout.of(fake(at).shape), views).has_rows_of(fake(at).shape[-1]):
                raise CannotFuse("a norm of all heads at once between projection and attention")
            before = path.norm.x
        elif (factor := scaled(at)) is not None:
            before = factor[0]
            path.factor *= factor[1]
        elif path.rotary is None and (rotation := rotation_of(at)) is not None:
            in_order = Layout.of(fake(at).shape).permute((0, 2, 1, 3))  # (B, H, N, d) as (B, N, H, d)
            if not follow(Layout.of(fake(at).shape), views).is_same(in_order):
                raise CannotFuse("rotary positions of tokens in another order")
            before, path.rotary, matched = rotation.x, rotation.rotary, rotation.matched
        else:
            break
        path.matched |= matched
        at, earlier = strip_views(before)
        views = earlier + views
    if name_of(at) != "linear":
        raise CannotFuse(f"{words(at)} between projection and attention")
    path.linear, path.views = at, views
    path.matched |= {*views}
    return path


class _Projections:
    """The linear layers that compute q, k and v of an `ops.attention` node, and their input `y`. Raises CannotFuse if
    q, k and v are not plain slices of the outputs of one or three linear layers.

    Attributes:
        options: of the ops: scale, dropout_p, and perhaps attn_mask and is_causal.
        packed: whether there is one layer.
        plain: whether attention_qkvpacked could read its output.
    """

    def __init__(self, attention: Node) -> None:
        self.B, self.N, self.H, self.d = fake(attention.args[0]).shape
        _, N, heads, _ = fake(attention.args[1]).shape
        if not known_equal(N, self.N):
            raise CannotFuse("k and v of another length than q")
        if not known_equal(heads, self.H):
            raise CannotFuse("k and v with fewer heads than q")
        q, k, _ = self._paths = [_path_to(t, scores=i < 2) for i, t in enumerate(attention.args)]
        if not same_positions(q.rotary, k.rotary):
            raise CannotFuse("q and k with different rotary positions")
        self.norms = [path.norm for path in (q, k) if path.norm is not None]
        if len(self.norms) == 1 or len({(call.norm.kind, call.norm.eps) for call in self.norms}) > 1:
            raise CannotFuse("q and k with different norms")
        self.rotary = q.rotary
        options: dict[str, Any] = {name: value for name, value in attention.kwargs.items() if name != "layout"}
        scale = self.d**-0.5 if options["scale"] is None else options["scale"]
        self.options = {**options, "scale": q.factor * k.factor * float(scale)}
        nodes = list(dict.fromkeys(path.linear for path in self._paths))
        if len(nodes) not in (1, 3):
            raise CannotFuse("q, k and v come out of two layers")
        self.packed = len(nodes) == 1
        self.linears = [linear_of(node) for node in nodes]
        (self.y, views), *others = (strip_views(linear.x) for linear in self.linears)
        if any(other != (self.y, views) for other in others):
            raise CannotFuse("q, k and v are of different tensors")
        self.plain = self.packed and not (views or self.rotary or self.norms)
        self.matched = {*nodes, *views}.union(*(path.matched for path in self._paths))
        if known_equal(self.H, 1) and self.linears[0].out_features > self.d:  # perhaps (B * H, N, 1, d)
            self.H = self.linears[0].out_features // (3 * self.d if self.packed else self.d)
            self.B = fake(self.y).shape[0]
            if self.H != 1:
                self.plain = False
                if "attn_mask" in attention.kwargs:
                    raise CannotFuse("a mask of heads in the batch")
        if fake(self.y).dim() != 3 or not same_shape(fake(self.y).shape[:2], (self.B, self.N)):
            raise CannotFuse(f"a projection of {tuple(fake(self.y).shape)}")
        self._check_order(follow(Layout.of(fake(self.y).shape), views))

    def _check_order(self, x: Layout) -> None:
        """Check that q, k and v have the rows of the layers in the op's order. x: the layers' input."""
        E = self.H * self.d
        width = 3 * E if self.packed else E
        for i, path in enumerate(self._paths):
            out = linear_of(path.linear).out_features
            if not known_equal(out, width):
                raise CannotFuse(f"a projection to {out} for {self.H} heads of {self.d}")
            want = Layout.of(
                (self.B, self.N, self.H, self.d), (self.N * width, width, self.d, 1), i * E if self.packed else 0
            )
            arranged = follow(x.through_linear(out), path.views)
            if not known_equal(arranged.size(0), self.B):
                arranged = arranged.reshape((self.B, self.H, self.N, self.d)).permute((0, 2, 1, 3))
            if not arranged.is_same(want):
                raise CannotFuse("heads in another order than (3, H, d)" if self.packed else "heads in another order")


def _rewrite_half(rewriter: GraphRewriter, attention: Node, qkv: _Projections) -> None:
    norm = norm_of(qkv.y)
    end, proj, scale_norm, between = _projected(attention, qkv)
    matched = {qkv.y, attention, *qkv.matched, *between}

    def build(emit: Emitter, epilogue: dict[str, Any]) -> Node:
        weights: Any = tuple(linear.weight for linear in qkv.linears)
        biases: Any = tuple(linear.bias for linear in qkv.linears)
        if qkv.packed:
            (weights,), (biases,) = weights, biases
        options = {**epilogue, **qkv.options}
        if qkv.rotary:
            options["rotary"] = qkv.rotary
        if qkv.norms:
            options["qk_norm"] = tuple(head_norm.norm for head_norm in qkv.norms)
        if scale_norm is not None:
            options["scale_norm"] = scale_norm.norm
        layers = weights, biases, proj.weight, proj.bias
        return emit.call(ops.layer_norm_attention, *norm.tensors, *layers, qkv.H, **norm.options, **options)

    replace_longest(rewriter, end, matched, attention, build)
    for taken in (norm, *qkv.norms, scale_norm):
        if taken is not None:
            note_norm(rewriter, taken.node, "layer_norm_attention")


def _projected(attention: Node, qkv: _Projections) -> tuple[Node, LinearCall, NormCall | None, list[Node]]:
    """Return the projection of attention's output, (B, N, out), its linear layer, the norm before it, if there is one,
    and the nodes from attention to the projection."""
    between: list[Node] = []
    at, layout = attention, Layout.of((qkv.B, qkv.N, qkv.H, qkv.d))
    if not known_equal(fake(attention).shape[0], qkv.B):
        layout = layout.permute((0, 2, 1, 3)).reshape(fake(attention).shape)
    proj: LinearCall | None = None
    norm: NormCall | None = None
    E: Size = qkv.H * qkv.d
    while proj is None or not layout.is_same(Layout.of((qkv.B, qkv.N, proj.out_features))):
        user = user_of(at)
        if user is None:
            raise CannotFuse("attention's output is used more than once")
        if name_of(user) == "linear" and first(user) is at and proj is None:
            proj = linear_of(user)
            if not known_equal(fake(at).shape[-1], E):
                raise CannotFuse("a projection of single heads")
            try:
                layout = layout.through_linear(proj.out_features)
            except CannotFuse:
                raise CannotFuse("the projection reads heads in another order") from None
        elif is_norm(user) and first(user) is at and proj is norm is None:
            norm = norm_of(user)
            if not layout.has_rows_of(E):
                raise CannotFuse("a norm of single heads after attention")
        elif is_view(user) and first(user) is at:
            layout = follow(layout, [user])
        else:
            raise CannotFuse(f"{words(user)} after attention")
        between.append(at)
        at = user
    return at, proj, norm, between


def _rewrite_packed(rewriter: GraphRewriter, attention: Node, qkv: _Projections) -> bool:
    linear = qkv.linears[0].node

    def build(emit: Emitter) -> Node:
        packed = emit.method("unflatten", linear, -1, (3, qkv.H, qkv.d))
        return emit.call(ops.attention_qkvpacked, packed, **qkv.options)

    with contextlib.suppress(CannotFuse):
        if qkv.plain:
            rewriter.replace(attention, qkv.matched - {linear}, build, attention)
            return True
    return False
