"""A norm and the linear layers after it as one autograd node, which does not store the normalised rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastvit.ops.layer_norm.op import NormTuple, Residual, layer_norm_fwd, norm_backward
from fastvit.ops.linear import aten
from fastvit.ops.linear.op import check_linear
from fastvit.ops.runtime.autograd import Computed, FusedNode, needs_autograd, transforming, unviewed
from fastvit.ops.runtime.backend import Route, is_jit_tracing
from fastvit.ops.runtime.checks import check_float, check_norm
from fastvit.ops.runtime.dtypes import autocast_dtype
from fastvit.ops.runtime.rows import as_rows
from fastvit.ops.runtime.run import Prepared, run

NORM_NAMES = "norm_weight", "norm_bias", "eps", "norm"


def side_by_side(y: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
    """Apply several layers to y as `aten.side_by_side` does."""
    if torch.compiler.is_compiling() or transforming() or is_jit_tracing():
        # none of them takes out=; a compiler plans the buffer itself
        return torch.cat([F.linear(y, *layer) for layer in zip(weights, biases, strict=True)], dim=-1)
    return aten.side_by_side(y, weights, biases)


def by_layer(x: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the parts of x (..., out) that belong to these layers, whose outputs are next to each other."""
    return (x,) if len(weights) == 1 else x.split([len(weight) for weight in weights], dim=-1)


def norm_linear_backward(
    s: dict[str, Any], o: Any, douts: Sequence[Tensor | None], weights: Sequence[Tensor], residual: Residual,
    needs_grad: Any, wants_weights: Sequence[bool], wants_biases: Sequence[bool], route: Route,
) -> tuple[dict[str, Any], list[Tensor | None], list[Tensor | None], Tensor | None]:  # fmt: skip
    """Compute the backward pass of a norm and the layers after it. Return the wanted gradients, or None: of x and the
    norm by name, of weights and of biases; and the residual's total.

    s: x, norm_weight, norm_bias, mean and rstd, None where no gradient needs them. o: options with the norm's eps and
    rms. douts: for each layer the gradient of its output, as rows; not all are None. residual: for an x that is also
    the residual. needs_grad: of x, norm_weight and norm_bias."""
    x, norm = s["x"], (s["norm_weight"], s["norm_bias"])
    wants_weights = [want and dout is not None for want, dout in zip(wants_weights, douts, strict=True)]
    y: Any = None
    of_norm: dict[str, Any] = {}
    total = None
    if needs_grad.x or needs_grad.norm_weight or needs_grad.norm_bias:
        dy: Any = None
        for dout, weight in zip(douts, weights, strict=True):
            if dout is not None:
                dy = dout @ weight if dy is None else dy.addmm_(dout, weight)
        dx, dnorm_weight, dnorm_bias, y, total = norm_backward(
            dy.view(x.shape), x, s["mean"], s["rstd"], *norm, residual, want_y=any(wants_weights), route=route
        )
        del dy
        of_norm = {"x": dx, "norm_weight": dnorm_weight, "norm_bias": dnorm_bias if needs_grad.norm_bias else None}
    elif any(wants_weights):
        y, *_ = layer_norm_fwd(x, *norm, o.eps, weights[0].dtype, o.rms, route=route)
    dweights: list[Tensor | None] = [None] * len(weights)
    dbiases: list[Tensor | None] = [None] * len(weights)
    for i, dout in enumerate(douts):
        if dout is not None and wants_weights[i]:
            dweights[i] = dout.t() @ as_rows(y)
        if dout is not None and wants_biases[i]:
            dbiases[i] = dout.sum(0)
    return of_norm, dweights, dbiases, total


class _Options(NamedTuple):
    op: str
    eps: float
    rms: bool
    cast: torch.dtype | None  # autocast's dtype, for the layers


class _Inputs(NamedTuple):
    options: _Options
    route: Route
    x: Tensor
    norm_weight: Tensor
    norm_bias: Tensor | None
    layers: tuple[Any, ...]  # n weights, then n biases


def _halves(layers: tuple[Any, ...]) -> tuple[Any, Any]:
    """Return the weights and the biases, or what belongs to them."""
    n = len(layers) // 2
    return layers[:n], layers[n:]


