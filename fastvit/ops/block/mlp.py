"""The transformer's MLP as one autograd node, with or without a gate, and a norm before it and before fc2:

    residual + row_scale * layer_scale * drop(fc2(inner_norm(drop(act(fc1(y))))))       y = x or norm(x)

A gated activation is act(gate(y)) * value(y), and `pre`, its input, gate and value next to each other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastvit.ops.block.norm_linear import NORM_NAMES, Biases, Weights, side_by_side
from fastvit.ops.dropout.op import draw_seeds, dropout_op
from fastvit.ops.layer_norm.op import NO_NORM, Norm, NormTuple, Residual, checked_norm, layer_norm_fwd, norm_backward
from fastvit.ops.linear.gated import gated_act, gated_act_bwd, gated_act_fwd, gated_dact, gated_fwd
from fastvit.ops.linear.op import act_bwd, check_linear, linear_act_fwd, linear_dact, linear_fwd
from fastvit.ops.runtime.activations import GATED, activate, check_activation
from fastvit.ops.runtime.autograd import FusedNode, needs_autograd, run
from fastvit.ops.runtime.call import Call, begin
from fastvit.ops.runtime.checks import check_dropout, check_float, check_norm, check_recompute
from fastvit.ops.runtime.dtypes import autocast_dtype
from fastvit.ops.runtime.epilogue import Epilogue, EpilogueTuple, LastLayer, scale_samples
from fastvit.ops.runtime.rows import as_rows

InnerNorm = Norm | tuple[Tensor, Tensor | None, float]


class _Options(NamedTuple):
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


class _Inputs(NamedTuple):
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
    options: _Options
    call: Call


class _Wanted(NamedTuple):
    """What gradients are wanted of, or by way of."""

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


class _Mlp(FusedNode):
    """Of a norm of x."""

    Inputs = _Inputs
    casts: tuple[str, ...] = ("fc1_weight", "fc1_bias", "value_weight", "value_bias", "fc2_weight", "fc2_bias")
    saves = (
        "x", "norm_weight", "norm_bias", "mean", "rstd", "fc1_weight", "fc1_bias", "value_weight", "value_bias",
        "inner_weight", "inner_bias", "inner_mean", "inner_rstd", "pre", "h",
        "fc2_weight", "fc2_bias", "layer_scale", "row_scale", "seeds",
    )  # fmt: skip

    @classmethod
    def kept(cls, t: _Inputs) -> tuple[str, ...]:
        of_norm = ("mean", "rstd") if t.norm_weight is not None else ()
        of_inner = ("inner_mean", "inner_rstd") if t.inner_weight is not None else ()
        return *of_norm, *of_inner, *("pre",) * t.options.keep_pre, *("h",) * t.options.keep_h

    @staticmethod
    def compute(t: _Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        o, call, seeds = t.options, t.call, t.seeds
        kept: dict[str, Any] = {}
        y = t.x
        if t.norm_weight is not None:
            y, kept["mean"], kept["rstd"] = layer_norm_fwd(
                y, t.norm_weight, t.norm_bias, o.eps, o.dtype, o.rms, call=call
            )
        layers = _gate_and_value(t) if o.gated else (t.fc1_weight, t.fc1_bias)
        if o.keep_pre:
            h, kept["pre"] = (gated_act_fwd if o.gated else linear_act_fwd)(y, *layers, o.activation, call=call)
        else:
            h = (gated_fwd if o.gated else linear_fwd)(y, *layers, o.activation, call=call.child("fc1"))
        del y
        if seeds is not None:
            h = dropout_op(h, seeds[:1], o.dropout_p, call=call.child("dropout of h"))
        if o.keep_h:
            kept["h"] = h
        if t.inner_weight is not None:
            inner = t.inner_weight, t.inner_bias, o.inner_eps, o.dtype, o.inner_rms
            h, kept["inner_mean"], kept["inner_rstd"] = layer_norm_fwd(h, *inner, call=call.child("inner norm"))
        epilogue = t.layer_scale, t.row_scale, t.x if o.residual_is_x else t.residual
        if seeds is None:
            return (linear_fwd(h, t.fc2_weight, t.fc2_bias, "none", *epilogue, call=call),), kept
        out = F.linear(h, t.fc2_weight, t.fc2_bias)
        return (dropout_op(out, seeds[1:], o.dropout_p, *epilogue, call=call),), kept

    @staticmethod
    def reads(t: _Inputs, kept: dict[str, Any], wants: Any) -> dict[str, bool]:
        o, wanted = t.options, _Wanted.of(wants)
        has_norm, wants_act = t.norm_weight is not None, wanted.last or (t.inner_weight is not None and wanted.h)
        pre = wanted.pre or (wants_act and not o.keep_h)
        wants_weight = wants.fc1_weight or wants.value_weight
        return {
            "x": wants_weight or (has_norm and wanted.before) or (pre and not o.keep_pre), "mean": not o.rms,
            "inner_mean": wanted.h and not o.inner_rms, "inner_rstd": wanted.h, "pre": pre, "h": wants_act,
        }  # fmt: skip

    @staticmethod
    def gradients(s: dict[str, Any], douts: Any, o: _Options, wants: Any, call: Call) -> dict[str, Any]:
        (dout,), wanted = douts, _Wanted.of(wants)
        found = {"residual": dout.to(o.residual_dtype) if wants.residual else None}
        if not (wanted.h or wanted.last or wants.fc2_bias):
            return found
        fc2 = LastLayer(
            s["fc2_weight"], s["fc2_bias"], s["layer_scale"], wants.fc2_weight, wants.fc2_bias, wants.layer_scale
        )
        g = dout.to(o.dtype)
        if s["seeds"] is None:
            g = scale_samples(g, s["row_scale"])
        else:
            g = dropout_op(g, s["seeds"][1:], o.dropout_p, None, s["row_scale"], call=call)
        last, hidden = _hidden_backward(s, g, fc2, o, wanted, call)
        G = fc2.product(g, last)
        # the pass that adds dout to the gradient of x also sums it over rows
        in_norm = o.residual_is_x and s["norm_weight"] is not None and wanted.before and s["seeds"] is None
        total = None if in_norm else fc2.total(g)
        del g, last
        of_input, dout_total = _input_backward(s, dout, hidden, fc2.total_dtype() if in_norm else None, o, wants, call)
        dweight, dbias, dlayer_scale = fc2.gradients(G, dout_total if in_norm else total)
        found |= {"fc2_weight": dweight, "fc2_bias": dbias, "layer_scale": dlayer_scale}
        found |= {"inner_weight": hidden.dinner_weight, "inner_bias": hidden.dinner_bias if wants.inner_bias else None}
        return found | of_input


class _PlainMlp(_Mlp):
    """Of x itself, which autocast casts, too."""

    casts: tuple[str, ...] = ("x", *_Mlp.casts)


def _gate_and_value(t: _Inputs) -> tuple[Any, ...]:
    """Return the gate's and the value's weight, and their biases."""
    if t.value_weight is not None:
        return t.fc1_weight, t.value_weight, t.fc1_bias, t.value_bias
    return *t.fc1_weight.chunk(2), *((None, None) if t.fc1_bias is None else t.fc1_bias.chunk(2))


def _normed(s: dict[str, Any], o: _Options, call: Call) -> Any:
    """Return fc1's input, computed again if there is a norm."""
    if s["norm_weight"] is None:
        return s["x"]
    return layer_norm_fwd(s["x"], s["norm_weight"], s["norm_bias"], o.eps, o.dtype, o.rms, call=call)[0]


