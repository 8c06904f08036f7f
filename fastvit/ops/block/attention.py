"""The attention half of a pre-norm block: checks and the public function. The node is in attention_node.py."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastvit.ops.attention.checks import (
    check_lengths,
    checked_mask,
    checked_mask_of_sequences,
    checked_scale,
)
from fastvit.ops.block.attention_node import AttentionOptions, NormAttention
from fastvit.ops.block.norm_linear import Biases, Weights, check_norm_and_layers, listed
from fastvit.ops.dropout.op import draw_seeds
from fastvit.ops.layer_norm.op import NO_NORM, Norm, checked_norm
from fastvit.ops.linear.op import check_linear
from fastvit.ops.qk_norm.op import checked_norms
from fastvit.ops.rotary.op import Rotary, broadcast_tables, check_tables
from fastvit.ops.runtime.autograd import needs_autograd
from fastvit.ops.runtime.checks import check_recompute
from fastvit.ops.runtime.epilogue import Epilogue
from fastvit.ops.runtime.run import Prepared, run

RECOMPUTE = ("none", "attention", "qkv", "all")


def _head_dim(weights: tuple[Tensor, ...], num_heads: int) -> int:
    out = tuple([weight.shape[0] for weight in weights])
    each = sum(out) // 3
    if not isinstance(num_heads, int) or num_heads < 1 or each % num_heads or out not in ((3 * each,), (each,) * 3):
        raise ValueError(
            "qkv_weight must have 3 * num_heads * head_dim rows, or be three of num_heads * head_dim rows each, with "
            f"num_heads = {num_heads}, got {', '.join(map(str, out))} rows"
        )
    return each // num_heads


def layer_norm_attention(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor | None, qkv_weight: Weights, qkv_bias: Biases,
    proj_weight: Tensor, proj_bias: Tensor | None, num_heads: int,
    *, eps: float = 1e-6, norm: str = "layer", scale: float | None = None, dropout_p: float = 0.0,
    layer_scale: Tensor | None = None, row_scale: Tensor | None = None, residual: Tensor | None = None,
    rotary: Rotary | None = None, scale_norm: Norm | None = None, qk_norm: tuple[Norm, Norm] | None = None,
    attn_mask: Tensor | None = None, is_causal: bool = False, cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None, recompute: str = "none",
) -> Tensor:  # fmt: skip
    """Compute residual + row_scale * layer_scale * proj(attention(LayerNorm(x))), multi-head self-attention (Vaswani et
    al. 2017, section 3.2.2), as one autograd node. It saves x, float32 statistics and what `recompute` says; the
    backward pass computes the normalised rows again.

    Args:
        x: (B, N, D), or (T, D) with cu_seqlens; float32, float16, bfloat16 or float64, any strides.
        norm_weight, norm_bias: (D,), x's dtype; the bias may be None.
        qkv_weight: (3 * num_heads * head_dim, D), x's dtype, the rows of q, then k, then v; or the three as a sequence.
            head_dim is a multiple of 8 from 16 to 256.
        qkv_bias: (3 * num_heads * head_dim,), x's dtype, or None; for three weights three, each of which may be None.
        proj_weight, proj_bias: (out, num_heads * head_dim) and (out,), x's dtype; the bias may be None.
        num_heads: how many heads share the rows of q, of k and of v.
        eps: added to the variance; not negative.
        norm: "layer", or "rms" for RMSNorm as in `rms_norm`, without a bias.
        scale: factor of the scores; head_dim^-0.5 if None.
        dropout_p: probability of dropping an attention weight, in [0, 1), as in `attention`. Pass 0 in evaluation.
        layer_scale: (out,) LayerScale's gamma (Touvron et al. 2021), x's dtype, or None.
        row_scale: (B,) one factor a sample, as DropPath draws them (Huang et al. 2016), or None; with cu_seqlens (T,),
            one a token. Not differentiated.
        residual: (B, N, out), with cu_seqlens (T, out), or None. Its dtype may be wider than x's. When it is x itself,
            its gradient joins inside the LayerNorm's backward pass.
        rotary: rotary positions of q and k, which are rotated in place, forward and backward, or None. The tables are
            not differentiated: for learnt ones put `rotary_qkvpacked` between `layer_norm_linear` and
            `attention_qkvpacked`.
        scale_norm: a norm of attention's output before the projection (Wang et al. 2022, arXiv:2210.06423), or None;
            weight and bias are (num_heads * head_dim,), x's dtype.
        qk_norm: norms of q and of k over the head dimension, before the rotation, as in `qk_norm`, or None. Both have
            one kind and eps; weight and bias are (head_dim,), x's dtype. q and k are saved before their norms and
            normalised again in the backward pass.
        attn_mask: broadcastable to (B, num_heads, N, N), or None, as in `attention`.
        is_causal: token i sees tokens 0 to i only, as in `attention`.
        cu_seqlens, max_seqlen: x has the tokens of several sequences one after the other, and attention stays within
            each, as in `attention_varlen`, also with attn_mask and is_causal. rotary has tables of (T, head_dim) with
            P = 0; sines of 0 and cosines of 1 leave a token as it is.
        recompute: what else the backward pass computes again. "none" saves x, q, k, v and attention's output;
            "attention" saves x, q, k and v, and runs attention's forward pass again; "qkv" saves x and attention's
            output, and runs the layer of q, k and v again, with the rotation; "all" saves x.

    Returns:
        (B, N, out), with cu_seqlens (T, out), contiguous, in the dtype that x and residual promote to. Under autocast
        weights, biases and the LayerNorm's output are cast to its dtype, x's dtype may differ from theirs, and the
        output's dtype is what PyTorch gives for the formula.

    Raises:
        TypeError, ValueError: naming the argument, for dtypes, devices, shapes and values that do not fit.
    """
    layers = norm_weight, norm_bias, qkv_weight, qkv_bias, proj_weight, proj_bias, layer_scale, row_scale
    added = None if residual is x else residual  # torch.compile refuses one tensor as two inputs
    arguments = x, *layers, added, rotary, scale_norm, qk_norm, attn_mask, cu_seqlens
    options = residual is x, num_heads, eps, norm, scale, dropout_p, is_causal, recompute, max_seqlen
    out: Tensor = run("layer_norm_attention", _prepared, arguments, options)
    return out


def _three_layers(weight: Weights, bias: Biases) -> tuple[Any, ...]:
    """Return weight and bias three times; None after the first ones of a single layer."""
    layers = [t for layer in zip(*listed(weight, bias), strict=True) for t in layer]
    return *layers, *(None,) * (6 - len(layers))


def _prepared(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor | None, qkv_weight: Weights, qkv_bias: Biases,
    proj_weight: Tensor, proj_bias: Tensor | None, layer_scale: Tensor | None, row_scale: Tensor | None,
    residual: Tensor | None, rotary: Rotary | None, scale_norm: Norm | None, qk_norm: tuple[Norm, Norm] | None,
    attn_mask: Tensor | None, cu_seqlens: Tensor | None, residual_is_x: bool, num_heads: int, eps: float, norm: str,
    scale: float | None, dropout_p: float, is_causal: bool, recompute: str, max_seqlen: int | None,
) -> Prepared:  # fmt: skip
    before = norm_weight, norm_bias, eps, norm
    cast = check_norm_and_layers(x, before, qkv_weight, qkv_bias, ("qkv_weight", "qkv_bias"))
    if x.dim() != (3 if cu_seqlens is None else 2):
        shape = "(B, N, D)" if cu_seqlens is None else "(T, D) with cu_seqlens"
        raise ValueError(f"x must have shape {shape}, got {tuple(x.shape)}")
    B, N = x.shape[:2] if cu_seqlens is None else (1, x.shape[0])
    longest = None
    if cu_seqlens is not None:
        longest = check_lengths("x", x, cu_seqlens, max_seqlen)
    elif max_seqlen is not None:
        raise ValueError(f"max_seqlen must be None without cu_seqlens, got {max_seqlen}")
    check_recompute(recompute, RECOMPUTE)
    head_dim = _head_dim((qkv_weight,) if isinstance(qkv_weight, Tensor) else tuple(qkv_weight), num_heads)
    scale = checked_scale(head_dim, scale, dropout_p, is_causal)
    check_linear(
        x, proj_weight, proj_bias, dtype=cast is None, names=("x", "proj_weight", "proj_bias"),
        hidden=("num_heads * head_dim", num_heads * head_dim),
    )  # fmt: skip
    epilogue = Epilogue(layer_scale, row_scale, x if residual_is_x else residual)
    epilogue.check(x, proj_weight.shape[0], dtype=cast is None)
    after = q_norm = k_norm = NO_NORM
    if scale_norm is not None:
        width = "num_heads * head_dim", num_heads * head_dim
        after = checked_norm("scale_norm", x, scale_norm, *width, dtype=cast is None)
    if qk_norm is not None:
        if not isinstance(qk_norm, tuple) or len(qk_norm) != 2:
            raise TypeError(f"qk_norm must be a tuple of two ops.Norm, got {qk_norm!r}")
        q_norm, k_norm = checked_norms(("qk_norm[0]", "qk_norm[1]"), x, qk_norm, head_dim, dtype=cast is None)
    if rotary is not None:
        check_tables(rotary, "x", x, (B, N, num_heads, head_dim), "rotary_qkvpacked")
        if cu_seqlens is not None and rotary.num_prefix_tokens:
            raise ValueError(f"rotary.num_prefix_tokens must be 0 with cu_seqlens, got {rotary.num_prefix_tokens}")
    mask = None
    if attn_mask is not None and longest is not None:
        mask = checked_mask_of_sequences(attn_mask, "x", x, num_heads, longest)
    elif attn_mask is not None:
        mask = checked_mask(attn_mask, "x", x, (B, num_heads, N, N))
    sin, cos = (None, None) if rotary is None else broadcast_tables(rotary)
    seed = draw_seeds(1, x.device) if dropout_p else None
    layers = *_three_layers(qkv_weight, qkv_bias), *q_norm[:2], *k_norm[:2], *after[:2], proj_weight, proj_bias
    autograd = needs_autograd(
        "layer_norm_attention", x, norm_weight, norm_bias, *layers, layer_scale, residual, attn_mask
    )
    options = AttentionOptions(
        op="layer_norm_attention", eps=eps, rms=norm == "rms", scale_eps=after[2],
        scale_rms=after[3] == "rms", qk_eps=q_norm[2], qk_rms=q_norm[3] == "rms", heads=(3, num_heads, head_dim),
        scale=scale, dropout_p=dropout_p, causal=is_causal, residual_is_x=residual_is_x,
        residual_dtype=None if epilogue.residual is None else epilogue.residual.dtype,
        max_seqlen=longest, interleaved=rotary is not None and rotary.interleaved,
        keep_qkv=autograd and recompute in ("none", "attention"), keep_attended=recompute in ("none", "qkv"), cast=cast,
    )  # fmt: skip
    others = layer_scale, row_scale, residual, mask, cu_seqlens, seed, sin, cos
    return NormAttention, autograd, options, (x, norm_weight, norm_bias, *layers, *others)
