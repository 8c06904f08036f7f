"""Linear layer with a fused epilogue: checks, gradient, public function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastvit.ops._activations import check_activation
from fastvit.ops._branch import input_gradient_operands, parameter_gradients, scale_samples
from fastvit.ops._checks import (
    as_rows,
    as_tokens,
    check_float,
    check_like,
    from_tokens,
    like_tokens,
    rows_per_sample,
)
from fastvit.ops._library import FusedFunction, autocast_dtype, distinct, needs_autograd, once
from fastvit.ops._linear import act_bwd, linear_act_fwd, linear_fwd


def _backward(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    layer_scale: Tensor | None,
    row_scale: Tensor | None,
    rows: int,
    wants: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """-> gradients of x [M, in], weight, bias and layer_scale; None if not wanted."""
    g = scale_samples(as_rows(dy).to(weight.dtype), row_scale, rows)
    dx = torch.mm(*input_gradient_operands(g, weight, layer_scale)) if wants[0] else None
    return dx, *parameter_gradients(g, None if x is None else as_rows(x), weight, bias, layer_scale, wants[1:])


class _Linear(FusedFunction):
    """residual + row_scale * layer_scale * (x @ weight.T + bias)"""

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer_scale: Tensor | None,
        row_scale: Tensor | None,
        residual: Tensor | None,
        rows: int,
    ) -> Tensor:
        return _run(x, weight, bias, "none", layer_scale, row_scale, residual, rows)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, bias, layer_scale, row_scale, residual, ctx.rows = inputs
        _, needs_weight, _, needs_scale, *_ = ctx.needs_input_grad
        ctx.shape = x.shape
        ctx.save_for_backward(
            x if needs_weight or needs_scale else None, weight, bias if needs_scale else None, layer_scale, row_scale
        )
        ctx.residual_dtype = None if residual is None else residual.dtype

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        wants = ctx.needs_input_grad
        dx, *rest = (None,) * 4
        if any(wants[:4]):
            dx, *rest = once("linear", _backward, dy, *ctx.saved_tensors, ctx.rows, wants[:4])
        dresidual = dy.to(ctx.residual_dtype) if wants[5] else None
        return None if dx is None else dx.view(ctx.shape), *rest, None, dresidual, None


def _act_backward(
    dy: Tensor, x: Tensor | None, weight: Tensor, pre: Tensor, activation: str, wants: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """-> gradients of x [M, in], weight and bias; None if not wanted."""
    dpre, dbias = act_bwd(as_rows(dy), pre, activation)
    dx = dpre @ weight if wants[0] else None
    return dx, None if x is None else dpre.t() @ as_rows(x), dbias if wants[2] else None


class _LinearAct(FusedFunction):
    """activation(x @ weight.T + bias)"""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
        h, pre = linear_act_fwd(as_rows(x), weight, bias, activation)
        return h.view(*x.shape[:-1], h.shape[1]), pre

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, _, ctx.activation = inputs
        _, pre = output
        ctx.shape = x.shape
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, pre)
        ctx.mark_non_differentiable(pre)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dpre: None) -> tuple[Any, ...]:
        if dy is None:
            return None, None, None, None
        dx, *rest = once("linear", _act_backward, dy, *ctx.saved_tensors, ctx.activation, ctx.needs_input_grad[:3])
        return None if dx is None else dx.view(ctx.shape), *rest, None


def _scale_and_add(h: Tensor, layer_scale: Tensor | None, row_scale: Tensor | None, residual: Tensor | None) -> Tensor:
    """residual + row_scale * layer_scale * h, differentiable. No ViT scales an activation, so that a fused gradient of
    the combination is not worth its code."""
    if row_scale is not None:
        h = h * row_scale.to(h.dtype).view(-1, *(1,) * (h.dim() - 1))
    if layer_scale is not None:
        h = h * layer_scale
    return h if residual is None else residual + h


def _run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    layer_scale: Tensor | None,
    row_scale: Tensor | None,
    residual: Tensor | None,
    rows: int,
) -> Tensor:
    tokens = as_tokens(x)
    residual = None if residual is None else like_tokens(residual, tokens)
    return from_tokens(linear_fwd(tokens, weight, bias, activation, layer_scale, row_scale, residual, rows), x)


def check_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    dtype: bool,
    names: tuple[str, str, str] = ("x", "weight", "bias"),
) -> None:
    """x (..., in), a float tensor, weight (out, in), bias (out,) or None, under the caller's names for them."""
    x_name, weight_name, bias_name = names
    check_like(weight_name, weight, x_name, x, dtype=dtype)
    shape = weight.shape
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"{weight_name} must be (out, in) with out, in >= 1, got shape {tuple(shape)}")
    if x.dim() == 0 or x.shape[-1] != shape[1]:
        raise ValueError(
            f"{x_name} must have shape (..., in) with {weight_name}'s in = {shape[1]}, got {tuple(x.shape)}"
        )
    if bias is not None:
        check_like(bias_name, bias, x_name, x, (shape[0],), "(out,)", dtype=dtype)


