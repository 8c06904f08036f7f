"""Linear layer with a fused epilogue, plain or gated: registration, gradient, checks, public function."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastvit.ops.linear import aten
from fastvit.ops.runtime.activations import check_activation
from fastvit.ops.runtime.autograd import Computed, FusedNode, inputs, needs_autograd
from fastvit.ops.runtime.backend import Route
from fastvit.ops.runtime.checks import check_float, check_like
from fastvit.ops.runtime.dtypes import autocast_dtype
from fastvit.ops.runtime.epilogue import Epilogue, LastLayer, scale_samples
from fastvit.ops.runtime.registry import register
from fastvit.ops.runtime.rows import as_rows
from fastvit.ops.runtime.run import Prepared, run

# ---- registered ops, on [..., D] of any strides; results are contiguous ----
#
# With a value_weight a layer is gated: h = activation(gate) * value, and weight and bias are the gate's. `pre` is the
# activation's input. If gated it is gate and value next to each other, (..., 2 * hidden); ops that take it tell by its
# width.


def _fwd_fake(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, *others: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0], dtype=Epilogue(*others[:3]).dtype(x))


def _act_fwd_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, value_weight: Tensor | None = None, *_: Any
) -> tuple[Tensor, Tensor]:
    hidden = weight.shape[0]
    width = hidden if value_weight is None else 2 * hidden
    return x.new_empty(*x.shape[:-1], hidden), x.new_empty(*x.shape[:-1], width)


def _gated_act_fake(pre: Tensor, activation: str) -> Tensor:
    return pre.new_empty(*pre.shape[:-1], pre.shape[-1] // 2)


def _dact_fake(dy: Tensor, weight: Tensor, pre: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    dpre, dbias = _act_bwd_fake(dy, pre, activation)
    return dpre, pre.new_empty(*pre.shape[:-1], weight.shape[1]), dbias


def _act_bwd_fake(dh: Tensor, pre: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    return pre, pre.new_empty(pre.shape[-1])


def _fwd_flops(
    x: Any, weight: Any, bias: Any, activation: str, layer_scale: Any = None, row_scale: Any = None,
    residual: Any = None, value_weight: Any = None, *_: Any, **__: Any,
) -> int:  # fmt: skip
    return _act_fwd_flops(x, weight, bias, activation, value_weight)


def _act_fwd_flops(
    x: Any, weight: Any, bias: Any, activation: str, value_weight: Any = None, *_: Any, **__: Any
) -> int:
    return int((2 if value_weight is None else 4) * math.prod(x) * weight[0])


def _dact_flops(dy: Any, weight: Any, *_: Any, **__: Any) -> int:
    return int(2 * math.prod(dy) * weight[1])


linear_fwd = register(
    "linear_fwd(Tensor x, Tensor weight, Tensor? bias, str activation, Tensor? layer_scale=None,"
    " Tensor? row_scale=None, Tensor? residual=None, Tensor? value_weight=None, Tensor? value_bias=None) -> Tensor",
    aten=aten.linear_fwd, fake=_fwd_fake, flops=_fwd_flops,
    plain=aten.plain,
)  # fmt: skip
linear_act_fwd = register(
    "linear_act_fwd(Tensor x, Tensor weight, Tensor? bias, str activation, Tensor? value_weight=None,"
    " Tensor? value_bias=None) -> (Tensor h, Tensor pre)",
    aten=aten.linear_act_fwd, fake=_act_fwd_fake, flops=_act_fwd_flops,
    plain=aten.plain_act,
)  # fmt: skip
gated_act = register(
    "gated_act(Tensor pre, str activation) -> Tensor",
    aten=aten.gated_act,
    fake=_gated_act_fake,
)
linear_dact = register(
    "linear_dact(Tensor dy, Tensor weight, Tensor pre, str activation) -> (Tensor dpre, Tensor h, Tensor dbias)",
    aten=aten.linear_dact, fake=_dact_fake, flops=_dact_flops,
)  # fmt: skip
act_bwd = register(
    "act_bwd(Tensor dh, Tensor pre, str activation) -> (Tensor dpre, Tensor dbias)",
    aten=aten.act_bwd,
    fake=_act_bwd_fake,
)


# ---- gradients ----


class _Options(NamedTuple):
    op: str
    activation: str
    cast: torch.dtype | None  # autocast's dtype
    residual_dtype: torch.dtype | None


class _Linear(FusedNode):
    """residual + row_scale * layer_scale * (x @ weight.T + bias); without a gradient also with an activation."""

    Inputs = inputs("x", "weight", "bias", "layer_scale", "row_scale", "residual")
    casts = ("x", "weight", "bias")
    saved = ("x", "weight", "bias", "layer_scale", "row_scale")

    @staticmethod
    def compute(t: Any) -> Computed:
        o, route, x, weight, bias, layer_scale, row_scale, residual = t
        return (linear_fwd(x, weight, bias, o.activation, layer_scale, row_scale, residual, route=route),), {}

    @staticmethod
    def needed(t: Any, intermediates: dict[str, Any], needs_grad: Any) -> dict[str, bool]:
        return {"x": needs_grad.weight or needs_grad.layer_scale, "bias": needs_grad.layer_scale}

    @staticmethod
    def gradients(s: dict[str, Any], douts: Any, o: _Options, needs_grad: Any, route: Route) -> dict[str, Any]:
        (dout,) = douts
        by_name = {"residual": dout.to(o.residual_dtype) if needs_grad.residual else None}
        if not (needs_grad.x or needs_grad.weight or needs_grad.bias or needs_grad.layer_scale):
            return by_name
        layer = LastLayer(
            s["weight"], s["bias"], s["layer_scale"], needs_grad.weight, needs_grad.bias, needs_grad.layer_scale
        )
        g = scale_samples(dout.to(layer.weight.dtype), s["row_scale"])
        dx = torch.matmul(*layer.input_operands(g)) if needs_grad.x else None
        dweight, dbias, dlayer_scale = layer.gradients(layer.product(g, s["x"]), layer.total(g))
        return by_name | {"x": dx, "weight": dweight, "bias": dbias, "layer_scale": dlayer_scale}


class _LinearAct(FusedNode):
    """activation(x @ weight.T + bias)"""

    Inputs = inputs("x", "weight", "bias")
    casts = ("x", "weight", "bias")
    intermediates = ("pre",)
    saved = ("x", "weight", "pre")

    @staticmethod
    def compute(t: Any) -> Computed:
        h, pre = linear_act_fwd(t.x, t.weight, t.bias, t.options.activation, route=t.route)
        return (h,), {"pre": pre}

    @staticmethod
    def needed(t: Any, intermediates: dict[str, Any], needs_grad: Any) -> dict[str, bool]:
        return {"x": needs_grad.weight}

    @staticmethod
    def gradients(s: dict[str, Any], douts: Any, o: _Options, needs_grad: Any, route: Route) -> dict[str, Any]:
        dpre, dbias = act_bwd(*douts, s.pop("pre"), o.activation, route=route)
        return {
            "x": dpre @ s["weight"] if needs_grad.x else None,
            "weight": as_rows(dpre).t() @ as_rows(s["x"]) if needs_grad.weight else None,
            "bias": dbias if needs_grad.bias else None,
        }


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
    tensors = x, weight, bias, layer_scale, row_scale, residual
    has_both = activation is not None and any([t is not None for t in tensors[3:]])
    if has_both and torch.is_grad_enabled() and _prepared(*tensors, activation)[1]:
        return _scale_and_add(linear(x, weight, bias, activation=activation), Epilogue(*tensors[3:]))
    out: Tensor = run("linear", _prepared, tensors, (activation,))
    return out


def _prepared(
    x: Tensor, weight: Tensor, bias: Tensor | None, layer_scale: Tensor | None, row_scale: Tensor | None,
    residual: Tensor | None, activation: str | None,
) -> Prepared:  # fmt: skip
    check_float("x", x)
    cast = autocast_dtype(x)
    check_linear(x, weight, bias, dtype=cast is None)
    epilogue = layer_scale, row_scale, residual
    Epilogue(*epilogue).check(x, weight.shape[0], dtype=cast is None)
    if activation is not None:
        check_activation(activation)
    options = _Options("linear", activation or "none", cast, None if residual is None else residual.dtype)
    autograd = needs_autograd("linear", x, weight, bias, layer_scale, residual)
    if autograd and activation is not None:
        return _LinearAct, True, options, (x, weight, bias)
    return _Linear, autograd, options, (x, weight, bias, *epilogue)
