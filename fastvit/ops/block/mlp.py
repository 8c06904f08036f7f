"""The transformer's MLP as one autograd node, with or without the norm before it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastvit.ops.block.gated_mlp import GatedMlp, InnerNorm, gated_arguments
from fastvit.ops.block.norm_linear import NORM_NAMES, Biases, Weights
from fastvit.ops.dropout.op import draw_seeds, dropout_op
from fastvit.ops.layer_norm.op import NO_NORM, NormTuple, layer_norm_fwd, norm_backward
from fastvit.ops.linear.op import act_bwd, check_linear, linear_act_fwd, linear_dact, linear_fwd
from fastvit.ops.runtime.activations import GATED, activate, check_activation
from fastvit.ops.runtime.autograd import FusedHalf, autocast_dtype, cast_to, consume_saved, needs_autograd, run
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


class _Options(NamedTuple):
    name: str  # of the public function
    activation: str
    dropout_p: float
    keep_pre: bool  # fc1's output
    keep_h: bool  # fc2's input
    cast: torch.dtype | None  # autocast's dtype
    dtype: torch.dtype  # of the matmuls
    eps: float
    rms: bool  # whether the norm is RMSNorm
    residual_is_x: bool


def _backward(saved: list[Any], dout: Tensor, o: _Options, wants: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    """Return gradients of x, the norm's, fc1's and fc2's weight and bias, and layer_scale; None if not wanted."""
    plans = recall("mlp backward", (dout, *saved), (*o, wants))
    backend = None if plans is AFRESH else plans
    x, norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias, *rest = saved
    layer_scale, row_scale, seeds, mean, rstd, pre, h = rest
    saved.clear()
    del rest
    want_hidden, want_h = any(wants[:5]), wants[5] or wants[7]
    y: Any = x if norm_weight is None else None
    if seeds is None:
        g = scale_samples(dout.to(o.dtype), row_scale)
    else:
        g = dropout_op(dout.to(o.dtype), seeds[1:], o.dropout_p, None, row_scale)

    if pre is None and (want_hidden or (want_h and h is None)):
        if y is None:
            y, *_ = layer_norm_fwd(x, norm_weight, norm_bias, o.eps, o.dtype, o.rms, backend=backend)
        pre = F.linear(y, fc1_weight, fc1_bias)
    dpre: Any = None
    dfc1_bias = None
    if want_hidden and want_h and h is None and seeds is None:
        dpre, h, dfc1_bias = linear_dact(
            *input_gradient_operands(g, fc2_weight, layer_scale), pre, o.activation, backend=backend
        )
    else:
        if want_hidden:
            dh = torch.matmul(*input_gradient_operands(g, fc2_weight, layer_scale))
            dh = dh if seeds is None else dropout_op(dh, seeds[:1], o.dropout_p)
            dpre, dfc1_bias = act_bwd(dh, pre, o.activation, backend=backend)
        if want_h and h is None:
            h = activate(pre, o.activation)
            h = h if seeds is None else dropout_op(h, seeds[:1], o.dropout_p)
    del pre
    of_fc2 = fc2_weight, fc2_bias, layer_scale, wants[5:8]
    G, dtype = product_over_rows(g, h, layer_scale, wants[5:8]), total_dtype(*of_fc2)
    # the pass that adds dout to the gradient of x also sums it over rows
    in_norm = dtype if o.residual_is_x and norm_weight is not None and any(wants[:3]) and seeds is None else None
    total = total_over_rows(g, dtype) if in_norm is None else None
    del h, g

    dx: Any = None
    dnorm_weight = dnorm_bias = dfc1_weight = None
    if any(wants[:3]):
        dresidual = dout.to(o.dtype if x is None else x.dtype) if o.residual_is_x else None
        if norm_weight is None and dresidual is not None:
            dx = torch.addmm(as_rows(dresidual), as_rows(dpre), fc1_weight).view(dout.shape)
        elif norm_weight is None:
            dx = dpre @ fc1_weight
        else:
            norm = x, mean, rstd, norm_weight, norm_bias
            dx, dnorm_weight, dnorm_bias, y, dout_total = norm_backward(
                dpre @ fc1_weight, *norm, (dresidual, row_scale, in_norm), y, want_y=wants[3], backend=backend
            )
            total = total if in_norm is None else dout_total
    elif wants[3] and y is None:
        y, *_ = layer_norm_fwd(x, norm_weight, norm_bias, o.eps, o.dtype, o.rms, backend=backend)
    if wants[3]:
        dfc1_weight = as_rows(dpre).t() @ as_rows(y)
    plans.keep()
    dnorm_bias, dfc1_bias = dnorm_bias if wants[2] else None, dfc1_bias if wants[4] else None
    return dx, dnorm_weight, dnorm_bias, dfc1_weight, dfc1_bias, *parameter_gradients(G, total, *of_fc2)


