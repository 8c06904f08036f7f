"""The transformer's MLP as one autograd node, with or without the LayerNorm before it. Public functions: mlp.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastvit.ops._activations import activate
from fastvit.ops._branch import input_gradient_operands, parameter_gradients, scale_samples
from fastvit.ops._checks import as_rows, as_tokens, from_tokens, like_tokens
from fastvit.ops._layer_norm import layer_norm_bwd, layer_norm_bwd_recompute, layer_norm_fwd
from fastvit.ops._library import FusedFunction, Together, once
from fastvit.ops._linear import act_bwd, linear_act_fwd, linear_dact, linear_fwd
from fastvit.ops.dropout import dropout_rows

_FORWARD = Together(layer_norm_fwd, linear_fwd, linear_act_fwd)


class MlpOptions(NamedTuple):
    name: str  # of the public function
    activation: str
    dropout_p: float
    keep_pre: bool
    keep_h: bool
    rows: int  # that share an entry of row_scale
    dtype: torch.dtype  # of the matmuls
    eps: float
    residual_is_x: bool


def _drop(h: Tensor, seed: Tensor, p: float) -> Tensor:
    return dropout_rows(h, seed, p, None, None, None, 1)


def mlp_forward(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    layer_scale: Tensor | None,
    row_scale: Tensor | None,
    residual: Tensor | None,
    seeds: Tensor | None,
    o: MlpOptions,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor]:
    """-> out (..., D); mean and rstd [M, 1], pre and h [M, hidden], or with x's leading dimensions; None without a norm
    or o.keep_pre."""
    tokens = y = as_tokens(x) if seeds is None else as_rows(x)  # which dropout takes
    mean = rstd = pre = None
    tensors = (
        tokens, norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias, layer_scale, row_scale, residual
    )  # fmt: skip
    norm, linear, linear_act = _FORWARD.settle(tensors)
    if norm_weight is not None:
        y, mean, rstd = norm(tokens, norm_weight, norm_bias, o.eps, o.dtype)
    if o.keep_pre:
        h, pre = linear_act(y, fc1_weight, fc1_bias, o.activation)
    else:
        h = linear(y, fc1_weight, fc1_bias, o.activation, None, None, None, 1)
    del y
    if o.residual_is_x:
        residual = tokens
    elif residual is not None:
        residual = like_tokens(residual, tokens)
    if seeds is None:
        out = linear(h, fc2_weight, fc2_bias, "none", layer_scale, row_scale, residual, o.rows)
    else:
        h = _drop(h, seeds[:1], o.dropout_p)
        branch = F.linear(h, fc2_weight, fc2_bias)
        out = dropout_rows(branch, seeds[1:], o.dropout_p, layer_scale, row_scale, residual, o.rows)
    return from_tokens(out, x), mean, rstd, pre, h


def _backward(
    dout: Tensor,
    x: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    layer_scale: Tensor | None,
    row_scale: Tensor | None,
    seeds: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    pre: Any,
    h: Tensor | None,
    o: MlpOptions,
    wants: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """-> gradients of x [M, D], the norm's, fc1's and fc2's weight and bias, and layer_scale; None if not wanted."""
    want_hidden, want_h = any(wants[:5]), wants[5] or wants[7]
    rows: Any = None if x is None else as_rows(x)
    y: Any = rows if norm_weight is None else None
    pre, h = None if pre is None else as_rows(pre), None if h is None else as_rows(h)
    dout = as_rows(dout)
    if seeds is None:
        g = scale_samples(dout.to(o.dtype), row_scale, o.rows)
    else:
        g = dropout_rows(dout.to(o.dtype), seeds[1:], o.dropout_p, None, row_scale, None, o.rows)

    if pre is None and (want_hidden or (want_h and h is None)):
        if y is None:
            y, *_ = layer_norm_fwd(rows, norm_weight, norm_bias, o.eps, o.dtype)
        pre = F.linear(y, fc1_weight, fc1_bias)
    dpre: Any = None
    dfc1_bias = None
    if want_hidden and want_h and h is None and seeds is None:
        dpre, h, dfc1_bias = linear_dact(*input_gradient_operands(g, fc2_weight, layer_scale), pre, o.activation)
    else:
        if want_hidden:
            dh = torch.mm(*input_gradient_operands(g, fc2_weight, layer_scale))
            dh = dh if seeds is None else _drop(dh, seeds[:1], o.dropout_p)
            dpre, dfc1_bias = act_bwd(dh, pre, o.activation)
        if want_h and h is None:
            h = activate(pre, o.activation)
            h = h if seeds is None else _drop(h, seeds[:1], o.dropout_p)
    of_fc2 = parameter_gradients(g, h, fc2_weight, fc2_bias, layer_scale, wants[5:8])
    del h, g

    dx: Any = None
    dnorm_weight = dnorm_bias = dfc1_weight = None
    if any(wants[:3]):
        dresidual = dout.to(o.dtype if rows is None else rows.dtype) if o.residual_is_x else None
        if norm_weight is None:
            dx = dpre @ fc1_weight if dresidual is None else torch.addmm(dresidual, dpre, fc1_weight)
        elif wants[3] and y is None:
            dx, dnorm_weight, dnorm_bias, y = layer_norm_bwd_recompute(
                dpre @ fc1_weight, rows, mean, rstd, norm_weight, norm_bias, dresidual
            )
        else:
            dx, dnorm_weight, dnorm_bias = layer_norm_bwd(dpre @ fc1_weight, rows, mean, rstd, norm_weight, dresidual)
    elif wants[3] and y is None:
        y, *_ = layer_norm_fwd(rows, norm_weight, norm_bias, o.eps, o.dtype)
    if wants[3]:
        dfc1_weight = dpre.t() @ y
    return dx, dnorm_weight, dnorm_bias, dfc1_weight, dfc1_bias if wants[4] else None, *of_fc2


class Mlp(FusedFunction):
    """residual + row_scale * layer_scale * mlp(norm(x)), the norm optional; the residual may be x"""

    @staticmethod
    def forward(*inputs: Any) -> Any:
        *outputs, h = mlp_forward(*inputs)
        # no None among them: torch.compile takes every output of a Function for a tensor
        return tuple(t for t in (*outputs, h if inputs[-1].keep_h else None) if t is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, norm_weight, *parameters, row_scale, residual, seeds, o = inputs
        extras = iter(output[1:])
        mean, rstd = (None, None) if norm_weight is None else (next(extras), next(extras))
        pre = next(extras) if o.keep_pre else None
        wants = ctx.needs_input_grad
        want_hidden, want_h = any(wants[:5]), wants[5] or wants[7]
        h = next(extras) if o.keep_h and want_h else None
        keep_pre = want_hidden or (want_h and h is None)
        keep_x = wants[3] or (norm_weight is not None and any(wants[:3])) or (keep_pre and pre is None)
        ctx.save_for_backward(
            x if keep_x else None, norm_weight, *parameters, row_scale, seeds,
            mean, rstd, pre if keep_pre else None, h,
        )  # fmt: skip
        ctx.options, ctx.shape = o, x.shape
        ctx.residual_dtype = None if residual is None else residual.dtype
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, *_: Any) -> tuple[Any, ...]:
        if dout is None:
            return (None,) * 12
        o, wants = ctx.options, ctx.needs_input_grad
        grads = (None,) * 8
        if any(wants[:8]):
            grads = once(o.name, _backward, dout, *ctx.saved_tensors, o, wants[:8])
        dx, *rest = grads
        dx = None if dx is None else dx.view(ctx.shape)
        return dx, *rest, None, dout.to(ctx.residual_dtype) if wants[9] else None, None, None
