"""The transformer's MLP, with or without the LayerNorm before it: checks and public functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastvit.ops._activations import check_activation
from fastvit.ops._checks import check_dropout, check_float, check_like
from fastvit.ops._library import autocast_dtype, distinct, needs_autograd
from fastvit.ops._mlp import Mlp, MlpOptions, mlp_forward
from fastvit.ops.dropout import draw_seeds
from fastvit.ops.layer_norm_linear import check_norm
from fastvit.ops.linear import check_branch, check_linear

RECOMPUTE = ("none", "activation", "all")


def _check(
    x: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    activation: str,
    dropout_p: float,
    layer_scale: Tensor | None,
    row_scale: Tensor | None,
    residual: Tensor | None,
    recompute: str,
    *,
    dtype: bool,
) -> int:
    """-> rows that share an entry of row_scale"""
    check_linear(x, fc1_weight, fc1_bias, dtype=dtype, names=("x", "fc1_weight", "fc1_bias"))
    check_like("fc2_weight", fc2_weight, "x", x, dtype=dtype)
    hidden, shape = fc1_weight.shape[0], fc2_weight.shape
    if len(shape) != 2 or shape[0] == 0 or shape[1] != hidden:
        raise ValueError(
            f"fc2_weight must have shape (out, hidden) with fc1_weight's hidden = {hidden}, got {tuple(shape)}"
        )
    if fc2_bias is not None:
        check_like("fc2_bias", fc2_bias, "x", x, (shape[0],), "(out,)", dtype=dtype)
    check_activation(activation)
    check_dropout("dropout_p", dropout_p)
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute must be one of {', '.join(RECOMPUTE)}, got {recompute!r}")
    return check_branch(x, shape[0], layer_scale, row_scale, residual, dtype=dtype)


def _to(dtype: torch.dtype, *tensors: Tensor | None) -> list[Any]:
    return [None if t is None else t.to(dtype) for t in tensors]


def _run(
    name: str,
    autograd: bool,
    x: Tensor,
    parameters: tuple[Tensor | None, ...],
    row_scale: Tensor | None,
    residual: Tensor | None,
    activation: str,
    dropout_p: float,
    recompute: str,
    rows: int,
    eps: float = 0.0,
) -> Tensor:
    keep_pre, keep_h = autograd and recompute != "all", recompute == "none"
    residual_is_x = residual is x  # which torch.compile refuses to see twice among a Function's inputs
    fc1_weight: Any = parameters[2]
    options = MlpOptions(name, activation, dropout_p, keep_pre, keep_h, rows, fc1_weight.dtype, eps, residual_is_x)
    seeds = draw_seeds(2, x.device) if dropout_p else None
    residual = None if residual_is_x else residual
    if autograd:
        return Mlp.apply(*distinct(x, *parameters, row_scale, residual), seeds, options)[0]
    forward: Any = mlp_forward
    return forward(x, *parameters, row_scale, residual, seeds, options)[0]


def mlp(
    x: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    *,
    activation: str = "gelu",
    dropout_p: float = 0.0,
    layer_scale: Tensor | None = None,
    row_scale: Tensor | None = None,
    residual: Tensor | None = None,
    recompute: str = "activation",
) -> Tensor:
    """residual + row_scale * layer_scale * drop(fc2(drop(act(fc1(x))))), the MLP of Vaswani et al. 2017, section 3.3.

    Args:
        x: (..., in), or (B, ..., in) with row_scale; float32, float16, bfloat16 or float64, any strides.
        fc1_weight, fc1_bias: (hidden, in) and (hidden,), x's dtype; the bias may be None.
        fc2_weight, fc2_bias: (out, hidden) and (out,), x's dtype; the bias may be None.
        activation: "gelu" (exact, by erf; Hendrycks and Gimpel 2016), "gelu_tanh", "quick_gelu", "relu" or "silu".
        dropout_p: probability of zero, in [0, 1), after the activation and after fc2. Pass 0 in evaluation.
        layer_scale: (out,) LayerScale's gamma (Touvron et al. 2021), x's dtype, or None.
        row_scale: (B,) one factor a sample, as DropPath draws them (Huang et al. 2016), or None. Not differentiated.
        residual: (..., out), or None. Its dtype may be wider than x's.
        recompute: what the backward pass computes again instead of reading it from memory. "none": x, the hidden
            pre-activation and activation are saved; "activation": x and the pre-activation; "all": x.

    Returns:
        (..., out), contiguous, in the dtype that x and residual promote to. Under autocast x, weights and biases are
        cast to its dtype, and the output's dtype is what PyTorch gives for the formula.

    Raises:
        TypeError, ValueError: naming the argument, for dtypes, devices, shapes and names that do not fit.
    """
    check_float("x", x)
    cast = autocast_dtype(x)
    rows = _check(
        x, fc1_weight, fc1_bias, fc2_weight, fc2_bias, activation, dropout_p, layer_scale, row_scale, residual,
        recompute, dtype=cast is None,
    )  # fmt: skip
    if cast is not None:
        x, fc1_weight, fc1_bias, fc2_weight, fc2_bias = _to(cast, x, fc1_weight, fc1_bias, fc2_weight, fc2_bias)
    parameters = (None, None, fc1_weight, fc1_bias, fc2_weight, fc2_bias, layer_scale)
    autograd = needs_autograd(x, *parameters, residual)
    return _run("mlp", autograd, x, parameters, row_scale, residual, activation, dropout_p, recompute, rows)


def layer_norm_mlp(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    *,
    eps: float = 1e-6,
    activation: str = "gelu",
    dropout_p: float = 0.0,
    layer_scale: Tensor | None = None,
    row_scale: Tensor | None = None,
    residual: Tensor | None = None,
    recompute: str = "activation",
) -> Tensor:
    """mlp(LayerNorm(x)) as one autograd node, which saves x, the row statistics and what `recompute` leaves; the
    normalised rows are computed again in the backward pass of the LayerNorm.

    Args:
        x: (..., in), as in mlp. Its dtype may differ from the other arguments' under autocast only.
        norm_weight, norm_bias: (in,), x's dtype.
        eps: added to the variance; not negative.
        residual: (..., out), or None. When it is x itself, its gradient joins inside the LayerNorm's backward pass.
        other arguments: as in mlp.

    Returns:
        (..., out), contiguous, as in mlp. Under autocast the LayerNorm's output is rounded to autocast's dtype.

    Raises:
        TypeError, ValueError: naming the argument, for dtypes, devices, shapes and names that do not fit.
    """
    check_float("x", x)
    cast = autocast_dtype(x)
    rows = _check(
        x, fc1_weight, fc1_bias, fc2_weight, fc2_bias, activation, dropout_p, layer_scale, row_scale, residual,
        recompute, dtype=cast is None,
    )  # fmt: skip
    check_norm(x, norm_weight, norm_bias, eps, dtype=cast is None)
    if cast is not None:
        fc1_weight, fc1_bias, fc2_weight, fc2_bias = _to(cast, fc1_weight, fc1_bias, fc2_weight, fc2_bias)
    parameters = (norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias, layer_scale)
    autograd = needs_autograd(x, *parameters, residual)
    return _run(
        "layer_norm_mlp", autograd, x, parameters, row_scale, residual, activation, dropout_p, recompute, rows, eps
    )
