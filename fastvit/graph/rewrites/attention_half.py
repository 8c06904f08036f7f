"""The attention half of a pre-norm block, around an `ops.attention` that `attention.py` has written:

    norm -> linear, packed or three -> q, k, v -> attention -> linear -> LayerScale, DropPath, residual

becomes `ops.layer_norm_attention`, one node that saves x, q, k, v and attention's output. Optional parts: norms of q
and k over each head, rotary positions of both, a mask or bias of the scores, a norm before the last projection. A norm
is a LayerNorm or an RMSNorm. If k and v have fewer heads than q, attention stays `ops.attention`. If the pattern fails
but one layer computes q, k and v, attention becomes `ops.attention_qkvpacked`, whose gradient is one tensor.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from fastvit import ops
from fastvit.blocks.submodules import CannotFuse
from fastvit.graph.match.calls import first, name_of, scaled, words
from fastvit.graph.match.layout import Layout, Size, known_equal, same_shape
from fastvit.graph.match.rewriter import Emitter, GraphRewriter
from fastvit.graph.match.values import fake
from fastvit.graph.match.views import follow, is_view, strip_views, widened
from fastvit.graph.rewrites.epilogue import replace_longest
from fastvit.graph.rewrites.norm_linear import LinearCall, NormCall, is_norm, linear_of, norm_of, note_norm
from fastvit.graph.rewrites.rotary import rotation_of, same_positions
from fastvit.ops import Rotary


def rewrite(rewriter: GraphRewriter) -> None:
    for node in list(rewriter.graph.nodes):
        if node.op == "call_function" and node.target is ops.attention:
            site = node.meta["fastvit_site"]
            try:
                projections = _Projections(node)
            except CannotFuse as reason:
                rewriter.note(site, "attention", True, f"attention ({reason})")
                continue
            try:
                _rewrite_half(rewriter, node, projections)
                rewriter.note(site, "attention", True, "layer_norm_attention")
            except CannotFuse as reason:
                if projections.packed and _rewrite_packed(rewriter, node, projections):
                    rewriter.note(site, "attention", True, f"attention_qkvpacked ({reason})")
                else:
                    rewriter.note(site, "attention", True, f"attention ({reason})")


class _Projections:
    """The linear layers that compute q, k and v of an `ops.attention` node, and their input. Raises CannotFuse if q, k
    and v are not plain slices of the outputs of one or three linear layers."""

    def __init__(self, attention: Node) -> None:
        self.matched: set[Node] = set()
        self.factor = 1.0  # of the scale
        self.B, self.N, self.H, self.d = fake(attention.args[0]).shape
        self.mask: Node | None = attention.kwargs.get("attn_mask")  # type: ignore[assignment]
        if not known_equal(fake(attention.args[1]).shape[2], self.H):
            raise CannotFuse("k and v with fewer heads than q")
        self.plain = True  # whether attention_qkvpacked could read the projection's output
        self.rotary: list[Rotary] = []  # of nodes, of q and of k
        self.norms: list[NormCall] = []  # of q and of k
        projections = [self._projection_of(t, scores=i < 2) for i, t in enumerate(attention.args)]
        if self.rotary and (len(self.rotary) != 2 or not same_positions(*self.rotary)):
            raise CannotFuse("q and k with different rotary positions")
        formulas = [(norm.kind, norm.eps) for norm in self.norms]
        if formulas and (len(formulas) != 2 or formulas[0] != formulas[1]):
            raise CannotFuse("q and k with different norms")
        nodes = list(dict.fromkeys(linear for linear, _ in projections))
        if len(nodes) not in (1, 3):
            raise CannotFuse("q, k and v come out of two layers")
        self.packed = len(nodes) == 1
        self.linears = [linear_of(node) for node in nodes]
        origins = [strip_views(linear.x) for linear in self.linears]
        self.y, views = origins[0]
        if any(y is not self.y or chain != views for y, chain in origins):
            raise CannotFuse("q, k and v are of different tensors")
        if known_equal(self.H, 1) and self.linears[0].out_features > self.d:  # perhaps (B * H, N, 1, d)
            self.H = self.linears[0].out_features // (3 * self.d if self.packed else self.d)
            self.B, self.plain = fake(self.y).shape[0], self.H == 1
            if self.mask is not None and self.H != 1:
                raise CannotFuse("a mask of heads in the batch")
        if fake(self.y).dim() != 3 or not same_shape(fake(self.y).shape[:2], (self.B, self.N)):
            raise CannotFuse(f"a projection of {tuple(fake(self.y).shape)}")
        of_y = follow(Layout.of(fake(self.y).shape), views)
        self.matched |= {*nodes, *views}
        self.plain = self.plain and not views
        E = self.H * self.d
        width = 3 * E if self.packed else E
        for i, (linear, chain) in enumerate(projections):
            out = linear_of(linear).out_features
            if not known_equal(out, width):
                raise CannotFuse(f"a projection to {out} for {self.H} heads of {self.d}")
            want = Layout.of(
                (self.B, self.N, self.H, self.d), (self.N * width, width, self.d, 1), i * E if self.packed else 0
            )
            arranged = follow(of_y.through_linear(out), chain)
            if not known_equal(arranged.size(0), self.B):
                arranged = arranged.reshape((self.B, self.H, self.N, self.d)).permute((0, 2, 1, 3))
            if not arranged.is_same(want):
                raise CannotFuse("heads in another order than (3, H, d)" if self.packed else "heads in another order")

    def _projection_of(self, t: Any, *, scores: bool) -> tuple[Node, list[Node]]:
        """Return the linear layer that computes q, k or v, and the views between. A factor of q or k on the way belongs
        to the scale of the scores, unless a norm follows, which removes it."""
        node, chain = strip_views(t)
        while scores:
            if is_norm(node):
                if not follow(Layout.of(fake(node).shape), chain).has_rows_of(fake(node).shape[-1]):
                    raise CannotFuse("a norm of all heads at once between projection and attention")
                self.matched.add(node)
                self.norms.append(norm_of(node))
                node, chain = self._strip_casts(self.norms[-1].x, chain)
                break
            if (factor := scaled(node)) is not None:
                self.matched.add(node)
                self.factor *= factor[1]
                node = factor[0]
            elif (rotation := rotation_of(node)) is not None:
                if not follow(Layout.of(fake(node).shape), chain).is_same(_tokens_first(fake(node).shape)):
                    raise CannotFuse("rotary positions of tokens in another order")
                self.matched |= rotation.matched
                self.rotary.append(rotation.rotary)
                node = rotation.x
            else:
                break
            node, before = strip_views(node)
            chain = before + chain
        if name_of(node) != "linear":
            raise CannotFuse(f"{words(node)} between projection and attention")
        self.matched |= {*chain}
        return node, chain

    def _strip_casts(self, x: Node, chain: list[Node]) -> tuple[Node, list[Node]]:
        """Return the node that a norm's input was cast from, and the views between: the op computes in float32 too."""
        while True:
            x, before = strip_views(x)
            chain = before + chain
            if not widened(x):
                return x, chain
            self.matched.add(x)
            x = first(x)