def _layers(s: dict[str, Any]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the weights and biases of fc1: one layer, or the gate and the value."""
    if s["value_weight"] is None:
        return [s["fc1_weight"]], [s["fc1_bias"]]
    return [s["fc1_weight"], s["value_weight"]], [s["fc1_bias"], s["value_bias"]]


class _Hidden(NamedTuple):
    """Gradients between fc1 and fc2, as far as they are wanted.

    dpre, dpre_sum: of the activation's input, and its sum over rows.
    y: fc1's input, if it was computed again.
    """

    dpre: Any
    dpre_sum: Any
    dinner_weight: Tensor | None
    dinner_bias: Tensor | None
    y: Tensor | None


def _hidden_backward(
    s: dict[str, Any], g: Tensor, fc2: LastLayer, o: _Options, wanted: _Wanted, call: Call
) -> tuple[Any, _Hidden]:
    """Compute the backward pass from g, the gradient of fc2's result, to the activation's input. Return fc2's input, if
    it is wanted, and gradients."""
    pre, h, y = s.pop("pre"), s.pop("h"), None
    has_inner, seeds = s["inner_weight"] is not None, s["seeds"]
    wants_h = wanted.last or (has_inner and wanted.h)
    if pre is None and (wanted.pre or (wants_h and h is None)):
        weights, biases = _layers(s)
        y = _normed(s, o, call)
        pre = F.linear(y, *weights, *biases) if len(weights) == 1 else side_by_side(y, weights, biases)

    def activated() -> Tensor:
        h = gated_act(pre, o.activation, call=call) if o.gated else activate(pre, o.activation)
        return h if seeds is None else dropout_op(h, seeds[:1], o.dropout_p, call=call.child("dropout of h"))

    if wanted.pre and wanted.last and h is None and seeds is None and not has_inner:
        dact = gated_dact if o.gated else linear_dact
        dpre, h, dpre_sum = dact(*fc2.input_operands(g), pre, o.activation, call=call)
        return h, _Hidden(dpre, dpre_sum, None, None, y)
    dh: Any = None
    dpre = dpre_sum = dinner_weight = dinner_bias = None
    if has_inner:
        h = activated() if wants_h and h is None else h
        inner = s["inner_weight"], s["inner_bias"]
        if wanted.h:
            dh = torch.matmul(*fc2.input_operands(g))
            dh, dinner_weight, dinner_bias, h, _ = norm_backward(
                dh, h, s["inner_mean"], s["inner_rstd"], *inner, want_y=wanted.last, call=call.child("inner norm")
            )
        elif wanted.last:
            h, *_ = layer_norm_fwd(h, *inner, o.inner_eps, o.dtype, o.inner_rms, call=call.child("inner norm"))
    elif wanted.pre:
        dh = torch.matmul(*fc2.input_operands(g))
    if wanted.pre:
        dh = dh if seeds is None else dropout_op(dh, seeds[:1], o.dropout_p, call=call.child("dropout of dh"))
        dpre, dpre_sum = (gated_act_bwd if o.gated else act_bwd)(dh, pre, o.activation, call=call)
    del dh
    h = activated() if wants_h and h is None and not has_inner else h
    return h, _Hidden(dpre, dpre_sum, dinner_weight, dinner_bias, y)


def _product(parts: Any, weights: list[Tensor], add: Tensor | None = None) -> Tensor:
    """Return add + the sum of parts @ weights, in rows."""
    out = parts[0] @ weights[0] if add is None else torch.addmm(as_rows(add), parts[0], weights[0])
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        out.addmm_(part, weight)
    return out


def _input_backward(
    s: dict[str, Any], dout: Tensor, hidden: _Hidden, total_dtype: torch.dtype | None, o: _Options, wants: Any,
    call: Call,
) -> tuple[dict[str, Any], Any]:  # fmt: skip
    """Return gradients of x, the norm and fc1, and dout's sum over rows in total_dtype, if the norm computes it."""
    found: dict[str, Any] = {}
    if hidden.dpre is None:
        return found, None
    weights, _ = _layers(s)
    widths = [len(weight) for weight in weights]
    parts = as_rows(hidden.dpre).split(widths, dim=1)
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
                residual, y, want_y=bool(wants_weights), call=call,
            )  # fmt: skip
            found["norm_bias"] = dnorm_bias if wants.norm_bias else None
    if wants_weights and y is None:
        y = _normed(s, o, call)
    sums = hidden.dpre_sum.split(widths)
    for name, part, part_sum in zip(("fc1", "value"), parts, sums, strict=False):
        if y is not None and getattr(wants, f"{name}_weight"):
            found[f"{name}_weight"] = part.t() @ as_rows(y)
        found[f"{name}_bias"] = part_sum if getattr(wants, f"{name}_bias") else None
    return found, total


