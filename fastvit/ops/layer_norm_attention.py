"""The attention half of a pre-norm block as one autograd node."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastvit.ops._checks import as_rows
from fastvit.ops._epilogue import Epilogue, input_gradient_operands, parameter_gradients, scale_samples
from fastvit.ops._library import FusedFunction, choose_backend, consume_saved, needs_autograd, repeats_as_views
from fastvit.ops.attention import attention_qkvpacked_bwd, attention_qkvpacked_fwd, checked_scale
from fastvit.ops.dropout import draw_seeds
from fastvit.ops.layer_norm import layer_norm_fwd
from fastvit.ops.layer_norm_linear import Biases, Weights, layer_norm_linear_backward, norm_and_layers, side_by_side
from fastvit.ops.linear import check_linear, linear_fwd
from fastvit.ops.rotary import Rotary, in_place, rotary_op, tables


class _Options(NamedTuple):
    eps: float
    heads: tuple[int, int, int]  # 3, H, d
    scale: float
    dropout_p: float
    residual_is_x: bool
    interleaved: bool  # rotary positions, if there are any


def _backward(saved: list[Any], dout: Tensor, o: _Options, wants: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    """wants: of proj's weight and bias and layer_scale, then as `layer_norm_linear_backward` -> gradients, or None."""
    proj_weight, proj_bias, layer_scale, row_scale, seed, sin, cos, qkv, attended, lse, x, *rest = saved
    saved.clear()
    features = proj_weight.shape[1]
    g = as_rows(scale_samples(dout.to(proj_weight.dtype), row_scale))
    rows = attended.view(-1, features) if wants[0] or wants[2] else None
    of_proj = parameter_gradients(g, rows, proj_weight, proj_bias, layer_scale, wants[:3])
    if qkv is None:
        return *of_proj, *(None,) * len(wants[3:])
    do = torch.mm(*input_gradient_operands(g, proj_weight, layer_scale)).view(attended.shape)
    del g
    dqkv = attention_qkvpacked_bwd(do, qkv, attended, lse, seed, o.scale, o.dropout_p)
    del do, qkv, attended, rows
    if sin is not None:
        heads, backend = dqkv.flatten(2, 3), choose_backend(dqkv, sin, cos)
        arguments = heads, sin, cos, 2 * o.heads[1], o.interleaved, True, *in_place(heads, backend)
        dqkv = rotary_op(*arguments, backend=backend)
    dresidual = dout.to(x.dtype) if o.residual_is_x and x is not None else None
    return *of_proj, *layer_norm_linear_backward(dqkv.view(-1, 3 * features), dresidual, o.eps, wants[3:], x, *rest)


