"""A norm and the linear layers after it as one autograd node, which does not store the normalised rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastvit.ops.layer_norm.op import NO_RESIDUAL, NormTuple, Residual, layer_norm_fwd, norm_backward
from fastvit.ops.linear.op import check_linear
from fastvit.ops.runtime.autograd import (
    FusedFunction,
    autocast_dtype,
    cast_to,
    differentiable_once,
    needs_autograd,
    transforming,
    unviewed,
)
from fastvit.ops.runtime.checks import as_rows, check_float, check_norm
from fastvit.ops.runtime.dispatch import is_jit_tracing

NORM_NAMES = ("x", "norm_weight", "norm_bias")


def side_by_side(y: Tensor, layers: Sequence[Any]) -> Tensor:
    """Apply several layers, n weights and n biases, to y [..., in]; return their outputs next to each other, [...,
    out]."""
    weights, biases = layers[: len(layers) // 2], layers[len(layers) // 2 :]
    if torch.compiler.is_compiling() or transforming() or is_jit_tracing():
        # none of them takes out=; a compiler plans the buffer itself
        return torch.cat([F.linear(y, *layer) for layer in zip(weights, biases, strict=True)], dim=-1)
    widths, rows = [len(weight) for weight in weights], as_rows(y)
    out = y.new_empty(*y.shape[:-1], sum(widths))
    for columns, weight, bias in zip(as_rows(out).split(widths, dim=1), weights, biases, strict=True):
        if bias is None:
            torch.mm(rows, weight.t(), out=columns)
        else:
            torch.addmm(bias, rows, weight.t(), out=columns)
    return out


def layer_norm_linear_backward(
    dout: Tensor | Sequence[Tensor | None], residual: Residual, eps: float, rms: bool, wants: Sequence[bool],
    x: Any, norm_weight: Tensor, norm_bias: Tensor | None, mean: Any, rstd: Any, *weights: Tensor, backend: Any = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the wanted gradients, or None, and the residual's total. dout: the gradient of n layers' outputs next to
    each other, (..., out), or of each output, not all of them None. residual: for an x that is also the residual.
    wants: for x, the norm's weight and bias, n weights, n biases."""
    n = len(weights)
    douts: Any
    if isinstance(dout, Tensor):
        douts = as_rows(dout).split([len(weight) for weight in weights], dim=1) if n > 1 else (as_rows(dout),)
    else:
        douts = [part if part is None else as_rows(part) for part in dout]
        wants = [*wants[:3], *(want and part is not None for want, part in zip(wants[3:], [*douts] * 2, strict=True))]
    wants_weight, wants_bias = wants[3 : 3 + n], wants[3 + n :]
    dx: Any = None
    y: Any = None
    dnorm_weight = dnorm_bias = total = None
    if any(wants[:3]):
        dy: Any = None
        for part, weight in zip(douts, weights, strict=True):
            if part is not None:
                dy = part @ weight if dy is None else dy.addmm_(part, weight)
        dy = dy.view(x.shape)
        norm = x, mean, rstd, norm_weight, norm_bias
        dx, dnorm_weight, dnorm_bias, y, total = norm_backward(
            dy, *norm, residual, want_y=any(wants_weight), backend=backend
        )
        del dy
    elif any(wants_weight):
        y, *_ = layer_norm_fwd(x, norm_weight, norm_bias, eps, weights[0].dtype, rms, backend=backend)
    dweights = (part.t() @ as_rows(y) if wanted else None for part, wanted in zip(douts, wants_weight, strict=True))
    dbiases = (part.sum(0) if wanted else None for part, wanted in zip(douts, wants_bias, strict=True))
    return dx, dnorm_weight, dnorm_bias if wants[2] else None, *dweights, *dbiases, total


