"""Run the blocks of `spec.py` as fused ops: (B, N, D) -> (B, N, D), an MLP alone (..., D) -> (..., D); with
`within_sequences` (T, D) -> (T, D).

`recompute` of a half is that of its op. A half that runs in steps has no such op: with a value other than "none" of
attention, or "all" of an MLP, the backward pass runs the whole half again; otherwise autograd saves what it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastvit import ops
from fastvit.blocks.recompute import DEFAULT, Recompute
from fastvit.blocks.spec import AdaptedLinear, AttentionSpec, BlockSpec, HalfSpec, LinearSpec, MlpSpec
from fastvit.ops import Norm, Rotary
from fastvit.ops.runtime.activations import GATED
from fastvit.ops.runtime.backend import is_jit_tracing


def runs_in_steps(branch: AttentionSpec | MlpSpec) -> bool:
    """Return whether a half of a block runs as several ops: if no op has such attention, or if layers are called as
    modules."""
    return branch.adapted or (isinstance(branch, AttentionSpec) and branch.in_steps)


def run_block(
    x: Tensor, block: BlockSpec, rotary: Rotary | None = None, attn_mask: Tensor | None = None,
    is_causal: bool = False, recompute: Recompute = DEFAULT,
) -> Tensor:  # fmt: skip
    (attention, mlp), (attention_recompute, mlp_recompute) = block, recompute
    x = run_attention_half(x, attention, rotary, attn_mask, is_causal, attention_recompute)
    return run_mlp_half(x, mlp, recompute=mlp_recompute)


def within_sequences(described: Any, x: Tensor, cu_seqlens: Tensor, max_seqlen: int | None) -> Any:
    """Return a branch, a half of a block or a block for x (T, D), the tokens of several sequences: attention stays
    within each, and stochastic depth is drawn once a sequence."""
    if type(described) is tuple:
        return tuple([within_sequences(half, x, cu_seqlens, max_seqlen) for half in described])
    if isinstance(described, AttentionSpec):
        return described._replace(cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
    if not isinstance(described, HalfSpec):
        return described
    half: HalfSpec[Any] = described._replace(branch=within_sequences(described.branch, x, cu_seqlens, max_seqlen))
    if half.drop_path:
        drawn = draw_drop_path(x, half.drop_path, half.scale_by_keep, cu_seqlens)
        half = half._replace(drop_path=0.0, row_scale=drawn)
    return half


def run_attention_half(
    x: Tensor, half: HalfSpec[AttentionSpec], rotary: Rotary | None = None, attn_mask: Tensor | None = None,
    is_causal: bool = False, recompute: str = "none",
) -> Tensor:  # fmt: skip
    attn = half.branch
    if attn.adapted or attn.in_steps or (rotary is not None and _may_be_learnt(rotary)):
        in_steps = partial(_run_attention_in_steps, half=half, rotary=rotary, attn_mask=attn_mask, is_causal=is_causal)
        return in_steps(x) if recompute == "none" else run_again(in_steps, x)
    norm = half.norm if half.norm.weight is not None else _with_ones(x, half.norm)
    packed_or_three: Any = attn.qkv[0] if len(attn.qkv) == 1 else zip(*attn.qkv, strict=True)
    weights, biases = packed_or_three
    layer_scale = row_scale = residual = None
    if not attn.proj_drop:  # no op has a dropout after the projection
        layer_scale, residual = half.layer_scale, x
        row_scale = draw_drop_path(x, half.drop_path, half.scale_by_keep) if half.drop_path else half.row_scale
    proj: Any = attn.proj
    proj_weight, proj_bias = proj
    out = ops.layer_norm_attention(
        x, norm.weight, norm.bias, weights, biases, proj_weight, proj_bias, attn.num_heads, eps=norm.eps,
        norm=norm.kind, scale=attn.scale, dropout_p=attn.attn_drop, rotary=rotary, scale_norm=attn.scale_norm,
        qk_norm=attn.qk_norm, attn_mask=attn_mask, is_causal=is_causal, cu_seqlens=attn.cu_seqlens,
        max_seqlen=attn.max_seqlen, layer_scale=layer_scale, row_scale=row_scale, residual=residual,
        recompute=recompute,
    )  # fmt: skip
    return _add_branch(x, ops.dropout(out, attn.proj_drop), half) if attn.proj_drop else out


def _run_attention_in_steps(
    x: Tensor, half: HalfSpec[AttentionSpec], rotary: Rotary | None, attn_mask: Tensor | None, is_causal: bool
) -> Tensor:
    attn = half.branch
    if attn.adapted:
        attended = _attend(run_norm(x, half.norm), attn, rotary, attn_mask, is_causal)
    else:
        attended = attend_packed(norm_and_project(x, half), attn, rotary, attn_mask, is_causal)
    return run_last(attended, attn.proj, attn.proj_drop, x, half)


def project(x: Tensor, attn: AttentionSpec) -> Tensor:
    """Compute q, k and v, packed: (..., D) -> (..., (H + 2 * kv_heads) * d)."""
    projected = [run_linear(x, layer) for layer in attn.qkv]
    return projected[0] if len(projected) == 1 else torch.cat(projected, -1)


def norm_and_project(x: Tensor, half: HalfSpec[AttentionSpec]) -> Tensor:
    """Compute q, k and v of the norm's result, packed, in one op if no layer is adapted."""
    attn = half.branch
    if attn.adapted:
        return project(run_norm(x, half.norm), attn)
    norm = half.norm if half.norm.weight is not None else _with_ones(x, half.norm)
    packed_or_three: Any = attn.qkv[0] if len(attn.qkv) == 1 else zip(*attn.qkv, strict=True)
    weights, biases = packed_or_three
    return ops.layer_norm_linear(x, norm.weight, norm.bias, weights, biases, eps=norm.eps, norm=norm.kind)