class _LayerNormAttention(FusedFunction):
    """residual + row_scale * layer_scale * proj(attention(norm(x))); the residual may be x"""

    @staticmethod
    def forward(
        x: Tensor, norm_weight: Tensor, norm_bias: Tensor,
        proj_weight: Tensor, proj_bias: Tensor | None, layer_scale: Tensor | None,
        row_scale: Tensor | None, residual: Tensor | None, seed: Tensor | None, sin: Tensor | None, cos: Tensor | None,
        o: _Options, *layers: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        parameters = norm_weight, norm_bias, *layers, proj_weight, proj_bias
        backend = choose_backend(x, *parameters, layer_scale, row_scale, residual, sin, cos)
        y, mean, rstd = layer_norm_fwd(x, norm_weight, norm_bias, o.eps, layers[0].dtype, backend=backend)
        qkv = F.linear(y, *layers) if len(layers) == 2 else side_by_side(y, layers)
        del y
        B, N, _ = x.shape
        qkv = qkv.view(B, N, *o.heads)
        if sin is not None:
            heads = qkv.flatten(2, 3)
            rotary = heads, sin, cos, 2 * o.heads[1], o.interleaved, False, *in_place(heads, backend)
            qkv = rotary_op(*rotary, backend=backend).view(qkv.shape)
        attended, lse = attention_qkvpacked_fwd(qkv, seed, o.scale, o.dropout_p, backend=backend)
        epilogue = layer_scale, row_scale, x if o.residual_is_x else residual
        rows = attended.view(B, N, proj_weight.shape[1])
        out = linear_fwd(rows, proj_weight, proj_bias, "none", *epilogue, backend=backend)
        return out, mean, rstd, qkv, attended, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, norm_weight, norm_bias, *proj, row_scale, residual, seed, sin, cos, o = inputs[:12]
        _, mean, rstd, qkv, attended, lse = output
        layers, wants = inputs[12:], ctx.needs_input_grad
        weights = layers[: len(layers) // 2]
        want_norm = any(wants[:3])
        keep_x = want_norm or any(wants[12 : 12 + len(weights)])
        if not (want_norm or any(wants[12:])):
            qkv = lse = None
            attended = attended if wants[3] or wants[5] else None
        mean, rstd = (mean, rstd) if want_norm else (None, None)
        ctx.save_for_backward(
            *proj, row_scale, seed, sin, cos, qkv, attended, lse,
            x if keep_x else None, norm_weight, norm_bias, mean, rstd, *weights,
        )  # fmt: skip
        ctx.options = o
        ctx.residual_dtype = None if residual is None else residual.dtype
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, *_: Any) -> tuple[Any, ...]:
        wants = ctx.needs_input_grad
        if dout is None:
            return (None,) * len(wants)
        dresidual = dout.to(ctx.residual_dtype) if wants[7] else None
        wants = (*wants[3:6], *wants[:3], *wants[12:])
        gradients: tuple[Tensor | None, ...] = (None,) * len(wants)
        if any(wants):
            gradients = consume_saved(ctx, "layer_norm_attention", _backward, dout, ctx.options, wants)
        return *gradients[3:6], *gradients[:3], None, dresidual, None, None, None, None, *gradients[6:]


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
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor, qkv_weight: Weights, qkv_bias: Biases,
    proj_weight: Tensor, proj_bias: Tensor | None, num_heads: int,
    *, eps: float = 1e-6, scale: float | None = None, dropout_p: float = 0.0,
    layer_scale: Tensor | None = None, row_scale: Tensor | None = None, residual: Tensor | None = None,
    rotary: Rotary | None = None,
) -> Tensor:  # fmt: skip
    """residual + row_scale * layer_scale * proj(attention(LayerNorm(x))), multi-head self-attention (Vaswani et al.
    2017, section 3.2.2) as one autograd node, which saves x, q, k, v, attention's output and float32 statistics; the
    normalised rows are computed again in the backward pass of the LayerNorm.

    Args:
        x: (B, N, D); float32, float16, bfloat16 or float64, any strides.
        norm_weight, norm_bias: (D,), x's dtype.
        qkv_weight: (3 * num_heads * head_dim, D), x's dtype, the rows of q, then k, then v; or the three as a sequence.
            head_dim is a multiple of 8 from 16 to 256.
        qkv_bias: (3 * num_heads * head_dim,), x's dtype, or None; for three weights three, each of which may be None.
        proj_weight, proj_bias: (out, num_heads * head_dim) and (out,), x's dtype; the bias may be None.
        num_heads: how many heads share the rows of q, of k and of v.
        eps: added to the variance; not negative.
        scale: of the scores; head_dim^-0.5 if None.
        dropout_p: probability of dropping an attention weight, in [0, 1), as in `attention`. Pass 0 in evaluation.
        layer_scale: (out,) LayerScale's gamma (Touvron et al. 2021), x's dtype, or None.
        row_scale: (B,) one factor a sample, as DropPath draws them (Huang et al. 2016), or None. Not differentiated.
        residual: (B, N, out), or None. Its dtype may be wider than x's. When it is x itself, its gradient joins inside
            the LayerNorm's backward pass.
        rotary: rotary positions of q and k, which are rotated in place, forward and backward, or None. The tables are
            not differentiated: for learnt ones put `rotary_qkvpacked` between `layer_norm_linear` and
            `attention_qkvpacked`.

    Returns:
        (B, N, out), contiguous, in the dtype that x and residual promote to. Under autocast weights, biases and the
        LayerNorm's output are cast to its dtype, x's dtype may differ from theirs, and the output's dtype is what
        PyTorch gives for the formula.

    Raises:
        TypeError, ValueError: naming the argument, for dtypes, devices, shapes and values that do not fit.
    """
    cast, layers = norm_and_layers(x, norm_weight, norm_bias, eps, qkv_weight, qkv_bias, ("qkv_weight", "qkv_bias"))
    if x.dim() != 3:
        raise ValueError(f"x must have shape (B, N, D), got {tuple(x.shape)}")
    head_dim = _head_dim(layers[: len(layers) // 2], num_heads)
    scale = checked_scale(head_dim, scale, dropout_p)
    check_linear(
        x, proj_weight, proj_bias, dtype=cast is None, names=("x", "proj_weight", "proj_bias"),
        hidden=("num_heads * head_dim", num_heads * head_dim),
    )  # fmt: skip
    Epilogue(layer_scale, row_scale, residual).check(x, proj_weight.shape[0], dtype=cast is None)
    sin = cos = None
    if rotary is not None:
        sin, cos = tables(rotary, "x", x, (*x.shape[:2], num_heads, head_dim))
        if torch.is_grad_enabled() and (sin.requires_grad or cos.requires_grad):
            raise ValueError("rotary must not require a gradient: it is not differentiated here; see rotary_qkvpacked")
    if cast is not None:
        proj_weight, proj_bias = proj_weight.to(cast), None if proj_bias is None else proj_bias.to(cast)
    tensors = x, norm_weight, norm_bias, proj_weight, proj_bias, layer_scale
    autograd = needs_autograd("layer_norm_attention", *tensors, residual, *layers)
    options = _Options(
        eps, (3, num_heads, head_dim), scale, dropout_p, residual is x, rotary is not None and rotary.interleaved
    )
    residual = None if residual is x else residual  # torch.compile refuses to see a tensor twice among the inputs
    seed = draw_seeds(1, x.device) if dropout_p else None
    arguments = *tensors, row_scale, residual, seed, sin, cos, options, *layers
    if autograd:
        return _LayerNormAttention.apply(*repeats_as_views(*arguments))[0]
    return _LayerNormAttention.forward(*arguments)[0]
