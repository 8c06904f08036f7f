"""Linear layer with a fused epilogue: registration, gradient, checks, public function."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fastvit.ops.linear import aten
from fastvit.ops.runtime import decompositions
from fastvit.ops.runtime.activations import check_activation
from fastvit.ops.runtime.autograd import (
    FusedFunction,
    autocast_dtype,
    consume_saved,
    differentiable_once,
    needs_autograd,
    repeats_as_views,
)
from fastvit.ops.runtime.checks import as_rows, check_float, check_like
from fastvit.ops.runtime.epilogue import (
    Epilogue,
    input_gradient_operands,
    parameter_gradients,
    product_over_rows,
    scale_samples,
    total_dtype,
    total_over_rows,
)
from fastvit.ops.runtime.registry import register

# ---- registered ops, on [..., D] of any strides; results are contiguous ----


def _fwd_fake(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, *epilogue: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0], dtype=Epilogue(*epilogue).dtype(x))


def _act_fwd_fake(x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    h, pre = (x.new_empty(*x.shape[:-1], weight.shape[0]) for _ in range(2))
    return h, pre


def _dact_fake(dy: Tensor, weight: Tensor, pre: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    return pre.new_empty(pre.shape), *_act_bwd_fake(dy, pre, activation)


def _act_bwd_fake(dy: Tensor, pre: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    return pre.new_empty(pre.shape), pre.new_empty(pre.shape[-1])


def _fwd_flops(x: Any, weight: Any, *_: Any, **__: Any) -> int:
    return int(2 * math.prod(x) * weight[0])


def _dact_flops(dy: Any, weight: Any, *_: Any, **__: Any) -> int:
    return int(2 * math.prod(dy) * weight[1])


linear_fwd = register(
    "linear_fwd(Tensor x, Tensor weight, Tensor? bias, str activation, Tensor? layer_scale=None,"
    " Tensor? row_scale=None, Tensor? residual=None) -> Tensor",
    aten=aten.linear_fwd, launch="linear.launch", planned=True, fake=_fwd_fake, flops=_fwd_flops,
    decomposition=decompositions.linear_fwd,
)  # fmt: skip
linear_act_fwd = register(
    "linear_act_fwd(Tensor x, Tensor weight, Tensor? bias, str activation) -> (Tensor h, Tensor pre)",
    aten=aten.linear_act_fwd, launch="linear.launch", planned=True, fake=_act_fwd_fake, flops=_fwd_flops,
    decomposition=decompositions.linear_act_fwd,
)  # fmt: skip
linear_dact = register(
    "linear_dact(Tensor dy, Tensor weight, Tensor pre, str activation) -> (Tensor dpre, Tensor h, Tensor dbias)",
    aten=aten.linear_dact, launch="linear.launch", planned=True, fake=_dact_fake, flops=_dact_flops,
)  # fmt: skip
act_bwd = register(
    "act_bwd(Tensor dy, Tensor pre, str activation) -> (Tensor dpre, Tensor dbias)",
    aten=aten.act_bwd,
    launch="linear.launch",
    planned=True,
    fake=_act_bwd_fake,
)


# ---- gradients ----


def _backward(
    dy: Tensor, x: Tensor | None, weight: Tensor, bias: Tensor | None, layer_scale: Tensor | None,
    row_scale: Tensor | None, wants: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return gradients of x, weight, bias and layer_scale; None if not wanted."""
    g = scale_samples(dy.to(weight.dtype), row_scale)
    dx = torch.matmul(*input_gradient_operands(g, weight, layer_scale)) if wants[0] else None
    of_parameters = weight, bias, layer_scale, wants[1:]
    G, total = product_over_rows(g, x, layer_scale, wants[1:]), total_over_rows(g, total_dtype(*of_parameters))
    return dx, *parameter_gradients(G, total, *of_parameters)


class _Linear(FusedFunction):
    """residual + row_scale * layer_scale * (x @ weight.T + bias)"""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *epilogue: Tensor | None) -> Any:
        return linear_fwd(x, weight, bias, "none", *epilogue)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, bias, layer_scale, row_scale, residual = inputs
        _, needs_weight, _, needs_scale, *_ = ctx.needs_input_grad
        ctx.save_for_backward(
            x if needs_weight or needs_scale else None, weight, bias if needs_scale else None, layer_scale, row_scale
        )
        ctx.residual_dtype = None if residual is None else residual.dtype

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        wants = ctx.needs_input_grad
        gradients = (None,) * 4
        if any(wants[:4]):
            gradients = differentiable_once("linear", _backward, dy, *ctx.saved_tensors, wants[:4])
        return *gradients, None, dy.to(ctx.residual_dtype) if wants[5] else None


