"""The transformer's MLP: checks and public functions. The node is in mlp_node.py."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastvit.ops.block.mlp_node import Mlp, MlpOptions, PlainMlp
from fastvit.ops.block.norm_linear import NORM_NAMES, Biases, Weights
from fastvit.ops.dropout.op import draw_seeds
from fastvit.ops.layer_norm.op import NO_NORM, Norm, checked_norm
from fastvit.ops.linear.op import check_linear
from fastvit.ops.runtime.activations import GATED, check_activation
from fastvit.ops.runtime.autograd import needs_autograd
from fastvit.ops.runtime.checks import check_dropout, check_float, check_norm, check_recompute
from fastvit.ops.runtime.dtypes import autocast_dtype
from fastvit.ops.runtime.epilogue import Epilogue
from fastvit.ops.runtime.run import Prepared, run

RECOMPUTE = ("none", "activation", "all")
InnerNorm = Norm | tuple[Tensor, Tensor | None, float]


def _check_gated(x: Tensor, weight: Weights, bias: Biases, *, dtype: bool) -> int:
    """Check fc1 of a gated MLP; return hidden."""
    if isinstance(weight, Tensor):
        check_linear(x, weight, bias, dtype=dtype, names=("x", "fc1_weight", "fc1_bias"))  # type: ignore[arg-type]
        if weight.shape[0] % 2:
            raise ValueError(f"fc1_weight must have 2 * hidden rows, of the gate and of the value, got {len(weight)}")
        return weight.shape[0] // 2
    if not isinstance(weight, (list, tuple)) or len(weight) != 2:
        raise TypeError(f"fc1_weight must be a tensor, or the gate's and the value's, got {_words(weight)}")
    biases = (None, None) if bias is None else bias
    if not isinstance(biases, (list, tuple)) or len(biases) != 2:
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
    return f"{name} of {len(value)}" if isinstance(value, (list, tuple)) else name


def _prepared(
    x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, fc1_weight: Any, fc1_bias: Any, fc2_weight: Tensor,
    fc2_bias: Tensor | None, inner_norm: InnerNorm | None, layer_scale: Tensor | None, row_scale: Tensor | None,
    residual: Tensor | None, op: str, residual_is_x: bool, eps: float, norm: str, activation: str, dropout_p: float,
    recompute: str,
) -> Prepared:  # fmt: skip
    fc1, fc2, has_norm = (fc1_weight, fc1_bias), (fc2_weight, fc2_bias), op == "layer_norm_mlp"
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
    check_recompute(recompute, RECOMPUTE)
    Epilogue(layer_scale, row_scale, x if residual_is_x else residual).check(x, fc2_weight.shape[0], dtype=like)
    if has_norm:
        before: Any = norm_weight, norm_bias, eps, norm
        check_norm("x", x, NORM_NAMES, before, x.shape[-1:], "(in,)", dtype=like)
    inner = NO_NORM if inner_norm is None else checked_norm("inner_norm", x, inner_norm, "hidden", hidden, dtype=like)
    if not has_norm and cast not in (None, x.dtype) and residual_is_x:
        residual, residual_is_x = x, False  # x is cast, and the residual is not
    layers = *_flat_fc1(*fc1), *inner[:2], *fc2, layer_scale
    autograd = needs_autograd(op, x, norm_weight, norm_bias, *layers, residual)
    options = MlpOptions(
        op=op, activation=GATED[activation] if gated else activation, gated=gated, dropout_p=dropout_p,
        keep_pre=autograd and recompute != "all", keep_h=autograd and recompute == "none",
        cast=cast, dtype=cast or fc2_weight.dtype, eps=eps, rms=norm == "rms",
        inner_eps=inner[2], inner_rms=inner[3] == "rms", residual_is_x=residual_is_x,
        residual_dtype=x.dtype if residual_is_x else None if residual is None else residual.dtype,
    )  # fmt: skip
    # The first and the last: replays in C launch on addresses that are multiples of 16
    seeds = draw_seeds(3, x.device) if dropout_p else None
    node = Mlp if has_norm else PlainMlp
    return node, autograd, options, (x, norm_weight, norm_bias, *layers, row_scale, residual, seeds)


def _flat_fc1(weight: Weights, bias: Biases) -> tuple[Any, ...]:
    """Return weight and bias of fc1, and those of the value if it is a layer of its own, as Inputs has them."""
    if isinstance(weight, Tensor):
        return weight, bias, None, None
    biases: Any = bias or (None, None)
    return weight[0], biases[0], weight[1], biases[1]


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
            gated: "swiglu" (silu of the gate), "geglu" (exact gelu of it) or "geglu_tanh".
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
    arguments = x, None, None, fc1_weight, fc1_bias, fc2_weight, fc2_bias, inner_norm, layer_scale, row_scale
    options = "mlp", residual is x, 0.0, "", activation, dropout_p, recompute
    out: Tensor = run("mlp", _prepared, (*arguments, None if residual is x else residual), options)
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
    layers = norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias, inner_norm, layer_scale, row_scale
    added = None if residual is x else residual  # torch.compile refuses one tensor as two inputs
    options = "layer_norm_mlp", residual is x, eps, norm, activation, dropout_p, recompute
    out: Tensor = run("layer_norm_mlp", _prepared, (x, *layers, added), options)
    return out