def _tokens_first(shape: Any) -> Layout:
    """(B, H, N, d) as (B, N, H, d)"""
    return Layout.of(shape).permute((0, 2, 1, 3))


def _scale(attention: Node, projections: _Projections) -> float:
    scale: Any = attention.kwargs["scale"]
    return projections.factor * float(projections.d**-0.5 if scale is None else scale)


def _rewrite_half(rewriter: GraphRewriter, attention: Node, qkv: _Projections) -> None:
    norm = norm_of(qkv.y)
    end, proj, scale_norm, between = _projected(attention, qkv)
    matched = {qkv.y, attention, *qkv.matched, *between}

    def build(emit: Emitter, epilogue: dict[str, Any]) -> Node:
        weights: Any = tuple(linear.weight for linear in qkv.linears)
        biases: Any = tuple(linear.bias for linear in qkv.linears)
        if qkv.packed:
            (weights,), (biases,) = weights, biases
        options = {**epilogue, **attention.kwargs, "scale": _scale(attention, qkv)}  # with the mask and dropout_p
        if qkv.rotary:
            options["rotary"] = qkv.rotary[0]
        if qkv.norms:
            options["qk_norm"] = tuple(head_norm.for_op() for head_norm in qkv.norms)
        if scale_norm is not None:
            options["scale_norm"] = scale_norm.for_op()
        return emit.call(
            ops.layer_norm_attention, norm.x, norm.weight, norm.bias, weights, biases, proj.weight, proj.bias, qkv.H,
            eps=norm.eps, norm=norm.kind, **options,
        )  # fmt: skip

    replace_longest(rewriter, end, matched, attention, build)
    for taken in (norm, *qkv.norms, scale_norm):
        if taken is not None:
            note_norm(rewriter, taken.node, True, "layer_norm_attention")


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
    while True:
        if proj is not None and layout.is_same(Layout.of((qkv.B, qkv.N, proj.out_features))):
            return at, proj, norm, between
        if len(at.users) != 1:
            raise CannotFuse("attention's output is used more than once")
        (user,) = at.users
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


def _rewrite_packed(rewriter: GraphRewriter, attention: Node, qkv: _Projections) -> bool:
    linear = qkv.linears[0]
    if not qkv.plain or qkv.rotary or qkv.norms:  # no op rotates or normalises inside packed attention
        return False

    def build(emit: Emitter) -> Node:
        packed = emit.method("unflatten", linear.node, -1, (3, qkv.H, qkv.d))
        options = {**attention.kwargs, "scale": _scale(attention, qkv)}  # with the mask and dropout_p
        return emit.call(ops.attention_qkvpacked, packed, **options)

    try:
        rewriter.replace(attention, qkv.matched - {linear.node}, build, attention)
    except CannotFuse:
        return False
    return True