def check_branch(
    x: Tensor,
    out_features: int,
    layer_scale: Tensor | None,
    row_scale: Tensor | None,
    residual: Tensor | None,
    *,
    dtype: bool,
) -> int:
    """Checks what scales a branch and what it is added to; -> rows that share one entry of row_scale."""
    if layer_scale is not None:
        check_like("layer_scale", layer_scale, "x", x, (out_features,), "(out,)", dtype=dtype)
    if residual is not None and not (residual is x and x.shape[-1] == out_features):
        check_float("residual", residual)
        check_like("residual", residual, "x", x, (*x.shape[:-1], out_features), "(..., out)", dtype=False)
    return 1 if row_scale is None else rows_per_sample(x, row_scale)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    layer_scale: Tensor | None = None,
    row_scale: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """residual + row_scale * layer_scale * activation(x @ weight.T + bias), in one pass over the output.

    Args:
        x: (..., in), or (B, ..., in) with row_scale; float32, float16, bfloat16 or float64, any strides.
        weight: (out, in), x's dtype.
        bias: (out,), x's dtype, or None.
        activation: "gelu" (exact, by erf; Hendrycks and Gimpel 2016), "gelu_tanh" (its tanh approximation),
            "quick_gelu" (x * sigmoid(1.702 x)), "relu", "silu", or None.
        layer_scale: (out,) LayerScale's gamma (Touvron et al. 2021), x's dtype, or None.
        row_scale: (B,) one factor a sample, as DropPath draws them (Huang et al. 2016), or None. Not differentiated.
        residual: (..., out), or None. Its dtype may be wider than x's: a float32 stream behind a bfloat16 matmul.

    Returns:
        (..., out), contiguous, in the dtype that x and residual promote to. Under autocast x, weight and bias are
        cast to its dtype, and the output's dtype is what PyTorch gives for the formula.

    Raises:
        TypeError, ValueError: naming the argument, for dtypes, devices, shapes and activations that do not fit.
    """
    check_float("x", x)
    cast = autocast_dtype(x)
    check_linear(x, weight, bias, dtype=cast is None)
    rows = check_branch(x, weight.shape[0], layer_scale, row_scale, residual, dtype=cast is None)
    if activation is not None:
        check_activation(activation)
    if cast is not None:
        x, weight, bias = x.to(cast), weight.to(cast), None if bias is None else bias.to(cast)
    if not needs_autograd(x, weight, bias, layer_scale, residual):
        return _run(x, weight, bias, activation or "none", layer_scale, row_scale, residual, rows)
    if activation is None:
        return _Linear.apply(*distinct(x, weight, bias, layer_scale, row_scale, residual), rows)
    h = _LinearAct.apply(x, weight, bias, activation)[0]
    return _scale_and_add(h, layer_scale, row_scale, residual)