class _Mlp(FusedHalf):
    """residual + row_scale * layer_scale * mlp(norm(x)); the norm is optional, and the residual may be x."""

    @staticmethod
    def forward(
        x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None,
        fc1_weight: Tensor, fc1_bias: Tensor | None, fc2_weight: Tensor, fc2_bias: Tensor | None,
        layer_scale: Tensor | None, row_scale: Tensor | None, residual: Tensor | None,
        seeds: Tensor | None, o: _Options, plans: Plans | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Return the output, then mean and rstd, pre and h as far as they exist: torch.compile takes no None among
        them."""
        y: Tensor = x
        extras: list[Tensor] = []
        backend: Any = plans
        if backend is None:
            parameters = norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias
            backend = choose_backend(x, *parameters, layer_scale, row_scale, residual)
        if norm_weight is not None:
            y, mean, rstd = layer_norm_fwd(x, norm_weight, norm_bias, o.eps, o.dtype, o.rms, backend=backend)
            extras += [mean, rstd]
        if o.keep_pre:
            h, pre = linear_act_fwd(y, fc1_weight, fc1_bias, o.activation, backend=backend)
            extras.append(pre)
        else:
            h = linear_fwd(y, fc1_weight, fc1_bias, o.activation, backend=backend)
        del y
        epilogue = layer_scale, row_scale, x if o.residual_is_x else residual
        if seeds is None:
            out = linear_fwd(h, fc2_weight, fc2_bias, "none", *epilogue, backend=backend)
        else:
            h = dropout_op(h, seeds[:1], o.dropout_p, backend=backend)
            out = F.linear(h, fc2_weight, fc2_bias)
            out = dropout_op(out, seeds[1:], o.dropout_p, *epilogue, backend=backend)
        return (out, *extras, h) if o.keep_h else (out, *extras)

    @staticmethod
    def cast(*inputs: Any) -> tuple[Any, ...]:
        """Cast x too if no norm reads it."""
        cast = inputs[11].cast
        if cast is None:
            return inputs
        x, norm_weight, norm_bias, *layers = inputs[:7]
        x = x.to(cast) if norm_weight is None else x
        return x, norm_weight, norm_bias, *cast_to(cast, *layers), *inputs[7:]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, norm_weight, *parameters, row_scale, residual, seeds, o, _ = inputs
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
            None if o.rms else mean, rstd, pre if keep_pre else None, h,
        )  # fmt: skip
        ctx.options = o
        ctx.residual_dtype = None if residual is None else residual.dtype
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, *_: Any) -> tuple[Any, ...]:
        if dout is None:
            return (None,) * 13
        o, wants = ctx.options, ctx.needs_input_grad
        gradients = (None,) * 8
        if any(wants[:8]):
            gradients = consume_saved(ctx, o.name, _backward, dout, o, wants[:8])
        return *gradients, None, dout.to(ctx.residual_dtype) if wants[9] else None, None, None, None


def _checked(
    name: str, x: Tensor, norm: NormTuple | None,
    fc1_weight: Any, fc1_bias: Any, fc2_weight: Tensor, fc2_bias: Tensor | None,
    epilogue: EpilogueTuple, activation: str, dropout_p: float, recompute: str,
) -> tuple[bool, _Options]:  # fmt: skip
    """Check a call; return whether it needs autograd."""
    check_float("x", x)
    check_activation(activation, *GATED)
    cast = autocast_dtype(x)
    check_linear(x, fc1_weight, fc1_bias, dtype=cast is None, names=("x", "fc1_weight", "fc1_bias"))
    hidden = "hidden", fc1_weight.shape[0]
    check_linear(x, fc2_weight, fc2_bias, dtype=cast is None, names=("x", "fc2_weight", "fc2_bias"), hidden=hidden)
    if dropout_p != 0.0:
        check_dropout("dropout_p", dropout_p)
    check_recompute(recompute)
    branch = Epilogue(*epilogue)
    branch.check(x, fc2_weight.shape[0], dtype=cast is None)
    if norm is not None:
        check_norm(NORM_NAMES, x, *norm, "(in,)", dtype=cast is None)
    weight, bias, eps, kind = norm or NO_NORM
    tensors = x, weight, bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias, branch.layer_scale, branch.residual
    autograd = needs_autograd(name, *tensors)
    options = _Options(
        name, activation, dropout_p, autograd and recompute != "all", autograd and recompute == "none",
        cast, cast or fc1_weight.dtype, eps, kind == "rms",
        branch.residual is x and (cast in (None, x.dtype) or norm is not None),
    )  # fmt: skip
    return autograd, options


def _arguments(
    name: str, x: Tensor, norm: NormTuple | None,
    fc1_weight: Any, fc1_bias: Any, fc2_weight: Tensor, fc2_bias: Tensor | None,
    epilogue: EpilogueTuple, activation: str, dropout_p: float, recompute: str,
) -> tuple[bool, tuple[Any, ...], Plans]:  # fmt: skip
    """Check a call of the op of that name; return whether it needs autograd, the arguments of `_Mlp`, and its plans."""
    layer_scale, row_scale, residual = epilogue
    weight, bias, eps, kind = norm or NO_NORM
    parameters: tuple[Tensor | None, ...] = fc1_weight, fc1_bias, fc2_weight, fc2_bias
    plans = recall(
        name,
        (x, weight, bias, *parameters, layer_scale, row_scale, None if residual is x else residual),
        (residual is x, eps, kind, activation, dropout_p, recompute),
    )
    autograd, options = plans.plan(_checked, name, x, norm, *parameters, epilogue, activation, dropout_p, recompute)
    residual = None if options.residual_is_x else residual  # torch.compile refuses one tensor as two inputs
    arguments = x, weight, bias, *parameters, layer_scale, row_scale, residual
    seeds = draw_seeds(2, x.device) if dropout_p else None
    return autograd, (*arguments, seeds, options, None if plans is AFRESH else plans), plans


def mlp(
    x: Tensor,
    fc1_weight: Weights, fc1_bias: Biases, fc2_weight: Tensor, fc2_bias: Tensor | None,
    *, activation: str = "gelu", dropout_p: float = 0.0,
    layer_scale: Tensor | None = None, row_scale: Tensor | None = None, residual: Tensor | None = None,
    recompute: str = "activation", inner_norm: InnerNorm | None = None,
) -> Tensor:  # fmt: skip
    """Compute residual + row_scale * layer_scale * drop(fc2(drop(act(fc1(x))))), the MLP of Vaswani et al. 2017,
    section 3.3.

    With a gated activation (Shazeer 2020, arXiv:2002.05202) act(fc1(x)) is act(gate) * value. Gate and value are linear
    layers of x, each of the hidden size.

    Args:
        x: (..., in), or (B, ..., in) with row_scale; float32, float16, bfloat16 or float64, any strides.
        fc1_weight, fc1_bias: (hidden, in) and (hidden,), x's dtype; the bias may be None. If gated, (2 * hidden, in)
            and (2 * hidden,), the gate's rows first; or pairs of (hidden, in) and (hidden,), the gate's and the
            value's, which may be views of a packed layer that has them in the other order.
        fc2_weight, fc2_bias: (out, hidden) and (out,), x's dtype; the bias may be None.
        activation: "gelu" (exact, by erf; Hendrycks and Gimpel 2016), "gelu_tanh", "quick_gelu", "relu" or "silu";
            gated: "swiglu" (silu of the gate) or "geglu" (exact gelu of it).
        dropout_p: probability of zero, in [0, 1), after the activation and after fc2. Pass 0 in evaluation.
        layer_scale: (out,) LayerScale's gamma (Touvron et al. 2021), x's dtype, or None.
        row_scale: (B,) one factor a sample, as DropPath draws them (Huang et al. 2016), or None. Not differentiated.
        residual: (..., out), or None. Its dtype may be wider than x's.
        recompute: what the backward pass computes again. "none" saves x, the pre-activation and the activation;
            "activation" saves x and the pre-activation; "all" saves x. If gated, the pre-activation is gate and value.
        inner_norm: a norm over hidden between activation and fc2, as in EVA-02 (Fang et al. 2023, arXiv:2303.11331), or
            None; weight and bias are (hidden,), x's dtype. Gated activations only.

    Returns:
        (..., out), contiguous, in the dtype that x and residual promote to. Under autocast x, weights and biases are
        cast to its dtype, and the output's dtype is what PyTorch gives for the formula.

    Raises:
        TypeError, ValueError: naming the argument, for dtypes, devices, shapes and names that do not fit.
    """
    epilogue = layer_scale, row_scale, residual
    if inner_norm is not None or activation in GATED:
        autograd, arguments, plans = gated_arguments(
            "mlp", x, None, fc1_weight, fc1_bias, fc2_weight, fc2_bias, inner_norm,
            epilogue, activation, dropout_p, recompute,
        )  # fmt: skip
        out: Tensor = run(GatedMlp, autograd, *arguments)
        plans.keep()
        return out
    autograd, arguments, plans = _arguments(
        "mlp", x, None, fc1_weight, fc1_bias, fc2_weight, fc2_bias, epilogue, activation, dropout_p, recompute
    )
    out = run(_Mlp, autograd, *arguments)
    plans.keep()
    return out


def layer_norm_mlp(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor | None,
    fc1_weight: Weights, fc1_bias: Biases, fc2_weight: Tensor, fc2_bias: Tensor | None,
    *, eps: float = 1e-6, norm: str = "layer", activation: str = "gelu", dropout_p: float = 0.0,
    layer_scale: Tensor | None = None, row_scale: Tensor | None = None, residual: Tensor | None = None,
    recompute: str = "activation", inner_norm: InnerNorm | None = None,
) -> Tensor:  # fmt: skip
    """Compute `mlp` of LayerNorm(x) as one autograd node. It saves x, the row statistics and what `recompute` says; the
    backward pass computes the normalised rows again.

    Args:
        x: (..., in), as in `mlp`. Its dtype may differ from the other arguments' under autocast only.
        norm_weight, norm_bias: (in,), x's dtype; the bias may be None.
        fc1_weight, fc1_bias, fc2_weight, fc2_bias: as in `mlp`.
        activation, dropout_p, layer_scale, row_scale, recompute, inner_norm: as in `mlp`.
        eps: added to the variance; not negative.
        norm: "layer", or "rms" for RMSNorm as in `rms_norm`, without a bias.
        residual: (..., out), or None. When it is x itself, its gradient joins inside the LayerNorm's backward pass.

    Returns:
        (..., out), contiguous, as in mlp. Under autocast the LayerNorm's output is rounded to autocast's dtype.

    Raises:
        TypeError, ValueError: naming the argument, for dtypes, devices, shapes and names that do not fit.
    """
    before, epilogue = (norm_weight, norm_bias, eps, norm), (layer_scale, row_scale, residual)
    if inner_norm is not None or activation in GATED:
        autograd, arguments, plans = gated_arguments(
            "layer_norm_mlp", x, before, fc1_weight, fc1_bias, fc2_weight, fc2_bias, inner_norm,
            epilogue, activation, dropout_p, recompute,
        )  # fmt: skip
        out: Tensor = run(GatedMlp, autograd, *arguments)
        plans.keep()
        return out
    autograd, arguments, plans = _arguments(
        "layer_norm_mlp", x, before, fc1_weight, fc1_bias, fc2_weight, fc2_bias,
        epilogue, activation, dropout_p, recompute,
    )  # fmt: skip
    out = run(_Mlp, autograd, *arguments)
    plans.keep()
    return out