def _check_gated(x: Tensor, weight: Weights, bias: Biases, *, dtype: bool) -> int:
    """Check fc1 of a gated MLP; return hidden."""
    if isinstance(weight, Tensor):
        check_linear(x, weight, bias, dtype=dtype, names=("x", "fc1_weight", "fc1_bias"))  # type: ignore[arg-type]
        if weight.shape[0] % 2:
            raise ValueError(f"fc1_weight must have 2 * hidden rows, of the gate and of the value, got {len(weight)}")
        return weight.shape[0] // 2
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
    return int(weight[0].shape[0])


def _words(value: Any) -> str:
    name = type(value).__name__
    return f"{name} of {len(value)}" if isinstance(value, list | tuple) else name


def _checked(
    op: str, x: Tensor, norm: NormTuple | None, fc1: tuple[Any, Any], fc2: tuple[Tensor, Tensor | None],
    inner_norm: InnerNorm | None, epilogue: EpilogueTuple, options: tuple[str, float, str],
) -> tuple[bool, _Options]:  # fmt: skip
    """Check a call; return whether it needs autograd."""
    activation, dropout_p, recompute = options
    check_float("x", x)
    cast = autocast_dtype(x)
    like, gated = cast is None, activation in GATED
    if gated:
        hidden = _check_gated(x, *fc1, dtype=like)
    else:
        check_activation(activation, *GATED)
        check_linear(x, *fc1, dtype=like, names=("x", "fc1_weight", "fc1_bias"))
        hidden = fc1[0].shape[0]
    check_linear(x, *fc2, dtype=like, names=("x", "fc2_weight", "fc2_bias"), hidden=("hidden", hidden))
    check_dropout("dropout_p", dropout_p)
    check_recompute(recompute)
    branch = Epilogue(*epilogue)
    branch.check(x, fc2[0].shape[0], dtype=like)
    if norm is not None:
        check_norm(NORM_NAMES, x, *norm, "(in,)", dtype=like)
    inner = NO_NORM if inner_norm is None else checked_norm("inner_norm", x, inner_norm, "hidden", hidden, dtype=like)
    norm_weight, norm_bias, eps, kind = norm or NO_NORM
    tensors = norm_weight, norm_bias, *_flat_fc1(*fc1), *inner[:2], *fc2, branch.layer_scale, branch.residual
    autograd = needs_autograd(op, x, *tensors)
    residual_is_x = branch.residual is x and (cast in (None, x.dtype) or norm is not None)
    return autograd, _Options(
        op, GATED[activation] if gated else activation, gated, dropout_p,
        keep_pre=autograd and recompute != "all", keep_h=autograd and recompute == "none",
        cast=cast, dtype=cast or fc2[0].dtype, eps=eps, rms=kind == "rms",
        inner_eps=inner[2], inner_rms=inner[3] == "rms", residual_is_x=residual_is_x,
        residual_dtype=None if branch.residual is None else branch.residual.dtype,
    )  # fmt: skip