def run_again(half: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Run a half of a block, and again in the backward pass instead of saving what that needs."""
    if not torch.is_grad_enabled() or is_jit_tracing():
        return half(*tensors)
    out: Tensor = checkpoint(half, *tensors, use_reentrant=False)
    return out


def run_mlp_half(
    x: Tensor, half: HalfSpec[MlpSpec], residual: Tensor | None = None, recompute: str = "activation"
) -> Tensor:
    """Run the MLP's half of a block. residual: the tensor that the branch is added to, x if None."""
    mlp, residual = half.branch, x if residual is None else residual
    if mlp.adapted:
        in_steps = partial(_run_mlp_in_steps, half=half)
        return in_steps(x, residual) if recompute != "all" else run_again(in_steps, x, residual)
    norm = half.norm if half.norm.weight is not None else _with_ones(x, half.norm)
    fc1 = mlp.fc1 if mlp.value is None and not mlp.gate_last else _gate_and_value(mlp)
    dropout_p, layer_scale, row_scale, added = 0.0, None, None, None
    in_two = mlp.drop1 != mlp.drop2  # no op has a dropout after fc2 alone
    if not in_two:
        dropout_p, layer_scale, added = mlp.drop1, half.layer_scale, residual
        row_scale = draw_drop_path(x, half.drop_path, half.scale_by_keep) if half.drop_path else half.row_scale
    out = ops.layer_norm_mlp(
        x, norm.weight, norm.bias, *fc1, *mlp.fc2, eps=norm.eps, norm=norm.kind, activation=mlp.activation,
        dropout_p=dropout_p, layer_scale=layer_scale, row_scale=row_scale, residual=added,
        inner_norm=mlp.inner_norm, recompute=recompute,
    )  # fmt: skip
    return _add_branch(residual, ops.dropout(out, mlp.drop2), half) if in_two else out


def _run_mlp_in_steps(x: Tensor, residual: Tensor, half: HalfSpec[MlpSpec]) -> Tensor:
    mlp = half.branch
    return run_last(_widen(run_norm(x, half.norm), mlp), mlp.fc2, mlp.drop2, residual, half)


def run_attention_then_norm(
    x: Tensor, half: HalfSpec[AttentionSpec], attn_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """Run the attention's half of a post-norm block: norm(x + drop_path(layer_scale * attention(x)))."""
    attn = half.branch
    # Not add_layer_norm: with layer_scale it saves the branch in addition to the sum, in both halves 14 token tensors
    # instead of 12; without it, the backward pass has one launch more
    total = run_last(_attend(x, attn, None, attn_mask, is_causal), attn.proj, attn.proj_drop, x, half)
    return run_norm(total, half.norm)


def run_mlp_then_norm(x: Tensor, half: HalfSpec[MlpSpec]) -> Tensor:
    """Run the MLP's half of a post-norm block: norm(x + drop_path(layer_scale * mlp(x)))."""
    mlp = half.branch
    if mlp.adapted or mlp.drop1 != mlp.drop2:  # no op has a dropout after fc2 alone
        total = run_last(_widen(x, mlp), mlp.fc2, mlp.drop2, x, half)
    else:
        row_scale = draw_drop_path(x, half.drop_path, half.scale_by_keep) if half.drop_path else half.row_scale
        fc1 = mlp.fc1 if mlp.value is None and not mlp.gate_last else _gate_and_value(mlp)
        tensors = (*fc1, *mlp.fc2)
        total = ops.mlp(
            x, *tensors, activation=mlp.activation, dropout_p=mlp.drop1, layer_scale=half.layer_scale,
            row_scale=row_scale, residual=x, inner_norm=mlp.inner_norm,
        )  # fmt: skip
    return run_norm(total, half.norm)


def run_norm(x: Tensor, norm: Norm) -> Tensor:
    if norm.weight is None:
        norm = _with_ones(x, norm)
    return ops.layer_norm(x, norm.weight, norm.bias, norm.eps, norm=norm.kind)


def _with_ones(x: Tensor, norm: Norm) -> Norm:
    """Give a norm without weight a weight of ones for x. They are made in every call: a buffer would hold garbage after
    `to_empty`, and would have to follow x's dtype."""
    eps = default_eps(x.dtype) if norm.eps is None else norm.eps
    like = x if norm.bias is None else norm.bias
    return Norm(like.new_ones(x.shape[-1]), norm.bias, eps, norm.kind)


def default_eps(dtype: torch.dtype) -> float:
    """Return PyTorch's default eps for RMSNorm, which is that of the dtype that F.rms_norm computes in."""
    return torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32).eps


def run_attention(
    x: Tensor, attn: AttentionSpec, rotary: Rotary | None = None, attn_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:  # fmt: skip
    return ops.dropout(run_linear(_attend(x, attn, rotary, attn_mask, is_causal), attn.proj), attn.proj_drop)


def run_mlp(x: Tensor, mlp: MlpSpec) -> Tensor:
    if mlp.adapted:
        return ops.dropout(run_linear(_widen(x, mlp), mlp.fc2), mlp.drop2)
    fc1 = mlp.fc1 if mlp.value is None and not mlp.gate_last else _gate_and_value(mlp)
    tensors = (*fc1, *mlp.fc2)
    out = ops.mlp(x, *tensors, activation=mlp.activation, dropout_p=mlp.drop1, inner_norm=mlp.inner_norm)
    return ops.dropout(out, mlp.drop2) if mlp.drop1 != mlp.drop2 else out


def run_linear(x: Tensor, layer: LinearSpec) -> Tensor:
    return layer.module(x) if isinstance(layer, AdaptedLinear) else ops.linear(x, *layer)


def _attend(x: Tensor, attn: AttentionSpec, rotary: Rotary | None, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
    """Run attention up to its projection: (B, N, D) -> (B, N, H * d)."""
    projected = [layer.module(x) if isinstance(layer, AdaptedLinear) else F.linear(x, *layer) for layer in attn.qkv]
    if len(projected) == 1:
        return attend_packed(projected[0], attn, rotary, attn_mask, is_causal)
    heads = attn.num_heads, attn.kv_heads or attn.num_heads, attn.kv_heads or attn.num_heads
    q, k, v = (t.unflatten(-1, (n, -1)) for t, n in zip(projected, heads, strict=True))
    return _attend_separate(q, k, v, attn, rotary, attn_mask, is_causal)


def attend_packed(
    qkv: Tensor, attn: AttentionSpec, rotary: Rotary | None, attn_mask: Tensor | None, is_causal: bool
) -> Tensor:
    """Attend with packed q, k and v: (..., (H + 2 * kv_heads) * d) -> (..., H * d)."""
    if attn.in_steps or attn.qk_norm is not None:
        H, kv_heads = attn.num_heads, attn.kv_heads or attn.num_heads
        q, k, v = qkv.unflatten(-1, (H + 2 * kv_heads, -1)).split((H, kv_heads, kv_heads), -2)
        return _attend_separate(q, k, v, attn, rotary, attn_mask, is_causal)
    qkv = qkv.unflatten(-1, (3, attn.num_heads, -1))
    if attn.cu_seqlens is not None:
        qkv = qkv if rotary is None else ops.rotary_qkvpacked(qkv[None], rotary)[0]
        lengths = attn.cu_seqlens, attn.max_seqlen
        out = ops.attention_varlen_qkvpacked(qkv, *lengths, scale=attn.scale, dropout_p=attn.attn_drop)
        return join_heads(out, attn)
    if rotary is not None:
        qkv = ops.rotary_qkvpacked(qkv, rotary)
    out = ops.attention_qkvpacked(
        qkv, attn_mask=attn_mask, is_causal=is_causal, scale=attn.scale, dropout_p=attn.attn_drop
    )
    return join_heads(out, attn)


def _attend_separate(
    q: Tensor, k: Tensor, v: Tensor, attn: AttentionSpec, rotary: Rotary | None, attn_mask: Tensor | None,
    is_causal: bool,
) -> Tensor:  # fmt: skip
    """Attend with q (..., H, d), k and v (..., kv_heads, d): -> (..., H * d)."""
    if attn.cu_seqlens is not None:
        q, k = (t[0] for t in normed_and_rotated(q[None], k[None], attn.qk_norm, rotary))
        lengths = attn.cu_seqlens, attn.max_seqlen
        return join_heads(ops.attention_varlen(q, k, v, *lengths, scale=attn.scale, dropout_p=attn.attn_drop), attn)
    q, k = normed_and_rotated(q, k, attn.qk_norm, rotary)
    out = ops.attention(
        q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=attn.scale, dropout_p=attn.attn_drop, layout="bnhd"
    )
    return join_heads(out, attn)


def normed_and_rotated(
    q: Tensor, k: Tensor, qk_norm: tuple[Norm, Norm] | None, rotary: Rotary | None
) -> tuple[Tensor, Tensor]:
    """Normalise and rotate q (B, N, H, d) and k (B, N, kv_heads, d)."""
    if qk_norm is not None and q.shape == k.shape and qk_norm[0].weight.shape[0] == q.shape[-1]:
        learnt = rotary is not None and _may_be_learnt(rotary)
        q, k = ops.qk_norm(q, k, *qk_norm, None if learnt else rotary)
        rotary = rotary if learnt else None
    elif qk_norm is not None:
        q, k = (_normed_heads(t, norm) for t, norm in zip((q, k), qk_norm, strict=True))
    return (q, k) if rotary is None else (ops.rotary(q, rotary), ops.rotary(k, rotary))


def _may_be_learnt(rotary: Rotary) -> bool:
    """Return whether the tables may need a gradient, which only `ops.rotary` computes. torch.jit.trace traces with
    gradients and checks without them: both runs have to take the same path."""
    return rotary.sin.requires_grad or rotary.cos.requires_grad or is_jit_tracing()


def _normed_heads(x: Tensor, norm: Norm) -> Tensor:
    """Normalise x (B, N, H, d) over each head, or over all heads together."""
    if norm.weight.shape[0] == x.shape[-1]:
        return run_norm(x, norm)
    return run_norm(x.flatten(2), norm).view(x.shape)


def join_heads(out: Tensor, attn: AttentionSpec) -> Tensor:
    """Join the heads and apply scale_norm: (..., H, d) -> (..., H * d)."""
    out = out.flatten(-2)
    return out if attn.scale_norm is None else run_norm(out, attn.scale_norm)


def _gate_and_value(mlp: MlpSpec) -> tuple[Any, Any]:
    """Return weights and biases of gate and value, without adapters; those of one layer are views."""
    if mlp.value is not None:
        weights, biases = zip(mlp.fc1, mlp.value, strict=True)
        return weights, biases
    layer: Any = mlp.fc1
    return layer.weight.chunk(2)[::-1], None if layer.bias is None else layer.bias.chunk(2)[::-1]


def _widen(x: Tensor, mlp: MlpSpec) -> Tensor:
    """Run an MLP up to fc2."""
    if mlp.activation in GATED:
        first = run_linear(x, mlp.fc1)
        both = first.chunk(2, dim=-1) if mlp.value is None else (first, run_linear(x, mlp.value))
        gate, value = both[::-1] if mlp.gate_last else both
        hidden = mlp.act(gate) * value
    elif isinstance(mlp.fc1, AdaptedLinear):
        hidden = mlp.act(mlp.fc1.module(x))
    else:
        hidden = ops.linear(x, *mlp.fc1, activation=mlp.activation)
    hidden = ops.dropout(hidden, mlp.drop1)
    return hidden if mlp.inner_norm is None else run_norm(hidden, mlp.inner_norm)


def run_last(hidden: Tensor, last: LinearSpec, p: float, x: Tensor, half: HalfSpec[Any]) -> Tensor:
    """Compute x + drop_path(layer_scale * dropout(last(hidden)))."""
    if p or isinstance(last, AdaptedLinear):
        return _add_branch(x, ops.dropout(run_linear(hidden, last), p), half)
    row_scale = draw_drop_path(x, half.drop_path, half.scale_by_keep) if half.drop_path else half.row_scale
    return ops.linear(hidden, *last, layer_scale=half.layer_scale, row_scale=row_scale, residual=x)


def draw_drop_path(
    x: Tensor, p: float, scale_by_keep: bool, cu_seqlens: Tensor | None = None, count: int | None = None
) -> Tensor:
    """Draw stochastic depth for a batch like x: (B,) of 0 and 1 / (1 - p), or of 0 and 1, in x's dtype. With
    cu_seqlens, draw for the sequences of x (T, D), and return the number of each token's: (T,). count: how many numbers
    to draw if not B."""
    keep = 1.0 - p
    if count is None:
        # one more than there are sequences: tokens outside all of them have a number too, whatever cu_seqlens says
        count = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0]
    mask = x.new_empty(count).bernoulli_(keep)
    mask = mask.div_(keep) if scale_by_keep and keep > 0.0 else mask
    return mask if cu_seqlens is None else mask[sequence_of_tokens(x, cu_seqlens)]


def sequence_of_tokens(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the number of the sequence that each token of x (T, ...) is in, (T,), without waiting for a GPU."""
    tokens = torch.arange(x.shape[0], dtype=cu_seqlens.dtype, device=x.device)
    return torch.searchsorted(cu_seqlens, tokens, right=True) - 1


def _add_branch(x: Tensor, branch: Tensor, half: HalfSpec[Any]) -> Tensor:
    """Finish a half of a block after a dropout that no op has in its epilogue."""
    if half.layer_scale is not None:
        branch = branch * half.layer_scale
    row_scale = draw_drop_path(branch, half.drop_path, half.scale_by_keep) if half.drop_path else half.row_scale
    if row_scale is not None:
        branch = branch * row_scale.view(-1, *[1] * (branch.dim() - 1))
    return x + branch
