"""Masks and biases of the scores, as the attn_mask of `ops.attention`:

    scores + bias                                 added; several may follow each other
    masked_fill(scores, mask, -inf)               kept where mask is False
    where(mask, scores, -inf)                     kept where mask is True

The fill may also be a number of at most -1e30, such as the least of float32 or bfloat16. The op then adds it: the sum
with any score is that number, so a row in which nothing is kept has equal weights, as in the graph. But a gradient
passes through a sum and not through a fill; where q or k needs one, the op gets zeros for such rows of q
(`without_filled_rows`). For a row that is all -inf softmax gives NaN, and the op zeros. Fills nearer to zero, float16's
least among them, are not fused, because scores may come near them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fastvit.blocks.submodules import CannotFuse
from fastvit.compiler.match.calls import arguments, first, is_number, name_of, operands, scaled, words
from fastvit.compiler.match.layout import Size, known_equal, known_int, same_shape
from fastvit.compiler.match.rewriter import Emitter
from fastvit.compiler.match.values import fake
from fastvit.compiler.match.views import COPIES, RESHAPES

_MASKED = -1e30  # the sum of any score with this number, or a lower one, is that number again
_LOWEST = torch.finfo(torch.bfloat16).min  # of bfloat16 and float32


@dataclass(frozen=True)
class Term:
    """A tensor that is added to scores, or a mask that keeps the scores where it equals `keeps`.

    Attributes:
        shape: the scores' shape at this place, which may be another view of the product than the softmax's input.
        factor: the factor that multiplies the scores after this place.
    """

    node: Node
    shape: Sequence[Size]
    factor: float = 1.0
    keeps: bool | None = None
    fill: float = -math.inf  # for the other scores

    def __post_init__(self) -> None:
        dtype = fake(self.node).dtype
        if self.keeps is None and not dtype.is_floating_point:
            raise CannotFuse(f"{dtype} is added to the scores")
        if self.keeps is not None and dtype is not torch.bool:
            raise CannotFuse(f"a mask in {dtype}")
        if not _broadcasts(fake(self.node).shape, self.shape):
            raise CannotFuse(f"a mask of {tuple(fake(self.node).shape)} for scores of {tuple(self.shape)}")


def term_of(node: Node, factor: float) -> tuple[Node, Term] | None:
    """Return the scores and the term, if node adds to scores or masks them, otherwise None. Raises CannotFuse if the op
    cannot do the same."""
    name = name_of(node)
    if name == "add":
        scores, added = _summands(node)
        return scores, Term(added, fake(node).shape, factor)
    if name == "masked_fill":
        scores, mask, fill = arguments(node, input=None, mask=None, value=None)
        keeps = False
    elif name == "where":
        scores, mask, fill, keeps = _chosen(node)
    else:
        return None
    if not isinstance(scores, Node) or not same_shape(fake(scores).shape, fake(node).shape):
        raise CannotFuse(f"a mask: {name} of scores of another shape")
    number = _number(fill)
    if number is None or not (factor > 0.0 and number * factor <= _MASKED):  # NaN neither
        raise CannotFuse(f"a mask: {name} with {'a tensor' if number is None else number * factor}")
    number *= factor
    return scores, Term(
        mask, fake(node).shape, keeps=keeps, fill=number if number == -math.inf else max(number, _LOWEST)
    )


def _summands(node: Node) -> tuple[Node, Node]:
    """Return the scores and what is added to them."""
    for scores, added in operands(node, "add"):
        if isinstance(added, Node) and is_product(scores) and same_shape(fake(scores).shape, fake(node).shape):
            return scores, added
    raise CannotFuse(f"{words(node)} between scores and softmax")


def is_product(node: Any, sums: int = 8) -> bool:
    """Return whether node may be scores: a product, scaled, masked or added to by at most `sums` tensors."""
    while name_of(node) not in ("matmul", "einsum"):
        if factor := scaled(node):
            node = factor[0]
        elif name_of(node) in (*COPIES, *RESHAPES, "masked_fill"):
            node = first(node)
        elif name_of(node) in ("add", "mul", "where"):
            return sums > 0 and any(is_product(before, sums - 1) for before in node.args)
        else:
            return False
    return True


def _chosen(node: Node) -> tuple[Any, Any, Any, bool]:
    """Return scores, mask and fill of where(), and which value of the mask keeps a score."""
    if node.op == "call_method":
        a, mask, b = arguments(node, self=None, condition=None, other=None)
    else:
        mask, a, b = arguments(node, condition=None, input=None, other=None)
    return (a, mask, b, True) if _number(a) is None and is_product(a) else (b, mask, a, False)


def _number(value: Any) -> float | None:
    """Return the value of a number or of a constant tensor of one number, otherwise None."""
    if isinstance(value, Node) and name_of(value) in ("full", "tensor") and fake(value).dim() == 0:
        value = (*value.args, value.kwargs.get("fill_value"))[name_of(value) == "full"]
    return float(value) if is_number(value) else None


# ---- the op's mask ----


def attn_mask(emit: Emitter, terms: Sequence[Term], q: Node, scores: Sequence[Size]) -> tuple[Node | None, Node | None]:
    """Emit one mask of the scores from all terms.

    Sums stay those of the graph, so that gradients are right.

    Args:
        terms: from the last to the first.
        q: (B, H, M, d), or with other dimensions before M, which the op takes as a batch.
        scores: their shape, (..., M, N).

    Returns:
        The mask, and, if fills are finite, the mask of the scores that are kept.
    """
    *leading, M, N = scores
    target = (*leading, M, N) if len(leading) == 2 else (math.prod(leading), M, N)
    mask: Node | None = None  # the sum of what is added
    kept: Node | None = None
    for term in reversed(terms):
        node = _arranged(emit, term, target, q)
        if term.keeps is None:
            node = node if term.factor == 1.0 else emit.call(torch.mul, node, term.factor)
            mask = node if mask is None else emit.call(torch.add, mask, node)
        else:
            node = node if term.keeps else emit.call(torch.logical_not, node)
            kept = node if kept is None else emit.call(torch.logical_and, kept, node)
    fills = {term.fill for term in terms if term.keeps is not None}
    if len(fills) > 1:
        raise CannotFuse("masks that fill in different numbers")
    is_finite = kept is not None and -math.inf not in fills
    if mask is None and not is_finite:
        mask = kept
    elif kept is not None:
        (fill,) = fills
        mask = emit.call(torch.where, kept, 0.0 if mask is None else mask, fill)
        if is_finite and fake(mask).dtype is torch.float16:
            raise CannotFuse(f"a fill of {fill} into a mask in float16")
    if len(target) == 3 and fake(mask).dim() == 3:
        mask = emit.method("unsqueeze", mask, 1)
    return mask, kept if is_finite else None


def without_filled_rows(emit: Emitter, q: Node, kept: Node) -> Node:
    """Emit q with zeros in rows without a kept score, so that they give k no gradient and get none."""
    q = emit.method("flatten", q, 0, -3) if fake(q).dim() > 4 else q
    return emit.method("masked_fill", q, emit.call(torch.logical_not, emit.method("any", kept, -1, True)), 0.0)


def _broadcasts(shape: Sequence[Size], to: Sequence[Size]) -> bool:
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(known_equal(have, 1) or known_equal(have, want) for have, want in pairs)


def _arranged(emit: Emitter, term: Term, target: Sequence[Size], q: Node) -> Node:
    """Emit a term so that it broadcasts to target, which may be another view of its scores."""
    if same_shape(term.shape, target):
        return term.node
    same = [known_equal(a, b) for a, b in zip(reversed(term.shape), reversed(target), strict=False)]
    kept = (*same, False).index(False)  # of the last dimensions
    node, own, rank = term.node, fake(term.node).dim(), len(term.shape)
    if all(known_equal(size, 1) for size in fake(node).shape[: max(own - kept, 0)]):
        return emit.call(operator.getitem, node, (0,) * (own - kept)) if own > kept else node
    if own < rank:
        node = emit.call(operator.getitem, node, ((None,) * (rank - own) + (Ellipsis,)))
    if len(target) - kept == 1:
        sizes = _sizes(emit, term.shape[: rank - kept], fake(node).shape, q)
        return emit.method("flatten", emit.method("expand", node, *sizes, *(-1,) * kept), 0, rank - kept - 1)
    whole, known = (list(map(known_int, shape)) for shape in (term.shape, target))
    if None in (*whole, *known):
        raise CannotFuse("a mask of scores in another shape, of symbolic sizes")
    return emit.method("reshape", emit.method("expand", node, *whole), *known)


def _sizes(emit: Emitter, sizes: Sequence[Size], own: Sequence[Size], q: Node) -> list[Any]:
    """Return sizes for the graph that make up q's batch; a term's own sizes go first, and one may be symbolic."""
    known = [known_int(size if known_equal(of_term, 1) else of_term) for size, of_term in zip(sizes, own, strict=False)]
    if known.count(None) > 1:
        raise CannotFuse("a mask of scores in another shape, of symbolic sizes")
    rest = math.prod(size for size in known if size is not None)
    return [emit.call(operator.floordiv, emit.size(q, 0), rest) if size is None else size for size in known]
