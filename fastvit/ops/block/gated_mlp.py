"""MLPs with a gate as one autograd node, with or without the norm before it. `fastvit.ops.mlp` calls it.

residual + row_scale * layer_scale * drop(fc2(norm(drop(act(gate(y)) * value(y)))))        y = x or norm(x)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastvit.ops.block.norm_linear import NORM_NAMES, Biases, Weights, flat_layers, side_by_side
from fastvit.ops.dropout.op import draw_seeds, dropout_op
from fastvit.ops.layer_norm.op import NO_NORM, Norm, NormTuple, checked_norm, layer_norm_fwd, norm_backward
from fastvit.ops.linear.gated import gated_act, gated_act_bwd, gated_act_fwd, gated_dact, gated_fwd
from fastvit.ops.linear.op import check_linear, linear_fwd
from fastvit.ops.runtime.activations import GATED, check_activation
from fastvit.ops.runtime.autograd import FusedHalf, autocast_dtype, cast_to, consume_saved, needs_autograd
from fastvit.ops.runtime.checks import as_rows, check_dropout, check_float, check_norm, check_recompute
from fastvit.ops.runtime.dispatch import choose_backend
from fastvit.ops.runtime.epilogue import (
    Epilogue,
    EpilogueTuple,
    input_gradient_operands,
    parameter_gradients,
    product_over_rows,
    scale_samples,
    total_dtype,
    total_over_rows,
)
from fastvit.ops.runtime.plans import AFRESH, Plans, recall

InnerNorm = Norm | tuple[Tensor, Tensor | None, float]


class _Options(NamedTuple):
    name: str  # of the public function
    activation: str  # the gate's
    dropout_p: float
    keep_pre: bool  # gate and value
    keep_h: bool  # their product, after dropout
    cast: torch.dtype | None  # autocast's dtype
    dtype: torch.dtype  # of the matmuls
    eps: float
    rms: bool  # whether the norm is RMSNorm
    inner_eps: float
    inner_rms: bool
    residual_is_x: bool


def _halves(layers: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the gate's and the value's weight, and their biases, of one packed layer, gate first, or of two layers."""
    if len(layers) == 4:
        return layers
    weight, bias = layers
    return *weight.chunk(2), *((None, None) if bias is None else bias.chunk(2))


def _product(parts: tuple[Tensor, ...], weights: tuple[Tensor, ...], add: Tensor | None = None) -> Tensor:
    """Return add + the sum of parts @ weights, in rows."""
    out = parts[0] @ weights[0] if add is None else torch.addmm(as_rows(add), parts[0], weights[0])
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        out.addmm_(part, weight)
    return out


