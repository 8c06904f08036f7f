"""Prepare a graph for the patterns: remove dropouts and casts that do nothing, replace sizes that are known by numbers,
and write out nn.MultiheadAttention as the calls that it consists of."""

from __future__ import annotations

import math
import operator

import torch
import torch.nn.functional as F
from torch.fx import Node
from torch.fx.node import map_arg

from fastvit.blocks.submodules import CannotFuse
from fastvit.compiler.match.calls import arguments, dropout_of, first, name_of, only_user
from fastvit.compiler.match.layout import known_int
from fastvit.compiler.match.rewriter import Emitter, GraphRewriter
from fastvit.compiler.match.values import CASTS, fake, storages, value_of


def rewrite(rewriter: GraphRewriter, node: Node) -> None:
    if name_of(node) == "dropout" or name_of(node) in CASTS:
        _take_out(rewriter, node)
    elif node.op == "call_method" and node.target in ("reshape_as", "view_as"):
        _by_sizes(node)
    elif "size" in (name_of(node), name_of(first(node))):
        _write_down(node)
    elif node.target is F.multi_head_attention_forward:
        with rewriter.noting_refusals(node, "attention"):
            _write_out(rewriter, node)


def _take_out(rewriter: GraphRewriter, node: Node) -> None:
    """Replace dropout(x, 0.0), dropout in evaluation, or a cast that returns x itself, by x, unless a write or the
    output would show that they are one tensor."""
    x = first(node)
    does_something = dropout_of(node) if name_of(node) == "dropout" else fake(node) is not fake(x)
    if does_something or any(user.op == "output" for user in node.users):
        return
    if not rewriter.is_mutated(storages(value_of(x)) | storages(value_of(node))):
        node.replace_all_uses_with(x)
        rewriter.graph.erase_node(node)


def _write_down(node: Node) -> None:
    """Replace a size by its number, if that is known by now, so that it is no use of the tensor. Dynamo records sizes
    before a later call fixes them, as a bias of so many tokens does."""
    known = known_int(value_of(node))
    if known is None or any(user.op == "output" for user in node.users):
        return
    for user in list(node.users):
        user.args, user.kwargs = map_arg((user.args, user.kwargs), lambda used: known if used is node else used)
    sizes = first(node)
    node.graph.erase_node(node)
    if name_of(sizes) == "size" and not sizes.users:
        sizes.graph.erase_node(sizes)


def _by_sizes(node: Node) -> None:
    """Replace x.reshape_as(y), which SAM's bias has, by a reshape to y's sizes, if at most one is symbolic."""
    shape = getattr(value_of(node), "shape", ())
    sizes = [-1 if (known := known_int(size)) is None else known for size in shape]
    if len(node.args) == 2 and shape and sizes.count(-1) <= 1 and 0 not in sizes:
        node.target = str(node.target).removesuffix("_as")
        node.args = node.args[0], *sizes


def _write_out(rewriter: GraphRewriter, node: Node) -> None:
    """Write out F.multi_head_attention_forward, which takes (N, B, D) for either value of batch_first."""
    (
        query, key, value, _, num_heads, weight, bias, bias_k, bias_v, add_zero, p, out_weight, out_bias, training,
        padding, _, mask, separate, *weights, static_k, static_v, _, causal,
    ) = arguments(
        node, query=None, key=None, value=None, embed_dim_to_check=None, num_heads=None, in_proj_weight=None,
        in_proj_bias=None, bias_k=None, bias_v=None, add_zero_attn=False, dropout_p=0.0, out_proj_weight=None,
        out_proj_bias=None, training=True, key_padding_mask=None, need_weights=True, attn_mask=None,
        use_separate_proj_weight=False, q_proj_weight=None, k_proj_weight=None, v_proj_weight=None, static_k=None,
        static_v=None, average_attn_weights=True, is_causal=False,
    )  # fmt: skip
    options = add_zero, *(t is not None for t in (bias_k, bias_v, static_k, static_v))
    if any(options) or fake(query).dim() != 3:
        raise CannotFuse("an option of nn.MultiheadAttention that no ViT has")
    if causal:
        raise CannotFuse("a mask that counts as causal")
    if any(name_of(user) != "getitem" or user.args[1] != 0 for user in node.users):
        raise CannotFuse("its attention weights are used, too")

    def projected(emit: Emitter) -> list[Node]:
        """Emit q, k and v, (N, B, H, d)."""
        if query is key is value and not separate:
            qkv = emit.method("unflatten", emit.call(F.linear, query, weight, bias), -1, (3, num_heads, -1))
            return [emit.method("select", qkv, 2, i) for i in range(3)]
        E = fake(query).shape[-1]
        parts = []
        for i, t in enumerate((query, key, value)):
            w, b = (None if of is None else emit.method("narrow", of, 0, i * E, E) for of in (weight, bias))
            projection = emit.call(F.linear, t, weights[i] if separate else w, b)
            parts.append(emit.method("unflatten", projection, -1, (num_heads, -1)))
        return parts

    def added(emit: Emitter) -> Node | None:
        """Emit the sum of both masks, (M, N) or (B * H, M, N) and (B, N), as scaled_dot_product_attention takes it."""
        masks = []
        if mask is not None:
            masks.append(mask if fake(mask).dim() == 2 else emit.method("unflatten", mask, 0, (-1, num_heads)))
        if padding is not None:
            masks.append(emit.call(operator.getitem, padding, (slice(None), None, None)))
        masks = [emit.call(torch.where, t, -math.inf, 0.0) if fake(t).dtype is torch.bool else t for t in masks]
        return emit.call(torch.add, *masks) if len(masks) == 2 else next(iter(masks), None)

    def build(emit: Emitter) -> Node:
        q, k, v = (emit.method("permute", t, 1, 2, 0, 3) for t in projected(emit))
        attended = emit.call(F.scaled_dot_product_attention, q, k, v, added(emit), p if training else 0.0)
        rows = emit.method("flatten", emit.method("permute", attended, 2, 0, 1, 3), 2)
        return emit.call(F.linear, rows, out_weight, out_bias)

    rewriter.replace(only_user(node), {node}, build, node)
