"""The transformer's MLP as one autograd node, with or without a gate, and with norms before it and before fc2:

    residual + row_scale * layer_scale * drop(fc2(inner_norm(drop(act(fc1(y))))))       y = x or norm(x)

A gated activation is act(gate(y)) * value(y), and `pre`, its input, gate and value next to each other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastvit.ops.block.norm_linear import by_layer, side_by_side
from fastvit.ops.dropout.op import dropout_op
from fastvit.ops.layer_norm.op import Residual, layer_norm_fwd, norm_backward
from fastvit.ops.linear.op import act_bwd, gated_act, linear_act_fwd, linear_dact, linear_fwd
from fastvit.ops.runtime.activations import activate
from fastvit.ops.runtime.autograd import Computed, FusedNode, in_backward
from fastvit.ops.runtime.backend import Route
from fastvit.ops.runtime.epilogue import LastLayer, scale_samples
from fastvit.ops.runtime.rows import as_rows


class MlpOptions(NamedTuple):
    op: str
    activation: str  # of the gate, if gated
    gated: bool
    dropout_p: float
    keep_pre: bool  # for the backward pass
    keep_h: bool  # the activation's result, after dropout
    cast: torch.dtype | None  # autocast's dtype
    dtype: torch.dtype  # of the matmuls
    eps: float
    rms: bool  # whether the norm is RMSNorm
    inner_eps: float
    inner_rms: bool
    residual_is_x: bool
    residual_dtype: torch.dtype | None  # of a residual that is not x


class MlpInputs(NamedTuple):
    options: MlpOptions
    route: Route
    x: Tensor
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    fc1_weight: Tensor  # if gated, the gate's rows and the value's, or the gate's alone
    fc1_bias: Tensor | None
    value_weight: Tensor | None  # None if fc1 has the value's rows
    value_bias: Tensor | None
    inner_weight: Tensor | None
    inner_bias: Tensor | None
    fc2_weight: Tensor
    fc2_bias: Tensor | None
    layer_scale: Tensor | None
    row_scale: Tensor | None
    residual: Tensor | None  # None if it is x
    seeds: Tensor | None


class _Wanted(NamedTuple):
    """Whether any gradient of a group is wanted, and whether one needs the activation's result."""

    before: bool  # x or the norm
    weights: bool  # fc1's
    pre: bool  # these or fc1's biases
    h: bool  # these or the inner norm
    last: bool  # fc2's weight or LayerScale, which need fc2's input
    act: bool

    @classmethod
    def of(cls, needs_grad: Any, t: MlpInputs) -> _Wanted:
        """Summarise which gradients are needed; `needs_grad` has a bool for each input."""
        before = needs_grad.x or needs_grad.norm_weight or needs_grad.norm_bias
        weights = needs_grad.fc1_weight or needs_grad.value_weight
        pre = before or weights or needs_grad.fc1_bias or needs_grad.value_bias
        h = pre or needs_grad.inner_weight or needs_grad.inner_bias
        last = needs_grad.fc2_weight or needs_grad.layer_scale
        return cls(before, weights, pre, h, last, last or (t.inner_weight is not None and h))


