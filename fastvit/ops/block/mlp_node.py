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
from fastvit.ops.runtime.backend import Path
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
    path: Path
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
    """Groups of gradients, and whether one of a group is wanted."""

    before: bool  # x or the norm
    pre: bool  # these or fc1
    h: bool  # these or the inner norm
    last: bool  # fc2's weight or LayerScale, which need fc2's input

    @classmethod
    def of(cls, wants: Any) -> _Wanted:
        """Return it for Inputs of bools."""
        before = wants.x or wants.norm_weight or wants.norm_bias
        pre = before or wants.fc1_weight or wants.fc1_bias or wants.value_weight or wants.value_bias
        h = pre or wants.inner_weight or wants.inner_bias
        return cls(before, pre, h, wants.fc2_weight or wants.layer_scale)


class Mlp(FusedNode):
    """The MLP of a norm of x."""

    Inputs = MlpInputs
    casts: tuple[str, ...] = ("fc1_weight", "fc1_bias", "value_weight", "value_bias", "fc2_weight", "fc2_bias")
    saves = (
        "x", "norm_weight", "norm_bias", "fc1_weight", "fc1_bias", "value_weight", "value_bias",
        "inner_weight", "inner_bias", "fc2_weight", "fc2_bias", "layer_scale", "row_scale", "seeds",
        "mean", "rstd", "pre", "inner_mean", "inner_rstd", "h",
    )  # fmt: skip

    @classmethod
    def kept(cls, t: MlpInputs) -> tuple[str, ...]:
        of_norm = ("mean", "rstd") if t.norm_weight is not None else ()
        of_inner = ("inner_mean", "inner_rstd") if t.inner_weight is not None else ()
        return *of_norm, *of_inner, *("pre",) * t.options.keep_pre, *("h",) * t.options.keep_h

    @staticmethod
    def compute(t: MlpInputs) -> Computed:
        o, path, seeds = t.options, t.path, t.seeds
        kept: dict[str, Any] = {}
        y = t.x
        if t.norm_weight is not None:
            y, kept["mean"], kept["rstd"] = layer_norm_fwd(
                y, t.norm_weight, t.norm_bias, o.eps, o.dtype, o.rms, path=path
            )
        fc1, value = _gate_and_value(t)
        if o.keep_pre:
            h, kept["pre"] = linear_act_fwd(y, *fc1, o.activation, *value, path=path)
        else:
            h = linear_fwd(y, *fc1, o.activation, None, None, None, *value, path=path)
        del y
        if seeds is not None:
            h = dropout_op(h, seeds[:1], o.dropout_p, path=path)
        if o.keep_h:
            kept["h"] = h
        if t.inner_weight is not None:
            inner = t.inner_weight, t.inner_bias, o.inner_eps, o.dtype, o.inner_rms
            h, kept["inner_mean"], kept["inner_rstd"] = layer_norm_fwd(h, *inner, path=path)
        epilogue = t.layer_scale, t.row_scale, t.x if o.residual_is_x else t.residual
        if seeds is None:
            return (linear_fwd(h, t.fc2_weight, t.fc2_bias, "none", *epilogue, path=path),), kept
        out = F.linear(h, t.fc2_weight, t.fc2_bias)
        return (dropout_op(out, seeds[1:], o.dropout_p, *epilogue, path=path),), kept

    @staticmethod
    def reads(t: MlpInputs, kept: dict[str, Any], wants: Any) -> dict[str, bool]:
        o, wanted = t.options, _Wanted.of(wants)
        has_norm, wants_act = t.norm_weight is not None, wanted.last or (t.inner_weight is not None and wanted.h)
        pre = wanted.pre or (wants_act and not o.keep_h)
        wants_weight = wants.fc1_weight or wants.value_weight
        return {
            "x": wants_weight or (has_norm and wanted.before) or (pre and not o.keep_pre), "mean": not o.rms,
            "inner_mean": wanted.h and not o.inner_rms, "inner_rstd": wanted.h, "pre": pre, "h": wants_act,
        }  # fmt: skip

    @staticmethod
    def gradients(s: dict[str, Any], douts: Any, o: MlpOptions, wants: Any, path: Path) -> dict[str, Any]:
        (dout,), wanted = douts, _Wanted.of(wants)
        found: dict[str, Any] = {"residual": dout.to(o.residual_dtype) if wants.residual else None}
        if not (wanted.h or wanted.last or wants.fc2_bias):
            return found
        fc2 = LastLayer(
            s["fc2_weight"], s["fc2_bias"], s["layer_scale"], wants.fc2_weight, wants.fc2_bias, wants.layer_scale
        )
        g = dout.to(o.dtype)
        if s["seeds"] is None:
            g = scale_samples(g, s["row_scale"])
        else:
            g = dropout_op(g, s["seeds"][1:], o.dropout_p, None, s["row_scale"], path=path)
        last, hidden = _hidden_backward(s, g, fc2, o, wants, found, path)
        G = fc2.product(g, last)
        # the pass that adds dout to the gradient of x also sums it over rows
        in_norm = o.residual_is_x and s["norm_weight"] is not None and wanted.before and s["seeds"] is None
        total = None if in_norm else fc2.total(g)
        del g, last
        dout_total = _input_backward(s, dout, hidden, fc2.total_dtype() if in_norm else None, o, wants, found, path)
        total = dout_total if in_norm else total
        found["fc2_weight"], found["fc2_bias"], found["layer_scale"] = fc2.gradients(G, total)
        return found


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