def _backward(saved: list[Any], dout: Tensor, o: _Options, wants: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    """Return the gradients, or None. wants: for x, the norm's weight and bias, the inner norm's, fc2's, layer_scale,
    then fc1's weights and its biases."""
    plans = recall("gated mlp backward", (dout, *saved), (*o, wants))
    backend = None if plans is AFRESH else plans
    x, norm_weight, norm_bias, inner_weight, inner_bias, fc2_weight, fc2_bias, layer_scale, row_scale, *rest = saved
    seeds, mean, rstd, inner_mean, inner_rstd, pre, h, *layers = rest
    saved.clear()
    del rest
    n = len(layers) // 2
    weights = tuple(layers[:n])
    want_layers, want_inner, want_fc2 = any(wants[:3]) or any(wants[8:]), any(wants[3:5]), wants[5] or wants[7]
    has_inner = inner_weight is not None
    want_dh = want_layers or (has_inner and want_inner)
    want_h = want_fc2 or (has_inner and want_dh)
    y: Any = x if norm_weight is None else None
    if seeds is None:
        g = scale_samples(dout.to(o.dtype), row_scale)
    else:
        g = dropout_op(dout.to(o.dtype), seeds[1:], o.dropout_p, None, row_scale)

    if pre is None and (want_layers or (want_h and h is None)):
        if y is None:
            y, *_ = layer_norm_fwd(x, norm_weight, norm_bias, o.eps, o.dtype, o.rms, backend=backend)
        pre = F.linear(y, *layers) if n == 1 else side_by_side(y, layers)
    dpre: Any = None
    dbias: Any = None
    dinner_weight = dinner_bias = None
    if want_layers and want_fc2 and h is None and seeds is None and not has_inner:
        dpre, h, dbias = gated_dact(
            *input_gradient_operands(g, fc2_weight, layer_scale), pre, o.activation, backend=backend
        )
    else:
        if want_h and h is None:
            h = gated_act(pre, o.activation, backend=backend)
            h = h if seeds is None else dropout_op(h, seeds[:1], o.dropout_p)
        dh: Any = None
        if want_dh:
            dh = torch.matmul(*input_gradient_operands(g, fc2_weight, layer_scale))
        if has_inner and want_dh:
            inner = inner_mean, inner_rstd, inner_weight, inner_bias
            dh, dinner_weight, dinner_bias, h, _ = norm_backward(dh, h, *inner, want_y=want_fc2, backend=backend)
        elif has_inner and want_fc2:
            h, *_ = layer_norm_fwd(h, inner_weight, inner_bias, o.inner_eps, o.dtype, o.inner_rms, backend=backend)
        if want_layers:
            dh = dh if seeds is None else dropout_op(dh, seeds[:1], o.dropout_p)
            dpre, dbias = gated_act_bwd(dh, pre, o.activation, backend=backend)
        del dh
    del pre
    of_fc2 = fc2_weight, fc2_bias, layer_scale, wants[5:8]
    G, dtype = product_over_rows(g, h, layer_scale, wants[5:8]), total_dtype(*of_fc2)
    # the pass that adds dout to the gradient of x also sums it over rows
    in_norm = dtype if o.residual_is_x and norm_weight is not None and any(wants[:3]) and seeds is None else None
    total = total_over_rows(g, dtype) if in_norm is None else None
    del h, g

    dx: Any = None
    dnorm_weight = dnorm_bias = None
    sizes = [weight.shape[0] for weight in weights]
    parts = as_rows(dpre).split(sizes, dim=1) if want_layers else ()
    if any(wants[:3]):
        dresidual = dout.to(o.dtype if x is None else x.dtype) if o.residual_is_x else None
        if norm_weight is None:
            dx = _product(parts, weights, dresidual)
            dx = dx.view(*dout.shape[:-1], dx.shape[-1])
        else:
            dy = _product(parts, weights).view(x.shape)
            norm = x, mean, rstd, norm_weight, norm_bias
            dx, dnorm_weight, dnorm_bias, y, dout_total = norm_backward(
                dy, *norm, (dresidual, row_scale, in_norm), y, want_y=any(wants[8 : 8 + n]), backend=backend
            )
            total = total if in_norm is None else dout_total
            del dy
    elif any(wants[8 : 8 + n]) and y is None:
        y, *_ = layer_norm_fwd(x, norm_weight, norm_bias, o.eps, o.dtype, o.rms, backend=backend)
    of_fc1: list[Tensor | None] = [None] * (2 * n)
    for i, wanted in enumerate(wants[8:]):
        if wanted:
            of_fc1[i] = parts[i].t() @ as_rows(y) if i < n else dbias.split(sizes)[i - n]
    plans.keep()
    dnorm_bias, dinner_bias = dnorm_bias if wants[2] else None, dinner_bias if wants[4] else None
    of_parameters = *parameter_gradients(G, total, *of_fc2), *of_fc1
    return dx, dnorm_weight, dnorm_bias, dinner_weight, dinner_bias, *of_parameters


class GatedMlp(FusedHalf):
    """residual + row_scale * layer_scale * mlp(norm(x)); both norms are optional, and the residual may be x."""

    @staticmethod
    def forward(
        x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None,
        inner_weight: Tensor | None, inner_bias: Tensor | None, fc2_weight: Tensor, fc2_bias: Tensor | None,
        layer_scale: Tensor | None, row_scale: Tensor | None, residual: Tensor | None,
        seeds: Tensor | None, o: _Options, plans: Plans | None, *layers: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Return the output, then mean and rstd, pre, the inner mean and rstd, and h as far as they exist:
        torch.compile takes no None among them."""
        y: Tensor = x
        extras: list[Tensor] = []
        backend: Any = plans
        if backend is None:
            parameters = norm_weight, norm_bias, inner_weight, inner_bias, fc2_weight, fc2_bias, *layers
            backend = choose_backend(x, *parameters, layer_scale, row_scale, residual)
        if norm_weight is not None:
            y, mean, rstd = layer_norm_fwd(x, norm_weight, norm_bias, o.eps, o.dtype, o.rms, backend=backend)
            extras += [mean, rstd]
        if o.keep_pre:
            h, pre = gated_act_fwd(y, *_halves(layers), o.activation, backend=backend)
            extras.append(pre)
        else:
            h = gated_fwd(y, *_halves(layers), o.activation, backend=backend)
        del y
        if seeds is not None:
            h = dropout_op(h, seeds[:1], o.dropout_p, backend=backend)
        normed = h
        if inner_weight is not None:
            inner = inner_weight, inner_bias, o.inner_eps, o.dtype, o.inner_rms
            normed, *statistics = layer_norm_fwd(h, *inner, backend=backend)
            extras += statistics
        epilogue = layer_scale, row_scale, x if o.residual_is_x else residual
        if seeds is None:
            out = linear_fwd(normed, fc2_weight, fc2_bias, "none", *epilogue, backend=backend)
        else:
            out = F.linear(normed, fc2_weight, fc2_bias)
            out = dropout_op(out, seeds[1:], o.dropout_p, *epilogue, backend=backend)
        return (out, *extras, h) if o.keep_h else (out, *extras)

    @staticmethod
    def cast(*inputs: Any) -> tuple[Any, ...]:
        """Cast x too if no norm reads it."""
        cast = inputs[11].cast
        if cast is None:
            return inputs
        x = inputs[0].to(cast) if inputs[1] is None else inputs[0]
        return x, *inputs[1:5], *cast_to(cast, *inputs[5:7]), *inputs[7:13], *cast_to(cast, *inputs[13:])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, norm_weight, norm_bias, inner_weight, *parameters, row_scale, residual, seeds, o, _ = inputs[:13]
        layers = inputs[13:]
        extras = iter(output[1:])
        mean, rstd = (None, None) if norm_weight is None else (next(extras), next(extras))
        pre = next(extras) if o.keep_pre else None
        inner_mean, inner_rstd = (None, None) if inner_weight is None else (next(extras), next(extras))
        wants = ctx.needs_input_grad
        want_layers, want_inner = any(wants[:3]) or any(wants[13:]), any(wants[3:5])
        want_dh = want_layers or want_inner
        want_h = wants[5] or wants[7] or (inner_weight is not None and want_dh)
        h = next(extras) if o.keep_h and want_h else None
        keep_pre = want_layers or (want_h and h is None)
        keep_x = any(wants[13 : 13 + len(layers) // 2]) or (norm_weight is not None and any(wants[:3]))
        mean, inner_mean = None if o.rms else mean, None if o.inner_rms else inner_mean
        if not want_dh:
            inner_mean = inner_rstd = None
        ctx.save_for_backward(
            x if keep_x or (keep_pre and pre is None) else None, norm_weight, norm_bias, inner_weight, *parameters,
            row_scale, seeds, mean, rstd, inner_mean, inner_rstd, pre if keep_pre else None, h, *layers,
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
        dresidual = dout.to(ctx.residual_dtype) if wants[9] else None
        wants = (*wants[:8], *wants[13:])
        gradients: tuple[Tensor | None, ...] = (None,) * len(wants)
        if any(wants):
            gradients = consume_saved(ctx, ctx.options.name, _backward, dout, ctx.options, wants)
        return *gradients[:8], None, dresidual, None, None, None, *gradients[8:]


def _checked_layers(x: Tensor, weight: Weights, bias: Biases, *, dtype: bool) -> tuple[int, tuple[Any, ...]]:
    """Check fc1; return hidden, and its weight and bias, or two weights and two biases."""
    if isinstance(weight, Tensor):
        check_linear(x, weight, bias, dtype=dtype, names=("x", "fc1_weight", "fc1_bias"))  # type: ignore[arg-type]
        if weight.shape[0] % 2:
            raise ValueError(f"fc1_weight must have 2 * hidden rows, of the gate and of the value, got {len(weight)}")
        return weight.shape[0] // 2, (weight, bias)
    if not isinstance(weight, list | tuple) or len(weight) != 2:
        raise TypeError(f"fc1_weight must be a tensor, or the gate's and the value's, got {_words(weight)}")
    biases = (None, None) if bias is None else bias
    if not isinstance(biases, list | tuple) or len(biases) != 2:
        raise TypeError(f"fc1_bias must be one for each of fc1_weight's two, or None, got {_words(bias)}")
    for i, (w, b) in enumerate(zip(weight, biases, strict=True)):
        check_linear(x, w, b, dtype=dtype, names=("x", f"fc1_weight[{i}]", f"fc1_bias[{i}]"))
    if weight[0].shape != weight[1].shape:
        raise ValueError(
            "fc1_weight must be two of (hidden, in), the gate's and the value's, "
            f"got {tuple(weight[0].shape)} and {tuple(weight[1].shape)}"
        )
    return weight[0].shape[0], (*weight, *biases)


def _words(value: Any) -> str:
    name = type(value).__name__
    return f"{name} of {len(value)}" if isinstance(value, list | tuple) else name


def _checked(
    name: str, x: Tensor, norm: NormTuple | None,
    fc1_weight: Weights, fc1_bias: Biases, fc2_weight: Tensor, fc2_bias: Tensor | None, inner_norm: InnerNorm | None,
    epilogue: EpilogueTuple, activation: str, dropout_p: float, recompute: str,
) -> tuple[bool, _Options]:  # fmt: skip
    """Check a call; return whether it needs autograd."""
    check_float("x", x)
    cast = autocast_dtype(x)
    like = cast is None
    if activation not in GATED:
        check_activation(activation, *GATED)
        raise ValueError(f"inner_norm must be None for the activation {activation!r}: it is for gated ones")
    hidden, layers = _checked_layers(x, fc1_weight, fc1_bias, dtype=like)
    check_linear(x, fc2_weight, fc2_bias, dtype=like, names=("x", "fc2_weight", "fc2_bias"), hidden=("hidden", hidden))
    if dropout_p != 0.0:
        check_dropout("dropout_p", dropout_p)
    check_recompute(recompute)
    branch = Epilogue(*epilogue)
    branch.check(x, fc2_weight.shape[0], dtype=like)
    if norm is not None:
        check_norm(NORM_NAMES, x, *norm, "(in,)", dtype=like)
    weight, bias, eps, kind = norm or NO_NORM
    inner = NO_NORM if inner_norm is None else checked_norm("inner_norm", x, inner_norm, "hidden", hidden, dtype=like)
    tensors = x, weight, bias, *inner[:2], fc2_weight, fc2_bias, branch.layer_scale, branch.residual, *layers
    autograd = needs_autograd(name, *tensors)
    options = _Options(
        name, GATED[activation], dropout_p, autograd and recompute != "all", autograd and recompute == "none",
        cast, cast or fc2_weight.dtype, eps, kind == "rms", inner[2], inner[3] == "rms",
        branch.residual is x and (cast in (None, x.dtype) or norm is not None),
    )  # fmt: skip
    return autograd, options


def gated_arguments(
    name: str, x: Tensor, norm: NormTuple | None,
    fc1_weight: Weights, fc1_bias: Biases, fc2_weight: Tensor, fc2_bias: Tensor | None, inner_norm: InnerNorm | None,
    epilogue: EpilogueTuple, activation: str, dropout_p: float, recompute: str,
) -> tuple[bool, tuple[Any, ...], Plans]:  # fmt: skip
    """Check a call of `fastvit.ops.<name>` with a gated activation, or with arguments that only those take. Return
    whether it needs autograd, the arguments of `GatedMlp`, and its plans."""
    layer_scale, row_scale, residual = epilogue
    weight, bias, eps, kind = norm or NO_NORM
    given = fc1_weight, fc1_bias, fc2_weight, fc2_bias, layer_scale, row_scale, None if residual is x else residual
    plans = recall(
        name, (x, weight, bias, *given, inner_norm), (residual is x, eps, kind, activation, dropout_p, recompute)
    )
    autograd, options = plans.plan(
        _checked, name, x, norm, fc1_weight, fc1_bias, fc2_weight, fc2_bias, inner_norm,
        epilogue, activation, dropout_p, recompute,
    )  # fmt: skip
    layers = flat_layers(fc1_weight, fc1_bias)
    inner = NO_NORM if inner_norm is None else Norm(*inner_norm)
    seeds = draw_seeds(2, x.device) if dropout_p else None
    residual = None if options.residual_is_x else residual  # torch.compile refuses one tensor as two inputs
    after = seeds, options, None if plans is AFRESH else plans
    tensors = x, weight, bias, *inner[:2], fc2_weight, fc2_bias, layer_scale, row_scale, residual
    return autograd, (*tensors, *after, *layers), plans