class Mlp(FusedNode):
    """The MLP of a norm of x."""

    Inputs = MlpInputs
    casts: tuple[str, ...] = ("fc1_weight", "fc1_bias", "value_weight", "value_bias", "fc2_weight", "fc2_bias")
    saved = (
        "x", "norm_weight", "norm_bias", "fc1_weight", "fc1_bias", "value_weight", "value_bias",
        "inner_weight", "inner_bias", "fc2_weight", "fc2_bias", "layer_scale", "row_scale", "seeds",
        "mean", "rstd", "pre", "inner_mean", "inner_rstd", "h",
    )  # fmt: skip

    @classmethod
    def intermediates_of(cls, t: MlpInputs) -> tuple[str, ...]:
        of_norm = ("mean", "rstd") if t.norm_weight is not None else ()
        of_inner = ("inner_mean", "inner_rstd") if t.inner_weight is not None else ()
        return *of_norm, *of_inner, *("pre",) * t.options.keep_pre, *("h",) * t.options.keep_h

    @staticmethod
    def compute(t: MlpInputs) -> Computed:
        o, route, seeds = t.options, t.route, t.seeds
        intermediates: dict[str, Any] = {}
        y = t.x
        if t.norm_weight is not None:
            y, intermediates["mean"], intermediates["rstd"] = layer_norm_fwd(
                y, t.norm_weight, t.norm_bias, o.eps, o.dtype, o.rms, route=route
            )
        fc1, value = _gate_and_value(t)
        if o.keep_pre:
            h, intermediates["pre"] = linear_act_fwd(y, *fc1, o.activation, *value, route=route)
        else:
            h = linear_fwd(y, *fc1, o.activation, None, None, None, *value, route=route)
        del y
        if seeds is not None:
            h = dropout_op(h, seeds[:1], o.dropout_p, route=route)
        if o.keep_h:
            intermediates["h"] = h
        if t.inner_weight is not None:
            inner = t.inner_weight, t.inner_bias, o.inner_eps, o.dtype, o.inner_rms
            h, intermediates["inner_mean"], intermediates["inner_rstd"] = layer_norm_fwd(h, *inner, route=route)
        epilogue = t.layer_scale, t.row_scale, t.x if o.residual_is_x else t.residual
        if seeds is None:
            return (linear_fwd(h, t.fc2_weight, t.fc2_bias, "none", *epilogue, route=route),), intermediates
        out = F.linear(h, t.fc2_weight, t.fc2_bias)
        return (dropout_op(out, seeds[2:], o.dropout_p, *epilogue, route=route),), intermediates

    @staticmethod
    def needed(t: MlpInputs, intermediates: dict[str, Any], needs_grad: Any) -> dict[str, bool]:
        o, wanted = t.options, _Wanted.of(needs_grad, t)
        pre = wanted.pre or (wanted.act and not o.keep_h)
        x = wanted.weights or (wanted.before and t.norm_weight is not None) or (pre and not o.keep_pre)
        return {
            "x": x, "mean": not o.rms, "inner_mean": wanted.h and not o.inner_rms, "inner_rstd": wanted.h,
            "pre": pre, "h": wanted.act,
        }  # fmt: skip

    @staticmethod
    def gradients(s: dict[str, Any], douts: Any, o: MlpOptions, needs_grad: Any, route: Route) -> dict[str, Any]:
        inputs: Any = [s.get(name) for name in MlpInputs._fields[2:]]
        t, (dout,) = MlpInputs(o, route, *inputs), douts
        wanted = _Wanted.of(needs_grad, t)
        dresidual = dout.to(o.residual_dtype) if needs_grad.residual else None
        if not (wanted.h or wanted.last or needs_grad.fc2_bias):
            return {"residual": dresidual}
        fc2 = LastLayer(
            t.fc2_weight, t.fc2_bias, t.layer_scale, needs_grad.fc2_weight, needs_grad.fc2_bias, needs_grad.layer_scale
        )
        g = dout.to(o.dtype)
        if t.seeds is None:
            g = scale_samples(g, t.row_scale)
        else:
            g = dropout_op(g, t.seeds[2:], o.dropout_p, None, t.row_scale, route=route)
        h, hidden = _fc2_backward(t, s, g, fc2, wanted)
        G = fc2.product(g, h)
        # the pass that adds dout to the gradient of x also sums it over rows
        in_norm = o.residual_is_x and t.norm_weight is not None and wanted.before and t.seeds is None
        total = None if in_norm else fc2.total(g)
        del g, h
        before, dout_total = _fc1_backward(
            t, s, dout, hidden, fc2.total_dtype() if in_norm else None, needs_grad, wanted
        )
        dweight, dbias, dlayer_scale = fc2.gradients(G, dout_total if in_norm else total)
        return before | {
            "inner_weight": hidden.inner_weight, "inner_bias": hidden.inner_bias if needs_grad.inner_bias else None,
            "fc2_weight": dweight, "fc2_bias": dbias, "layer_scale": dlayer_scale, "residual": dresidual,
        }  # fmt: skip


class PlainMlp(Mlp):
    """The MLP of x itself, which autocast casts, too."""

    casts: tuple[str, ...] = ("x", *Mlp.casts)


def _gate_and_value(t: MlpInputs) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return weight and bias of fc1, or of the gate; and those of the value, or None."""
    if not t.options.gated or t.value_weight is not None:
        return (t.fc1_weight, t.fc1_bias), (t.value_weight, t.value_bias)
    gate, value = t.fc1_weight.chunk(2)
    gate_bias, value_bias = (None, None) if t.fc1_bias is None else t.fc1_bias.chunk(2)
    return (gate, gate_bias), (value, value_bias)


def _normed(t: MlpInputs, x: Any) -> Any:
    """Return fc1's input, computed again from x if there is a norm."""
    if t.norm_weight is None:
        return x
    o = t.options
    return layer_norm_fwd(x, t.norm_weight, t.norm_bias, o.eps, o.dtype, o.rms, route=t.route)[0]


class _Hidden(NamedTuple):
    """Between fc1 and fc2; None for what no gradient needs.

    y: fc1's input, if it was computed again.
    dpre, dpre_sum: the gradient of the activation's input, and its sum over rows.
    inner_weight, inner_bias: the gradients of the inner norm.
    """

    y: Any
    dpre: Any
    dpre_sum: Any
    inner_weight: Tensor | None = None
    inner_bias: Tensor | None = None


