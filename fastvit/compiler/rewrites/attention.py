"""Softmax attention, in the spellings of libraries:

    scaled_dot_product_attention(q, k, v, is_causal=c, scale=s, dropout_p=p)
    dropout(softmax(q @ k^T * s)) @ v           q (B, H, M, d), k, v (B, H, N, d), or (..., M, d) and (..., N, d)

becomes `ops.attention`, which reads q, k and v by stride and stores no M x N tensor. The products may be spelled @,
matmul, bmm or einsum. The scale may multiply or divide, before or after the product. The softmax may run in float32 and
be rounded back. A factor that is a tensor, such as one for each head, multiplies q if it is the same for all keys.
`masks.py` reads masks and biases, and says what happens to rows in which nothing is kept. k and v may have fewer heads
than q, or be repeated for it (`groups.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from fastvit import ops
from fastvit.blocks.submodules import CannotFuse
from fastvit.compiler.match.calls import arguments, dropout_of, first, is_number, name_of, operands, scaled, words
from fastvit.compiler.match.layout import known_equal, same_shape
from fastvit.compiler.match.rewriter import Emitter, GraphRewriter
from fastvit.compiler.match.values import fake
from fastvit.compiler.match.views import COPIES, RESHAPES, strip_views
from fastvit.compiler.rewrites.groups import repeated
from fastvit.compiler.rewrites.masks import Term, attn_mask, is_product, term_of, without_filled_rows


def rewrite(rewriter: GraphRewriter, node: Node) -> None:
    if name_of(node) == "scaled_dot_product_attention":
        with rewriter.noting_refusals(node, "attention"):
            _rewrite_call(rewriter, node)
    elif name_of(node) in ("matmul", "einsum") and (chain := _chain_to_softmax(node)):
        with rewriter.noting_refusals(chain[-1], "attention"):
            _rewrite_products(rewriter, node, chain)


def _rewrite_call(rewriter: GraphRewriter, node: Node) -> None:
    q, k, v, mask, p, causal, scale, gqa = arguments(
        node, query=None, key=None, value=None, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
        enable_gqa=False,
    )  # fmt: skip
    if gqa is not False and fake(q).dim() != 4 and not same_shape(fake(q).shape[:-2], fake(k).shape[:-2]):
        raise CannotFuse("queries in groups without a batch")
    _check_shapes(*(fake(t).shape for t in (q, k, v)))
    terms = [] if mask is None else [_given(mask, q, k)]
    _emit(rewriter, node, {node}, (q, k, v), scale, p, node, terms=terms, is_causal=causal)


def _given(mask: Node, q: Node, k: Node) -> Term:
    """Return the mask of scaled_dot_product_attention as a term: True keeps a score, floats are added."""
    shape = *fake(q).shape[:-1], fake(k).shape[-2]
    return Term(mask, shape, keeps=True if fake(mask).dtype is torch.bool else None)


def _chain_to_softmax(product: Node) -> list[Any]:
    """Return the nodes before a product back to the softmax whose output it multiplies, perhaps after dropout and
    rounding; for another product nothing."""
    at: Any = first(product) if name_of(product) == "matmul" else (*product.args, None)[1]
    chain = [at[0] if isinstance(at, list | tuple) else at]
    while name_of(chain[-1]) in (*COPIES, *RESHAPES, "dropout"):
        chain.append(first(chain[-1]))
    return chain if name_of(chain[-1]) == "softmax" else []


def _rewrite_products(rewriter: GraphRewriter, root: Node, chain: list[Node]) -> None:
    _, v = _operands(root)
    softmax, matched = chain[-1], {root, *chain}
    dropouts = [dropout_of(node) for node in chain if name_of(node) == "dropout"]
    if len(dropouts) > 1:
        raise CannotFuse("two dropouts")
    at = first(softmax)
    same_shaped = [chain[0], softmax, at]  # as the product
    if softmax.kwargs.get("dim", softmax.args[1] if len(softmax.args) > 1 else None) not in (-1, fake(at).dim() - 1):
        raise CannotFuse("a softmax over another dimension")
    scale, factors = 1.0, list[Node]()
    terms: list[Term] = []
    while True:
        if factor := scaled(at):
            before, scale = factor[0], scale * factor[1]
        elif name_of(at) in (*COPIES, *RESHAPES):
            before = first(at)
        elif multiplied := _multiplied(at):
            before, factor_of_q = multiplied
            factors.append(factor_of_q)
            same_shaped.append(at)
        elif found := term_of(at, scale):
            if factors:
                raise CannotFuse("a mask or bias of the scores before a factor that is a tensor")
            before = found[0]
            terms.append(found[1])
        else:
            break
        matched.add(at)
        at = before
    for node in matched:
        if fake(node).dtype not in (fake(root).dtype, torch.float32, torch.float64):
            raise CannotFuse(f"scores or probabilities in {fake(node).dtype}")
    if name_of(at) not in ("matmul", "einsum"):
        raise CannotFuse(f"{words(strip_views(at)[0])} between scores and softmax")
    if not all(same_shape(fake(t).shape, fake(at).shape) for t in same_shaped):  # or all reshapes together do nothing
        raise CannotFuse("a reshape of scores or probabilities")
    matched.add(at)
    q, k = _operands(at, transposed=True)
    if fake(q).dtype != fake(root).dtype:
        raise CannotFuse(f"scores in {fake(q).dtype} for values in {fake(root).dtype}")
    options: dict[str, Any] = {"factors": factors, "terms": terms, "k_transposed": name_of(at) == "matmul"}
    _emit(rewriter, root, matched, (q, k, v), scale, sum(dropouts), softmax, **options)


def _multiplied(node: Node) -> tuple[Node, Node] | None:
    """Return scores and factor of scores * factor, if the factor is a tensor and the same for all keys."""
    for scores, factor in operands(node, "mul"):
        if isinstance(factor, Node) and same_shape(fake(scores).shape, fake(node).shape) and is_product(scores):
            return (scores, factor) if all(known_equal(size, 1) for size in fake(factor).shape[-1:]) else None
    return None


def _operands(node: Node, transposed: bool = False) -> tuple[Node, Node]:
    """Return a and b of a @ b. An einsum must have rows and columns in the order of matmul; for b in the other order if
    `transposed`."""
    if name_of(node) == "matmul":
        a, b = arguments(node, input=None, other=None)
        return a, b
    equation, *rest = node.args  # type: Any, Any
    tensors = rest[0] if rest and isinstance(rest[0], list | tuple) else rest
    terms, _, out = str(equation).replace(" ", "").partition("->")
    a, _, b = terms.partition(",")
    if len(tensors) == 2 and len(a) == len(b) == len(out) > 2 and a[:-2] == b[:-2] == out[:-2]:
        columns, contracted = (b[-2], b[-1]) if transposed else (b[-1], b[-2])
        if a[-1] == contracted and out[-2:] == a[-2] + columns and len({*a, *b}) == len(a) + 1:
            return tensors[0], tensors[1]
    raise CannotFuse(f"einsum {equation!r}")


def _emit(
    rewriter: GraphRewriter, root: Node, matched: set[Node], qkv: tuple[Node, Node, Node], scale: object, p: object,
    site: Node, *, terms: Sequence[Term], factors: Sequence[Node] = (), k_transposed: bool = False,
    is_causal: bool = False,
) -> None:  # fmt: skip
    """qkv: (B, H, M or N, d) or (..., M or N, d) each, k perhaps (..., d, N)."""
    if not (scale is None or is_number(scale)) or not is_number(p):
        raise CannotFuse("a scale or probability that is a tensor")
    q, k, v = map(fake, qkv)
    _check_shapes(q.shape, k.mT.shape if k_transposed else k.shape, v.shape)
    scores = *q.shape[:-1], v.shape[-2]
    shared = repeated(qkv[1], transposed=k_transposed), repeated(qkv[2])

    def build(emit: Emitter) -> Node:
        if grouped:
            key, value = (t.emit(emit) for t in grouped)
        else:
            key, value = emit.method("transpose", qkv[1], -2, -1) if k_transposed else qkv[1], qkv[2]
        query, options = qkv[0], dict[str, Any](is_causal=True) if is_causal else {}
        # In 16 bits this rounds q once more, where eager mode rounds the scores before and after.
        for factor in factors:
            query = emit.method("to", emit.call(torch.mul, query, factor), q.dtype)
        if terms:
            options["attn_mask"], kept = attn_mask(emit, terms, query, scores)
            if kept is not None and any(t.requires_grad for t in (q, k, *map(fake, factors))):
                query = without_filled_rows(emit, query, kept)
        tensors = [_tokens_first(emit, t) for t in (query, key, value)]
        out = emit.call(ops.attention, *tensors, **options, scale=scale, dropout_p=p, layout="bnhd")
        if q.dim() == 4:
            return emit.method("transpose", out, 1, 2)
        out = emit.method("squeeze", out, 2)
        return out if q.dim() == 3 else emit.method("reshape_as", out, qkv[0])

    grouped = [t for t in shared if t is not None] if q.dim() == 4 else []
    if len(grouped) != 2 or not known_equal(grouped[0].heads, grouped[1].heads):
        grouped = []
    rewriter.replace(root, matched.union(*(t.unused(matched) for t in grouped)), build, site)
    rewriter.note(site, "attention", "attention")


def _check_shapes(q: Any, k: Any, v: Any) -> None:
    """Check shapes q (B, H, M, d), k and v (B, H, N, d), perhaps with fewer heads; or (..., M, d) and (..., N, d)."""
    want = q[:-2]
    if len(q) == len(k) == 4 and not known_equal(q[1], k[1]) and known_equal(q[1] % k[1], 0):
        want = q[0], k[1]
    if not same_shape((*want, q[-1]), (*k[:-2], k[-1])) or not same_shape(k[:-1], v[:-1]):
        raise CannotFuse("k and v of another batch or other heads than q")
    if not known_equal(q[-1], v[-1]):
        raise CannotFuse("values that are wider or narrower than keys")


def _tokens_first(emit: Emitter, t: Node) -> Node:
    """Return t as (B, N, H, d). Without exactly four dimensions, all before N become one, and there is one head."""
    if fake(t).dim() == 4:
        return emit.method("transpose", t, 1, 2)
    return emit.method("unsqueeze", emit.method("flatten", t, 0, -3) if fake(t).dim() > 3 else t, 2)