def _act_backward(saved: list[Any], dy: Tensor, activation: str, wants: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    """Return gradients of x, weight and bias; None if not wanted."""
    x, weight = saved[:2]
    dpre, dbias = act_bwd(dy, saved.pop(), activation)  # frees pre
    dx = dpre @ weight if wants[0] else None
    return dx, None if x is None else as_rows(dpre).t() @ as_rows(x), dbias if wants[2] else None


class _LinearAct(FusedFunction):
    """activation(x @ weight.T + bias)"""

    @staticmethod
    def forward(*inputs: Any) -> Any:
        return linear_act_fwd(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, _, ctx.activation = inputs
        _, pre = output
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, pre)
        ctx.mark_non_differentiable(pre)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dpre: None) -> tuple[Any, ...]:
        if dy is None:
            return None, None, None, None
        wants = ctx.needs_input_grad[:3]
        return *consume_saved(ctx, "linear", _act_backward, dy, ctx.activation, wants), None


def _scale_and_add(h: Tensor, epilogue: Epilogue) -> Tensor:
    """Return residual + row_scale * layer_scale * h, differentiable. No ViT scales an activation, so a fused gradient
    of the combination is not worth its code."""
    layer_scale, row_scale, residual = epilogue
    if layer_scale is not None:
        h = h * layer_scale
    if row_scale is not None:
        h = h * row_scale.to(h.dtype).view(-1, *(1,) * (h.dim() - 1))
    return h if residual is None else residual + h


def check_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, dtype: bool, names: tuple[str, ...] = ("x", "weight", "bias"),
    hidden: tuple[str, int] | None = None,
) -> None:  # fmt: skip
    """Check x (..., in), a float tensor, weight (out, in), and bias (out,) or None, under the caller's names for them.
    hidden: the input's size, in words and as a number, for a layer that does not read x itself."""
    x_name, weight_name, bias_name = names
    shape = weight.shape if isinstance(weight, Tensor) else ()
    matrix = weight_name, weight, None, ""
    if bias is None:
        check_like(x_name, x, matrix, dtype=dtype)
    else:
        check_like(x_name, x, matrix, (bias_name, bias, shape[:1] if len(shape) == 2 else None, "(out,)"), dtype=dtype)
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"{weight_name} must be (out, in) with out, in >= 1, got shape {tuple(shape)}")
    if hidden is not None:
        if shape[1] != hidden[1]:
            words, number = hidden
            raise ValueError(
                f"{weight_name} must have shape (out, {words}) with {words} = {number}, got {tuple(shape)}"
            )
    elif x.dim() == 0 or x.shape[-1] != shape[1]:
        raise ValueError(
            f"{x_name} must have shape (..., in) with {weight_name}'s in = {shape[1]}, got {tuple(x.shape)}"
        )


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = None,
    layer_scale: Tensor | None = None, row_scale: Tensor | None = None, residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute residual + row_scale * layer_scale * activation(x @ weight.T + bias), in one pass over the output.

    Args:
        x: (..., in), or (B, ..., in) with row_scale; float32, float16, bfloat16 or float64, any strides.
        weight: (out, in), x's dtype.
        bias: (out,), x's dtype, or None.
        activation: "gelu" (exact, by erf; Hendrycks and Gimpel 2016), "gelu_tanh" (its tanh approximation),
            "quick_gelu" (x * sigmoid(1.702 x)), "relu", "silu", or None.
        layer_scale: (out,) LayerScale's gamma (Touvron et al. 2021), x's dtype, or None.
        row_scale: (B,) one factor a sample, as DropPath draws them (Huang et al. 2016), or None. Not differentiated.
        residual: (..., out), or None. Its dtype may be wider than x's: a float32 stream after a bfloat16 matmul.

    Returns:
        (..., out), contiguous, in the dtype that x and residual promote to. Under autocast x, weight and bias are
        cast to its dtype, and the output's dtype is what PyTorch gives for the formula.

    Raises:
        TypeError, ValueError: naming the argument, for dtypes, devices, shapes and activations that do not fit.
    """
    check_float("x", x)
    cast = autocast_dtype(x)
    check_linear(x, weight, bias, dtype=cast is None)
    epilogue = Epilogue(layer_scale, row_scale, residual)
    epilogue.check(x, weight.shape[0], dtype=cast is None)
    if activation is not None:
        check_activation(activation)
    if cast is not None:
        x, weight, bias = x.to(cast), weight.to(cast), None if bias is None else bias.to(cast)
    if not needs_autograd("linear", x, weight, bias, layer_scale, residual):
        return linear_fwd(x, weight, bias, activation or "none", *epilogue)
    if activation is None:
        return _Linear.apply(*repeats_as_views(x, weight, bias, *epilogue))
    return _scale_and_add(_LinearAct.apply(x, weight, bias, activation)[0], epilogue)