class _LayerNormLinear(FusedNode):
    """The layers' outputs, or for layer_norm_linear one next to the other."""

    Inputs = _Inputs
    variadic = True
    single = False
    casts = ("layers",)
    intermediates = ("mean", "rstd")
    saved = ("x", "norm_weight", "norm_bias", "mean", "rstd")

    @staticmethod
    def compute(t: _Inputs) -> Computed:
        o, (weights, biases) = t.options, _halves(t.layers)
        y, mean, rstd = layer_norm_fwd(t.x, t.norm_weight, t.norm_bias, o.eps, weights[0].dtype, o.rms, route=t.route)
        intermediates = {"mean": mean, "rstd": rstd}
        if o.op == "layer_norm_linear" and len(weights) > 1:
            return (side_by_side(y, weights, biases),), intermediates
        return tuple([unviewed(F.linear(y, *layer)) for layer in zip(weights, biases, strict=True)]), intermediates

    @staticmethod
    def needed(t: _Inputs, intermediates: dict[str, Any], needs_grad: Any) -> dict[str, bool]:
        wants_norm = needs_grad.x or needs_grad.norm_weight or needs_grad.norm_bias
        return {"x": wants_norm or any(_halves(needs_grad.layers)[0]), "mean": not t.options.rms}

    @staticmethod
    def gradients(s: dict[str, Any], douts: Any, o: _Options, needs_grad: Any, route: Route) -> dict[str, Any]:
        weights = [*s.values()][5:]
        if len(douts) == len(weights):
            parts = [None if dout is None else as_rows(dout) for dout in douts]
        else:
            parts = [*by_layer(as_rows(douts[0]), weights)]
        halves = _halves(needs_grad.layers)
        of_norm, dweights, dbiases, _ = norm_linear_backward(
            s, o, parts, weights, Residual(), needs_grad, *halves, route
        )
        return of_norm | {"layers": (*dweights, *dbiases)}


Weights = Tensor | Sequence[Tensor]
Biases = Tensor | Sequence[Tensor | None] | None


def listed(weight: Weights, bias: Biases) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
    """Return the weights and the biases of one layer or of several."""
    weights: Sequence[Tensor] = (weight,) if isinstance(weight, Tensor) else weight
    biases: Sequence[Tensor | None] = (bias,) if isinstance(bias, Tensor) else bias or (None,) * len(weights)
    return weights, biases


def flat_layers(weight: Weights, bias: Biases) -> tuple[Any, ...]:
    """Return n weights and n biases, of one layer or of several."""
    weights, biases = listed(weight, bias)
    return *weights, *biases


def check_norm_and_layers(
    x: Tensor, norm: NormTuple, weight: Weights, bias: Biases, names: tuple[str, str]
) -> torch.dtype | None:
    """Check a norm and the layers after it, under the caller's names for weight and bias; return autocast's dtype or
    None."""
    check_float("x", x)
    cast = autocast_dtype(x)
    weights, biases = listed(weight, bias)
    if not weights or len(weights) != len(biases):
        raise ValueError(
            f"{names[1]} must be one for each weight, or None, got {len(biases)} for {len(weights)} weights"
        )
    for i, (w, b) in enumerate(zip(weights, biases, strict=True)):
        of = "" if len(weights) == 1 else f"[{i}]"
        check_linear(x, w, b, dtype=cast is None, names=("x", names[0] + of, names[1] + of))
    check_norm("x", x, NORM_NAMES, norm, x.shape[-1:], "(in,)", dtype=cast is None)
    return cast


def _prepared(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor | None, weight: Weights, bias: Biases, eps: float, norm: str,
    op: str,
) -> Prepared:  # fmt: skip
    names = ("weight", "bias") if op == "layer_norm_linear" else ("weights", "biases")
    cast = check_norm_and_layers(x, (norm_weight, norm_bias, eps, norm), weight, bias, names)
    layers = flat_layers(weight, bias)
    autograd = needs_autograd(op, x, norm_weight, norm_bias, *layers)
    return _LayerNormLinear, autograd, _Options(op, eps, norm == "rms", cast), (x, norm_weight, norm_bias, layers)


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
    op, arguments = "layer_norm_linear", (x, norm_weight, norm_bias, weight, bias)
    (out,) = run(op, _prepared, arguments, (eps, norm, op))
    return out


def layer_norm_linears(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor | None, weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None, *, eps: float = 1e-6, norm: str = "layer",
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute `layer_norm_linear` of several layers, with a tensor for each output: (..., out of that layer)."""
    op, arguments = "layer_norm_linears", (x, norm_weight, norm_bias, weights, biases)
    out: tuple[Tensor, ...] = run(op, _prepared, arguments, (eps, norm, op))
    return out