def _fc2_backward(t: MlpInputs, s: dict[str, Any], g: Tensor, fc2: LastLayer, wanted: _Wanted) -> tuple[Any, _Hidden]:
    """Compute the backward pass from g, the gradient of fc2's result, to the activation's input. Return fc2's input, if
    it is wanted, and the rest."""
    o, route, seeds, has_inner = t.options, t.route, t.seeds, t.inner_weight is not None
    pre, h, y = s.pop("pre"), s.pop("h"), None
    if pre is None and (wanted.pre or (wanted.act and h is None)):
        y = _normed(t, in_backward(t.x, g))
        if t.value_weight is None:
            pre = F.linear(y, t.fc1_weight, t.fc1_bias)
        else:
            pre = side_by_side(y, (t.fc1_weight, t.value_weight), (t.fc1_bias, t.value_bias))

    def activated() -> Tensor:
        h = gated_act(pre, o.activation, route=route) if o.gated else activate(pre, o.activation)
        return h if seeds is None else dropout_op(h, seeds[:1], o.dropout_p, route=route)

    if wanted.pre and wanted.last and h is None and seeds is None and not has_inner:
        dpre, h, dpre_sum = linear_dact(*fc2.input_operands(g), pre, o.activation, route=route)
        return h, _Hidden(y, dpre, dpre_sum)
    dpre = dpre_sum = dinner_weight = dinner_bias = None
    if has_inner and wanted.act and h is None:
        h = activated()
    dh: Any = torch.matmul(*fc2.input_operands(g)) if wanted.h else None
    if t.inner_weight is not None and wanted.h:
        dh, dinner_weight, dinner_bias, h, _ = norm_backward(
            dh, h, s["inner_mean"], s["inner_rstd"], t.inner_weight, t.inner_bias, want_y=wanted.last, route=route
        )
    elif has_inner and wanted.last:
        h, *_ = layer_norm_fwd(h, t.inner_weight, t.inner_bias, o.inner_eps, o.dtype, o.inner_rms, route=route)
    if wanted.pre:
        dh = dh if seeds is None else dropout_op(dh, seeds[:1], o.dropout_p, route=route)
        dpre, dpre_sum = act_bwd(dh, pre, o.activation, route=route)
    del dh
    if not has_inner and wanted.act and h is None:
        h = activated()
    return h, _Hidden(y, dpre, dpre_sum, dinner_weight, dinner_bias)


def _product(parts: Any, weights: list[Tensor], add: Tensor | None = None) -> Tensor:
    """Return add + the sum of parts @ weights, in rows."""
    out = parts[0] @ weights[0] if add is None else torch.addmm(as_rows(add), parts[0], weights[0])
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        out.addmm_(part, weight)
    return out


def _fc1_backward(
    t: MlpInputs, s: dict[str, Any], dout: Tensor, hidden: _Hidden, total_dtype: torch.dtype | None, needs_grad: Any,
    wanted: _Wanted,
) -> tuple[dict[str, Any], Any]:  # fmt: skip
    """Return the gradients of x, the norm and fc1 by name, and dout's sum over rows in total_dtype, if the norm
    computes it."""
    if hidden.dpre is None:
        return {}, None
    o, x, y = t.options, t.x, hidden.y
    weights = [t.fc1_weight] if t.value_weight is None else [t.fc1_weight, t.value_weight]
    parts, sums = by_layer(as_rows(hidden.dpre), weights), by_layer(hidden.dpre_sum, weights)
    dx = dnorm_weight = dnorm_bias = total = None
    if wanted.before:
        dresidual = dout.to(o.dtype if x is None else x.dtype) if o.residual_is_x else None
        if t.norm_weight is None:
            dx = _product(parts, weights, dresidual)
            dx = dx.view(*dout.shape[:-1], dx.shape[-1])
        else:
            residual = Residual(dresidual, t.row_scale, total_dtype)
            dx, dnorm_weight, dnorm_bias, y, total = norm_backward(
                _product(parts, weights).view(x.shape), x, s["mean"], s["rstd"], t.norm_weight, t.norm_bias,
                residual, y, want_y=wanted.weights, route=t.route,
            )  # fmt: skip
    if wanted.weights and y is None:
        y = _normed(t, x)
    return {
        "x": dx, "norm_weight": dnorm_weight, "norm_bias": dnorm_bias if needs_grad.norm_bias else None,
        "fc1_weight": parts[0].t() @ as_rows(y) if needs_grad.fc1_weight else None,
        "fc1_bias": sums[0] if needs_grad.fc1_bias else None,
        "value_weight": parts[1].t() @ as_rows(y) if needs_grad.value_weight else None,
        "value_bias": sums[1] if needs_grad.value_bias else None,
    }, total  # fmt: skip
