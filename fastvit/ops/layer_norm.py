"""LayerNorm, and LayerNorm of a residual sum: registration, gradients, checks, public functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastvit.ops import _decompositions
from fastvit.ops._checks import check_float, check_like, check_norm, check_row_scale
from fastvit.ops._library import (
    FusedFunction,
    autocast_dtype,
    differentiable_once,
    needs_autograd,
    register,
    repeats_as_views,
    stat_dtype,
)
from fastvit.ops.aten import layer_norm as aten

# ---- registered ops, on (..., D) of any strides with statistics (..., 1); results are contiguous ----


def _fwd_fake(x: Tensor, weight: Tensor, bias: Tensor, eps: float, out_dtype: torch.dtype | None) -> tuple[Tensor, ...]:
    mean, rstd = (x.new_empty(*x.shape[:-1], 1, dtype=stat_dtype(x)) for _ in range(2))
    return x.new_empty(x.shape, dtype=out_dtype or x.dtype), mean, rstd


def _bwd_fake(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape)


def _bwd_recompute_fake(dy: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return *_bwd_fake(dy, *rest), dy.new_empty(dy.shape)


def _add_fwd_fake(residual: Tensor, branch: Tensor, weight: Tensor, bias: Tensor, *_: Any) -> tuple[Tensor, ...]:
    s = residual.new_empty(residual.shape, dtype=torch.promote_types(residual.dtype, branch.dtype))
    return s, *_fwd_fake(s, weight, bias, 0.0, None)


def _add_bwd_fake(dy: Tensor, dsum: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    *_, weight, branch, layer_scale, _ = rest
    ds, dweight, dbias = _bwd_fake(dy, *rest)
    dlayer_scale = weight.new_empty(0) if layer_scale is None else layer_scale.new_empty(layer_scale.shape)
    return ds, branch.new_empty(branch.shape), dweight, dbias, dlayer_scale


layer_norm_fwd = register(
    "layer_norm_fwd(Tensor x, Tensor weight, Tensor bias, float eps, ScalarType? out_dtype)"
    " -> (Tensor y, Tensor mean, Tensor rstd)",
    aten=aten.layer_norm_fwd, launch="layer_norm", fake=_fwd_fake,
    decomposition=_decompositions.layer_norm_fwd,
)  # fmt: skip
layer_norm_bwd = register(
    "layer_norm_bwd(Tensor dy, Tensor x, Tensor mean, Tensor rstd, Tensor weight, Tensor? dresidual)"
    " -> (Tensor dx, Tensor dweight, Tensor dbias)",
    aten=aten.layer_norm_bwd, launch="layer_norm", fake=_bwd_fake,
)  # fmt: skip
layer_norm_bwd_recompute = register(
    "layer_norm_bwd_recompute(Tensor dy, Tensor x, Tensor mean, Tensor rstd, Tensor weight, Tensor bias,"
    " Tensor? dresidual) -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor y)",
    aten=aten.layer_norm_bwd_recompute, launch="layer_norm", fake=_bwd_recompute_fake,
)  # fmt: skip
add_layer_norm_fwd = register(
    "add_layer_norm_fwd(Tensor residual, Tensor branch, Tensor weight, Tensor bias, Tensor? layer_scale,"
    " Tensor? row_scale, float eps) -> (Tensor sum, Tensor y, Tensor mean, Tensor rstd)",
    aten=aten.add_layer_norm_fwd, launch="layer_norm", fake=_add_fwd_fake,
    decomposition=_decompositions.add_layer_norm_fwd,
)  # fmt: skip
add_layer_norm_bwd = register(
    "add_layer_norm_bwd(Tensor dy, Tensor? dsum, Tensor sum, Tensor mean, Tensor rstd, Tensor weight, Tensor branch,"
    " Tensor? layer_scale, Tensor? row_scale)"
    " -> (Tensor ds, Tensor dbranch, Tensor dweight, Tensor dbias, Tensor dlayer_scale)",
    aten=aten.add_layer_norm_bwd, launch="layer_norm", fake=_add_bwd_fake,
)  # fmt: skip


# ---- gradients ----


class _LayerNorm(FusedFunction):
    @staticmethod
    def forward(*inputs: Any) -> Any:
        return layer_norm_fwd(*inputs)

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
        gradients = differentiable_once("layer_norm", layer_norm_bwd, dy, x, mean, rstd, weight, None)
        return *gradients, None, None


class _AddLayerNorm(FusedFunction):
    @staticmethod
    def forward(*inputs: Any) -> Any:
        return add_layer_norm_fwd(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        residual, branch, weight, _, layer_scale, row_scale, _ = inputs
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
        if ds is None and dy is None:
            return (None,) * 7
        dy = torch.zeros_like(s) if dy is None else dy
        if ctx.scaled:
            arguments = dy, ds, s, mean, rstd, weight, branch, layer_scale, row_scale
            dsum, dbranch, *rest = differentiable_once("add_layer_norm", add_layer_norm_bwd, *arguments)
        else:
            dsum, *rest = differentiable_once("add_layer_norm", layer_norm_bwd, dy, s, mean, rstd, weight, ds)
            dbranch = dsum.to(ctx.dtypes[1])
        dweight, dbias, *dlayer_scale = rest
        dlayer_scale = None if layer_scale is None else dlayer_scale[0]
        return dsum.to(ctx.dtypes[0]), dbranch, dweight, dbias, dlayer_scale, None, None


# ---- public functions ----


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
    check_norm(("x", "weight", "bias"), x, weight, bias, eps, "(D,)", dtype=not cast)
    out_dtype = torch.float32 if cast and x.is_cuda else None
    if needs_autograd("layer_norm", x, weight, bias):
        return _LayerNorm.apply(x, weight, bias, eps, out_dtype)[0]
    return layer_norm_fwd(x, weight, bias, eps, out_dtype)[0]


def add_layer_norm(
    residual: Tensor, branch: Tensor, weight: Tensor, bias: Tensor, *,
    layer_scale: Tensor | None = None, row_scale: Tensor | None = None, eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:  # fmt: skip
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
    check_like("residual", residual, ("branch", branch, residual.shape, "residual's shape"), dtype=False)
    check_norm(("residual", "weight", "bias"), s, weight, bias, eps, "(D,)", dtype=not cast)
    if layer_scale is not None:
        check_like("residual", residual, ("layer_scale", layer_scale, residual.shape[-1:], "(D,)"), dtype=False)
    check_row_scale("residual", residual, row_scale)
    arguments = residual, branch, weight, bias, layer_scale, row_scale
    if needs_autograd("add_layer_norm", *arguments[:5]):
        s, y, *_ = _AddLayerNorm.apply(*repeats_as_views(*arguments), eps)
    else:
        s, y, *_ = add_layer_norm_fwd(*arguments, eps)
    return s, y