class _LayerNormLinear(FusedFunction):
    @staticmethod
    def forward(
        x: Tensor, norm_weight: Tensor, norm_bias: Tensor | None, eps: float, rms: bool, *layers: Any
    ) -> tuple[Tensor, ...]:
        y, mean, rstd = layer_norm_fwd(x, norm_weight, norm_bias, eps, layers[0].dtype, rms)
        out = unviewed(F.linear(y, *layers)) if len(layers) == 2 else side_by_side(y, layers)
        return out, mean, rstd

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, norm_weight, norm_bias, ctx.eps, ctx.rms, *layers = inputs
        *_, mean, rstd = output
        weights = layers[: len(layers) // 2]
        wants = ctx.needs_input_grad
        keep_x = any(wants[:3]) or any(wants[5 : 5 + len(weights)])
        mean = None if ctx.rms else mean
        ctx.save_for_backward(x if keep_x else None, norm_weight, norm_bias, mean, rstd, *weights)
        ctx.mark_non_differentiable(*output[-2:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, *_: Any) -> tuple[Any, ...]:
        wants = ctx.needs_input_grad
        if dout is None:
            return (None,) * len(wants)
        wants = (*wants[:3], *wants[5:])
        options = NO_RESIDUAL, ctx.eps, ctx.rms, wants
        dx, dnorm_weight, dnorm_bias, *dlayers, _ = differentiable_once(
            "layer_norm_linear", layer_norm_linear_backward, dout, *options, *ctx.saved_tensors
        )
        return dx, dnorm_weight, dnorm_bias, None, None, *dlayers


class _LayerNormLinears(_LayerNormLinear):
    """`_LayerNormLinear` with an output for each layer."""

    @staticmethod
    def forward(
        x: Tensor, norm_weight: Tensor, norm_bias: Tensor | None, eps: float, rms: bool, *layers: Any
    ) -> tuple[Tensor, ...]:
        y, mean, rstd = layer_norm_fwd(x, norm_weight, norm_bias, eps, layers[0].dtype, rms)
        n = len(layers) // 2
        return *(unviewed(F.linear(y, *layer)) for layer in zip(layers[:n], layers[n:], strict=True)), mean, rstd

    @staticmethod
    def backward(ctx: Any, *douts: Tensor | None) -> tuple[Any, ...]:
        wants, n = ctx.needs_input_grad, len(douts) - 2
        if all(dout is None for dout in douts[:n]):
            return (None,) * len(wants)
        wants = (*wants[:3], *wants[5:])
        dx, dnorm_weight, dnorm_bias, *dlayers, _ = differentiable_once(
            "layer_norm_linears", _layers_backward, n, ctx.eps, ctx.rms, wants, *douts[:n], *ctx.saved_tensors
        )
        return dx, dnorm_weight, dnorm_bias, None, None, *dlayers


def _layers_backward(n: int, eps: float, rms: bool, wants: Sequence[bool], *tensors: Any) -> tuple[Tensor | None, ...]:
    """Compute the gradients from those of n outputs and what is saved, passed flat: autograd looks for tensors among
    the arguments only."""
    return layer_norm_linear_backward(tensors[:n], NO_RESIDUAL, eps, rms, wants, *tensors[n:])


Weights = Tensor | Sequence[Tensor]
Biases = Tensor | Sequence[Tensor | None] | None


def norm_and_layers(x: Tensor, norm: NormTuple, weight: Weights, bias: Biases, names: tuple[str, str]) -> list[Any]:
    """Check a norm and the layers after it, under the caller's names for weight and bias. Return n weights and n
    biases, in autocast's dtype if there is one."""
    return cast_to(check_norm_and_layers(x, norm, weight, bias, names), *flat_layers(weight, bias))


def flat_layers(weight: Weights, bias: Biases) -> tuple[Any, ...]:
    """Return n weights and n biases, of one layer or of several."""
    weights: Sequence[Tensor] = (weight,) if isinstance(weight, Tensor) else weight
    biases: Sequence[Tensor | None] = (bias,) if isinstance(bias, Tensor) else bias or (None,) * len(weights)
    return *weights, *biases


def check_norm_and_layers(
    x: Tensor, norm: NormTuple, weight: Weights, bias: Biases, names: tuple[str, str]
) -> torch.dtype | None:
    """Check a norm and the layers after it; return autocast's dtype or None."""
    check_float("x", x)
    cast = autocast_dtype(x)
    weights: Sequence[Tensor] = (weight,) if isinstance(weight, Tensor) else weight
    biases: Sequence[Tensor | None] = (bias,) if isinstance(bias, Tensor) else bias or (None,) * len(weights)
    if not weights or len(weights) != len(biases):
        raise ValueError(
            f"{names[1]} must be one for each weight, or None, got {len(biases)} for {len(weights)} weights"
        )
    for i, (w, b) in enumerate(zip(weights, biases, strict=True)):
        of = "" if len(weights) == 1 else f"[{i}]"
        check_linear(x, w, b, dtype=cast is None, names=("x", names[0] + of, names[1] + of))
    check_norm(NORM_NAMES, x, *norm, "(in,)", dtype=cast is None)
    return cast


def layer_norm_linear(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor | None, weight: Weights, bias: Biases = None,
    *, eps: float = 1e-6, norm: str = "layer",
) -> Tensor:  # fmt: skip
    """Compute LayerNorm(x) @ weight.T + bias (Ba et al. 2016) as one autograd node, which saves x and the row
    statistics.

    The backward pass computes the normalised rows again, for the weight's gradient.

    Args:
        x: (..., in), float32, float16, bfloat16 or float64, any strides.
        norm_weight, norm_bias: (in,), x's dtype; the bias may be None.
        weight: (out, in), x's dtype; or several, whose outputs are next to each other in the result, such as q, k, v.
        bias: (out,), x's dtype, or None; for several weights as many, or None for none.
        eps: added to the variance; not negative.
        norm: "layer", or "rms" for RMSNorm as in `rms_norm`, without a bias.

    Returns:
        (..., out), contiguous, x's dtype; for several layers out is the sum. Under autocast x keeps its dtype, and
        weight, bias and output have autocast's, to which the LayerNorm's output is rounded.

    Raises:
        TypeError, ValueError: naming the argument, for dtypes, devices and shapes that do not fit.
    """
    layers = norm_and_layers(x, (norm_weight, norm_bias, eps, norm), weight, bias, ("weight", "bias"))
    arguments = x, norm_weight, norm_bias, eps, norm == "rms", *layers
    if needs_autograd("layer_norm_linear", x, norm_weight, norm_bias, *layers):
        return _LayerNormLinear.apply(*arguments)[0]
    return _LayerNormLinear.forward(*arguments)[0]


def layer_norm_linears(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor | None, weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None, *, eps: float = 1e-6, norm: str = "layer",
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute `layer_norm_linear` of several layers, with a tensor for each output: (..., out of that layer)."""
    layers = norm_and_layers(x, (norm_weight, norm_bias, eps, norm), weights, biases, ("weights", "biases"))
    arguments = x, norm_weight, norm_bias, eps, norm == "rms", *layers
    if needs_autograd("layer_norm_linears", x, norm_weight, norm_bias, *layers):
        return _LayerNormLinears.apply(*arguments)[:-2]
    return _LayerNormLinears.forward(*arguments)[:-2]
