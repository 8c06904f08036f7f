"""The halves of a pre-norm transformer block as fused ops, described by tensors: what `fastvit.Block` and the blocks of
other libraries have in common once their modules have been read."""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from fastvit import ops


class Affine(NamedTuple):
    """A linear layer: weight (out, in), bias (out,) or None."""

    weight: Tensor
    bias: Tensor | None


class Norm(NamedTuple):
    """A LayerNorm: weight (D,), bias (D,)."""

    weight: Tensor
    bias: Tensor
    eps: float


class Ends(NamedTuple):
    """What is around a branch: x + drop_path(gamma * branch(norm(x))). drop_path: the probability that applies now, and
    whether what is kept is divided by 1 - p."""

    norm: Norm
    gamma: Tensor | None = None
    drop_path: tuple[float, bool] = (0.0, True)


class AttentionParts(NamedTuple):
    """qkv: one packed layer (3 * H * d, D), or three for q, k and v; attn_p, proj_p: probabilities that apply now."""

    qkv: tuple[Affine, ...]
    proj: Affine
    num_heads: int
    scale: float | None = None
    attn_p: float = 0.0
    proj_p: float = 0.0


class MlpParts(NamedTuple):
    """activation: as `ops.mlp` names it; hidden_p, out_p: probabilities that apply now, behind activation and fc2. They
    are equal, or hidden_p is 0."""

    fc1: Affine
    fc2: Affine
    activation: str
    hidden_p: float = 0.0
    out_p: float = 0.0


def draw_row_scale(x: Tensor, p: float, scale_by_keep: bool) -> Tensor | None:
    """Stochastic depth's draw for a batch like x: (B,) of 0 and 1 / (1 - p) in x's dtype; None if p is 0."""
    if p == 0.0:
        return None
    keep = 1.0 - p
    mask = x.new_empty(x.shape[0]).bernoulli_(keep)
    return mask.div_(keep) if scale_by_keep and keep > 0.0 else mask


def attention(x: Tensor, parts: AttentionParts, ends: Ends | None = None) -> Tensor:
    """(B, N, D) -> (B, N, D): the attention alone, or with norm, scales and residual around it."""
    residual = x
    if ends is not None:
        weights, biases = zip(*parts.qkv, strict=True)
        weight, bias, eps = ends.norm
        packed, residual = ops.layer_norm_linear(x, weight, bias, weights, biases, eps=eps, return_residual=True)
    elif len(parts.qkv) == 1:
        packed = F.linear(x, *parts.qkv[0])
    else:
        q, k, v = (F.linear(x, *layer).unflatten(-1, (parts.num_heads, -1)) for layer in parts.qkv)
        out = ops.attention(q, k, v, scale=parts.scale, dropout_p=parts.attn_p)
        return _drop(ops.linear(out.flatten(2), *parts.proj), parts.proj_p)
    packed = packed.unflatten(-1, (3, parts.num_heads, -1))
    out = ops.attention_qkvpacked(packed, scale=parts.scale, dropout_p=parts.attn_p)
    out = out.flatten(2)
    if ends is None:
        return _drop(ops.linear(out, *parts.proj), parts.proj_p)
    if parts.proj_p:
        return _join(residual, _drop(ops.linear(out, *parts.proj), parts.proj_p), ends)
    row_scale = draw_row_scale(x, *ends.drop_path)
    return ops.linear(out, *parts.proj, layer_scale=ends.gamma, row_scale=row_scale, residual=residual)


def mlp(x: Tensor, parts: MlpParts, ends: Ends | None = None) -> Tensor:
    """(B, N, D) -> (B, N, D), or (..., D) without ends: the MLP alone, or with norm, scales and residual around it."""
    layers = (*parts.fc1, *parts.fc2)
    late = parts.out_p if parts.hidden_p != parts.out_p else 0.0
    if ends is None:
        return _drop(ops.mlp(x, *layers, activation=parts.activation, dropout_p=parts.hidden_p), late)
    weight, bias, eps = ends.norm
    if late:
        y = ops.layer_norm_mlp(x, weight, bias, *layers, eps=eps, activation=parts.activation)
        return _join(x, _drop(y, late), ends)
    return ops.layer_norm_mlp(
        x, weight, bias, *layers,
        eps=eps, activation=parts.activation, dropout_p=parts.hidden_p,
        layer_scale=ends.gamma, row_scale=draw_row_scale(x, *ends.drop_path), residual=x,
    )  # fmt: skip


def _drop(x: Tensor, p: float) -> Tensor:
    return ops.dropout(x, p) if p else x


def _join(x: Tensor, branch: Tensor, ends: Ends) -> Tensor:
    """Behind a dropout that no op has in its epilogue."""
    if ends.gamma is not None:
        branch = branch * ends.gamma
    row_scale = draw_row_scale(branch, *ends.drop_path)
    return x + (branch if row_scale is None else branch * row_scale.view(-1, 1, 1))
