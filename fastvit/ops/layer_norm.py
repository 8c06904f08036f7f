"""LayerNorm, and LayerNorm of a residual sum: checks, gradients, public functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastvit.ops._checks import (
    as_rows,
    as_tokens,
    check_eps,
    check_float,
    check_like,
    from_tokens,
    rows_per_sample,
)
from fastvit.ops._layer_norm import (
    add_layer_norm_bwd,
    add_layer_norm_fwd,
    layer_norm_bwd,
    layer_norm_fwd,
)
from fastvit.ops._library import FusedFunction, autocast_dtype, distinct, needs_autograd, once


class _LayerNorm(FusedFunction):
    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor, eps: float, out_dtype: torch.dtype | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        y, mean, rstd = layer_norm_fwd(as_tokens(x), weight, bias, eps, out_dtype)
        return from_tokens(y, x), mean, rstd

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, *_ = inputs
        _, mean, rstd = output
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
        if dy is None:
            return None, None, None, None, None
        x, weight, mean, rstd = ctx.saved_tensors
        dx, dweight, dbias = once("layer_norm", layer_norm_bwd, as_rows(dy), as_rows(x), mean, rstd, weight, None)
        return from_tokens(dx, x), dweight, dbias, None, None


class _AddLayerNorm(FusedFunction):
    @staticmethod
    def forward(
        residual: Tensor,
        branch: Tensor,
        weight: Tensor,
        bias: Tensor,
        layer_scale: Tensor | None,
        row_scale: Tensor | None,
        rows: int,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        s, y, mean, rstd = add_layer_norm_fwd(
            as_rows(residual), as_rows(branch), weight, bias, layer_scale, row_scale, rows, eps
        )
        return from_tokens(s, residual), from_tokens(y, residual), mean, rstd

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        residual, branch, weight, _, layer_scale, row_scale, ctx.rows, _ = inputs
        s, _, mean, rstd = output
        # without a scale the branch's gradient is the sum's: nothing of the branch is needed
        ctx.scaled = layer_scale is not None or row_scale is not None
        ctx.dtypes = residual.dtype, branch.dtype
        ctx.save_for_backward(s, branch if ctx.scaled else None, weight, layer_scale, row_scale, mean, rstd)
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, ds: Tensor | None, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
        s, branch, weight, layer_scale, row_scale, mean, rstd = ctx.saved_tensors
        shape = s.shape
        if ds is None and dy is None:
            return (None,) * 8
        dy = torch.zeros_like(s) if dy is None else dy
        rows = as_rows(dy), None if ds is None else as_rows(ds), as_rows(s)
        dlayer_scale = None
        if ctx.scaled:
            dsum, dbranch, dweight, dbias, dlayer_scale = once(
                "add_layer_norm", add_layer_norm_bwd, *rows, mean, rstd, weight, as_rows(branch),
                layer_scale, row_scale, ctx.rows,
            )  # fmt: skip
            dbranch = dbranch.view(shape)
        else:
            dsum, dweight, dbias = once("add_layer_norm", layer_norm_bwd, rows[0], rows[2], mean, rstd, weight, rows[1])
            dbranch = dsum.view(shape).to(ctx.dtypes[1])
        dresidual = dsum.view(shape).to(ctx.dtypes[0])
        return (
            dresidual,
            dbranch,
            dweight,
            dbias,
            dlayer_scale if layer_scale is not None else None,
            None,
            None,
            None,
        )


def _check_parameters(x: Tensor, name: str, weight: Tensor, bias: Tensor, eps: float, *, dtype: bool) -> None:
    D = x.shape[-1] if x.dim() else 0
    if D == 0:
        raise ValueError(f"{name} must have a non-empty last dimension, got shape {tuple(x.shape)}")
    for parameter_name, parameter in (("weight", weight), ("bias", bias)):
        check_like(parameter_name, parameter, name, x, (D,), "(D,)", dtype=dtype)
    check_eps(eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-6) -> Tensor:
    """LayerNorm over the last dimension (Ba et al. 2016), statistics in float32.

    Args:
        x: (..., D), float32, float16, bfloat16 or float64, any strides.
        weight, bias: (D,), x's dtype.
        eps: added to the variance; not negative.

    Returns:
        (..., D), contiguous, x's dtype. Under autocast as eager: float32 on a GPU, x's dtype on the CPU.

    Raises:
        TypeError, ValueError: naming the argument, for dtypes, devices and shapes that do not fit.
    """
    check_float("x", x)
    cast = autocast_dtype(x) is not None
    _check_parameters(x, "x", weight, bias, eps, dtype=not cast)
    out_dtype = torch.float32 if cast and x.is_cuda else None
    if needs_autograd(x, weight, bias):
        return _LayerNorm.apply(x, weight, bias, eps, out_dtype)[0]
    return from_tokens(layer_norm_fwd(as_tokens(x), weight, bias, eps, out_dtype)[0], x)


def add_layer_norm(
    residual: Tensor,
    branch: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    layer_scale: Tensor | None = None,
    row_scale: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """The residual sum and its LayerNorm in one pass: s = residual + row_scale * layer_scale * branch, LN(s).

    Args:
        residual, branch: (B, ..., D), any strides. Their dtypes may differ; the sum has the promoted one.
        weight, bias: (D,), the sum's dtype.
        layer_scale: (D,) LayerScale's gamma (Touvron et al. 2021), or None.
        row_scale: (B,) one factor a sample, as DropPath draws them: 0 or 1 / keep (Huang et al. 2016), or None.
            Not differentiated.
        eps: added to the variance; not negative.

    Returns:
        s and LN(s), both (B, ..., D), contiguous, in the promoted dtype.

    Raises:
        TypeError, ValueError: naming the argument, for dtypes, devices and shapes that do not fit.
    """
    check_float("residual", residual)
    check_float("branch", branch)
    cast = autocast_dtype(residual) is not None
    s = residual if residual.dtype == torch.promote_types(residual.dtype, branch.dtype) else branch
    check_like("branch", branch, "residual", residual, residual.shape, "residual's shape", dtype=False)
    _check_parameters(s, "residual", weight, bias, eps, dtype=not cast)
    if layer_scale is not None:
        check_like("layer_scale", layer_scale, "residual", residual, residual.shape[-1:], "(D,)", dtype=False)
    rows = rows_per_sample(residual, row_scale, "residual")
    if needs_autograd(residual, branch, weight, bias, layer_scale):
        s, y, *_ = _AddLayerNorm.apply(*distinct(residual, branch, weight, bias, layer_scale, row_scale), rows, eps)
        return s, y
    s, y, *_ = add_layer_norm_fwd(as_rows(residual), as_rows(branch), weight, bias, layer_scale, row_scale, rows, eps)
    return from_tokens(s, residual), from_tokens(y, residual)