def _normed(s: dict[str, Any], o: MlpOptions, path: Path) -> Any:
    """Return fc1's input, computed again if there is a norm."""
    if s["norm_weight"] is None:
        return s["x"]
    return layer_norm_fwd(s["x"], s["norm_weight"], s["norm_bias"], o.eps, o.dtype, o.rms, path=path)[0]


def _layers(s: dict[str, Any]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the weights and biases of fc1: one layer, or the gate and the value."""
    if s["value_weight"] is None:
        return [s["fc1_weight"]], [s["fc1_bias"]]
    return [s["fc1_weight"], s["value_weight"]], [s["fc1_bias"], s["value_bias"]]


class _Hidden(NamedTuple):
    """Between fc1 and its activation.

    dpre, dpre_sum: the gradient of the activation's input, and its sum over rows, if they are wanted.
    y: fc1's input, if it was computed again.
    """

    dpre: Any
    dpre_sum: Any
    y: Tensor | None


def _hidden_backward(
    s: dict[str, Any], g: Tensor, fc2: LastLayer, o: MlpOptions, wants: Any, found: dict[str, Any], path: Path
) -> tuple[Any, _Hidden]:
    """Compute the backward pass from g, the gradient of fc2's result, to the activation's input. Put gradients of the
    inner norm into `found`. Return fc2's input, if it is wanted, and the rest."""
    pre, h, y, wanted = s.pop("pre"), s.pop("h"), None, _Wanted.of(wants)
    has_inner, seeds = s["inner_weight"] is not None, s["seeds"]
    wants_act = wanted.last or (has_inner and wanted.h)
    if pre is None and (wanted.pre or (wants_act and h is None)):
        weights, biases = _layers(s)
        y = _normed(s | {"x": in_backward(s["x"], g)}, o, path)
        pre = F.linear(y, *weights, *biases) if len(weights) == 1 else side_by_side(y, weights, biases)

    def activated() -> Tensor:
        h = gated_act(pre, o.activation, path=path) if o.gated else activate(pre, o.activation)
        return h if seeds is None else dropout_op(h, seeds[:1], o.dropout_p, path=path)

    if wanted.pre and wanted.last and h is None and seeds is None and not has_inner:
        dpre, h, dpre_sum = linear_dact(*fc2.input_operands(g), pre, o.activation, path=path)
        return h, _Hidden(dpre, dpre_sum, y)
    dh = dpre = dpre_sum = None
    if has_inner:
        h = activated() if wants_act and h is None else h
        inner = s["inner_weight"], s["inner_bias"]
        if wanted.h:
            dh, found["inner_weight"], dbias, h, _ = norm_backward(
                torch.matmul(*fc2.input_operands(g)), h, s["inner_mean"], s["inner_rstd"], *inner,
                want_y=wanted.last, path=path,
            )  # fmt: skip
            found["inner_bias"] = dbias if wants.inner_bias else None
        elif wanted.last:
            h, *_ = layer_norm_fwd(h, *inner, o.inner_eps, o.dtype, o.inner_rms, path=path)
    elif wanted.pre:
        dh = torch.matmul(*fc2.input_operands(g))
    if wanted.pre:
        dh = dh if seeds is None else dropout_op(dh, seeds[:1], o.dropout_p, path=path)
        dpre, dpre_sum = act_bwd(dh, pre, o.activation, path=path)
    del dh
    h = activated() if wants_act and h is None and not has_inner else h
    return h, _Hidden(dpre, dpre_sum, y)


def _product(parts: Any, weights: list[Tensor], add: Tensor | None = None) -> Tensor:
    """Return add + the sum of parts @ weights, in rows."""
    out = parts[0] @ weights[0] if add is None else torch.addmm(as_rows(add), parts[0], weights[0])
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        out.addmm_(part, weight)
    return out


def _input_backward(
    s: dict[str, Any], dout: Tensor, hidden: _Hidden, total_dtype: torch.dtype | None, o: MlpOptions, wants: Any,
    found: dict[str, Any], path: Path,
) -> Any:  # fmt: skip
    """Put the gradients of x, the norm and fc1 into `found`. Return dout's sum over rows in total_dtype, if the norm
    computes it."""
    if hidden.dpre is None:
        return None
    weights, _ = _layers(s)
    parts = by_layer(as_rows(hidden.dpre), weights)
    x, y, total = s["x"], hidden.y, None
    wants_weights = wants.fc1_weight or wants.value_weight
    if wants.x or wants.norm_weight or wants.norm_bias:
        dresidual = dout.to(o.dtype if x is None else x.dtype) if o.residual_is_x else None
        if s["norm_weight"] is None:
            dx = _product(parts, weights, dresidual)
            found["x"] = dx.view(*dout.shape[:-1], dx.shape[-1])
        else:
            residual = Residual(dresidual, s["row_scale"], total_dtype)
            found["x"], found["norm_weight"], dnorm_bias, y, total = norm_backward(
                _product(parts, weights).view(x.shape), x, s["mean"], s["rstd"], s["norm_weight"], s["norm_bias"],
                residual, y, want_y=bool(wants_weights), path=path,
            )  # fmt: skip
            found["norm_bias"] = dnorm_bias if wants.norm_bias else None
    if wants_weights and y is None:
        y = _normed(s, o, path)
    sums = by_layer(hidden.dpre_sum, weights)
    found["fc1_bias"] = sums[0] if wants.fc1_bias else None
    found["value_bias"] = sums[1] if wants.value_bias else None
    if y is not None and wants.fc1_weight:
        found["fc1_weight"] = parts[0].t() @ as_rows(y)
    if y is not None and wants.value_weight:
        found["value_weight"] = parts[1].t() @ as_rows(y)
    return total