def _flat_fc1(weight: Weights, bias: Biases) -> tuple[Any, ...]:
    """Return weight and bias of fc1, and those of the value if it is a layer of its own, as Inputs has them."""
    if isinstance(weight, Tensor):
        return weight, bias, None, None
    biases: Any = bias or (None, None)
    return weight[0], biases[0], weight[1], biases[1]


def _inputs(
    op: str, x: Tensor, norm: NormTuple | None, fc1: tuple[Any, Any], fc2: tuple[Tensor, Tensor | None],
    inner_norm: InnerNorm | None, epilogue: EpilogueTuple, options: tuple[str, float, str],
) -> tuple[bool, _Inputs]:  # fmt: skip
    """Begin and check a call of the op of that name; return whether it needs autograd, and its inputs. options:
    activation, dropout_p, recompute."""
    layer_scale, row_scale, residual = epilogue
    norm_weight, norm_bias, eps, kind = norm or NO_NORM
    tensors = x, norm_weight, norm_bias, *fc1, *fc2, inner_norm, layer_scale, row_scale
    call = begin(op, (*tensors, None if residual is x else residual), (residual is x, eps, kind, *options))
    autograd, o = call.once("checked", _checked, op, x, norm, fc1, fc2, inner_norm, epilogue, options)
    inner = NO_NORM if inner_norm is None else Norm(*inner_norm)
    fc1_weight, fc1_bias, value_weight, value_bias = _flat_fc1(*fc1)
    return autograd, _Inputs(
        x=x, norm_weight=norm_weight, norm_bias=norm_bias,
        fc1_weight=fc1_weight, fc1_bias=fc1_bias, value_weight=value_weight, value_bias=value_bias,
        inner_weight=inner[0], inner_bias=inner[1], fc2_weight=fc2[0], fc2_bias=fc2[1],
        layer_scale=layer_scale, row_scale=row_scale,
        residual=None if o.residual_is_x else residual,  # torch.compile refuses one tensor as two inputs
        seeds=draw_seeds(2, x.device) if o.dropout_p else None, options=o, call=call,
    )  # fmt: skip


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
            None; weight and bias are (hidden,), x's dtype.

    Returns:
        (..., out), contiguous, in the dtype that x and residual promote to. Under autocast x, weights and biases are
        cast to its dtype, and the output's dtype is what PyTorch gives for the formula.

    Raises:
        TypeError, ValueError: naming the argument, for dtypes, devices, shapes and names that do not fit.
    """
    fc1, fc2 = (fc1_weight, fc1_bias), (fc2_weight, fc2_bias)
    epilogue, options = (layer_scale, row_scale, residual), (activation, dropout_p, recompute)
    out: Tensor = run(_PlainMlp, *_inputs("mlp", x, None, fc1, fc2, inner_norm, epilogue, options))
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
    before, fc1, fc2 = (norm_weight, norm_bias, eps, norm), (fc1_weight, fc1_bias), (fc2_weight, fc2_bias)
    epilogue, options = (layer_scale, row_scale, residual), (activation, dropout_p, recompute)
    out: Tensor = run(_Mlp, *_inputs("layer_norm_mlp", x, before, fc1, fc2, inner_norm, epilogue, options))
    return out
