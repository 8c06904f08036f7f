"""LayerNorm and RMSNorm, also of a residual sum: registration, gradients, checks, public functions."""

# No `annotations` from __future__: pdoc cannot resolve string annotations of a NamedTuple re-exported elsewhere

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastvit.ops.layer_norm import aten
from fastvit.ops.runtime import decompositions
from fastvit.ops.runtime.autograd import (
    FusedFunction,
    FusedHalf,
    autocast_dtype,
    differentiable_once,
    needs_autograd,
    repeats_as_views,
    run,
    unshared,
)
from fastvit.ops.runtime.checks import NORMS, check_eps, check_float, check_like, check_norm, check_row_scale
from fastvit.ops.runtime.devices import stat_dtype
from fastvit.ops.runtime.registry import register


class Norm(NamedTuple):
    """A norm over the last dimension, as other ops take it.

    weight, bias: (D,); the bias may be None.
    eps: added to the variance, or to the mean square.
    kind: "layer" for LayerNorm (Ba et al. 2016), "rms" for RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467), which
        has no bias.
    """

    weight: Tensor
    bias: Tensor | None = None
    eps: float = 1e-6
    kind: str = "layer"


NormTuple = tuple[Tensor, Tensor | None, float, str]  # a Norm as a plain tuple, which is faster to make
NO_NORM: Any = None, None, 0.0, ""  # no norm

# ---- registered ops, on (..., D) of any strides with statistics (..., 1); results are contiguous ----
#
# RMSNorm has no mean and no bias: forward ops return (0,) for the mean, backward ops take None for it and return (0,)
# for dbias. dresidual is the gradient of the residual branch. total is row_scale * dresidual summed over rows in
# total_dtype, or (0,) without one; it gives the gradient of a bias that was added there (runtime/epilogue.py).


def _fwd_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out_dtype: torch.dtype | None, rms: bool = False
) -> tuple[Tensor, ...]:
    rstd = x.new_empty(*x.shape[:-1], 1, dtype=stat_dtype(x))
    mean = rstd.new_empty(0 if rms else rstd.shape)
    return x.new_empty(x.shape, dtype=out_dtype or x.dtype), mean, rstd


def _gradients_fake(x: Tensor, mean: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(0 if mean is None else weight.shape)


def _total_fake(weight: Tensor, dtype: torch.dtype | None) -> Tensor:
    return weight.new_empty(0 if dtype is None else weight.shape, dtype=dtype)


def _bwd_fake(
    dy: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, dresidual: Tensor | None,
    row_scale: Tensor | None = None, total_dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    return *_gradients_fake(x, mean, weight), _total_fake(weight, total_dtype)


def _bwd_recompute_fake(
    dy: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, bias: Tensor | None,
    dresidual: Tensor | None, row_scale: Tensor | None = None, total_dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    return *_gradients_fake(x, mean, weight), dy.new_empty(dy.shape), _total_fake(weight, total_dtype)


def _add_fwd_fake(
    residual: Tensor, branch: Tensor, weight: Tensor, bias: Tensor | None, layer_scale: Tensor | None,
    row_scale: Tensor | None, eps: float, rms: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    s = residual.new_empty(residual.shape, dtype=torch.promote_types(residual.dtype, branch.dtype))
    return s, *_fwd_fake(s, weight, bias, eps, None, rms)


def _add_bwd_fake(
    dy: Tensor, dsum: Tensor | None, s: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, branch: Tensor,
    layer_scale: Tensor | None, row_scale: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    ds, dweight, dbias = _gradients_fake(s, mean, weight)
    dlayer_scale = weight.new_empty(0) if layer_scale is None else layer_scale.new_empty(layer_scale.shape)
    return ds, branch.new_empty(branch.shape), dweight, dbias, dlayer_scale


layer_norm_fwd = register(
    "layer_norm_fwd(Tensor x, Tensor weight, Tensor? bias, float eps, ScalarType? out_dtype, bool rms=False)"
    " -> (Tensor y, Tensor mean, Tensor rstd)",
    aten=aten.layer_norm_fwd,
    launch="layer_norm.launch",
    planned=True,
    fake=_fwd_fake,
    decomposition=decompositions.layer_norm_fwd,
)
layer_norm_bwd = register(
    "layer_norm_bwd(Tensor dy, Tensor x, Tensor? mean, Tensor rstd, Tensor weight, Tensor? dresidual,"
    " Tensor? row_scale=None, ScalarType? total_dtype=None)"
    " -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor total)",
    aten=aten.layer_norm_bwd,
    launch="layer_norm.launch",
    planned=True,
    fake=_bwd_fake,
)
layer_norm_bwd_recompute = register(
    "layer_norm_bwd_recompute(Tensor dy, Tensor x, Tensor? mean, Tensor rstd, Tensor weight, Tensor? bias,"
    " Tensor? dresidual, Tensor? row_scale=None, ScalarType? total_dtype=None)"
    " -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor y, Tensor total)",
    aten=aten.layer_norm_bwd_recompute,
    launch="layer_norm.launch",
    planned=True,
    fake=_bwd_recompute_fake,
)
add_layer_norm_fwd = register(
    "add_layer_norm_fwd(Tensor residual, Tensor branch, Tensor weight, Tensor? bias, Tensor? layer_scale,"
    " Tensor? row_scale, float eps, bool rms=False) -> (Tensor sum, Tensor y, Tensor mean, Tensor rstd)",
    aten=aten.add_layer_norm_fwd,
    launch="layer_norm.launch",
    fake=_add_fwd_fake,
    decomposition=decompositions.add_layer_norm_fwd,
)
add_layer_norm_bwd = register(
    "add_layer_norm_bwd(Tensor dy, Tensor? dsum, Tensor sum, Tensor? mean, Tensor rstd, Tensor weight, Tensor branch,"
    " Tensor? layer_scale, Tensor? row_scale)"
    " -> (Tensor ds, Tensor dbranch, Tensor dweight, Tensor dbias, Tensor dlayer_scale)",
    aten=aten.add_layer_norm_bwd,
    launch="layer_norm.launch",
    fake=_add_bwd_fake,
)


# ---- gradients ----

Residual = tuple[Tensor | None, Tensor | None, torch.dtype | None]  # dresidual, row_scale, total_dtype
NO_RESIDUAL: Residual = None, None, None


def norm_backward(
    dy: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, bias: Tensor | None,
    residual: Residual = NO_RESIDUAL, y: Tensor | None = None, *, want_y: bool, backend: Any = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Compute the backward pass of a norm within an op. Return gradients of x, weight and bias; the norm's output,
    which is y, or computed again if wanted, or None; and total."""
    dresidual, row_scale, dtype = residual
    residual = dresidual, None if dtype is None else row_scale, dtype
    if want_y and y is None:
        return layer_norm_bwd_recompute(dy, x, mean, rstd, weight, bias, *residual, backend=backend)
    dx, dweight, dbias, total = layer_norm_bwd(dy, x, mean, rstd, weight, *residual, backend=backend)
    return dx, dweight, dbias, y, total


class LayerNormFunction(FusedHalf):
    """The autograd function of layer_norm and rms_norm for `run`. The first input is the name of the public op."""

    @staticmethod
    def forward(name: str, *inputs: Any) -> Any:
        return layer_norm_fwd(*inputs)

    @staticmethod
    def cast(*inputs: Any) -> tuple[Any, ...]:
        return inputs

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.name, x, weight, *_, rms = inputs
        _, mean, rstd = output
        ctx.save_for_backward(x, weight, None if rms else mean, rstd)
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
        if dy is None:
            return (None,) * 7
        x, weight, mean, rstd = ctx.saved_tensors
        dx, dweight, dbias, _ = differentiable_once(ctx.name, layer_norm_bwd, dy, x, mean, rstd, weight, None)
        return None, dx, dweight, dbias if ctx.needs_input_grad[3] else None, None, None, None


class _AddLayerNorm(FusedFunction):
    @staticmethod
    def forward(*inputs: Any) -> Any:
        return add_layer_norm_fwd(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        residual, branch, weight, _, layer_scale, row_scale, _, rms = inputs
        s, _, mean, rstd = output
        # without a scale the branch's gradient is the sum's, so the branch is not needed
        ctx.scaled = layer_scale is not None or row_scale is not None
        ctx.dtypes = residual.dtype, branch.dtype
        ctx.save_for_backward(
            s, branch if ctx.scaled else None, weight, layer_scale, row_scale, None if rms else mean, rstd
        )
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, ds: Tensor | None, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
        s, branch, weight, layer_scale, row_scale, mean, rstd = ctx.saved_tensors
        if ds is None and dy is None:
            return (None,) * 8
        dy = torch.zeros_like(s) if dy is None else dy
        if ctx.scaled:
            arguments = dy, ds, s, mean, rstd, weight, branch, layer_scale, row_scale
            dsum, dbranch, *rest = differentiable_once("add_layer_norm", add_layer_norm_bwd, *arguments)
        else:
            dsum, *rest = differentiable_once("add_layer_norm", layer_norm_bwd, dy, s, mean, rstd, weight, ds)
            dbranch = dsum.to(ctx.dtypes[1])
        dweight, dbias, dlayer_scale = rest
        dbias = dbias if ctx.needs_input_grad[3] else None
        dlayer_scale = None if layer_scale is None else dlayer_scale
        return dsum.to(ctx.dtypes[0]), dbranch, dweight, dbias, dlayer_scale, None, None, None


# ---- public functions ----


def checked_norm(
    name: str, x: Tensor, norm: Any, width_name: str, width: int, *, dtype: bool, x_name: str = "x"
) -> Norm:
    """Check a norm, in an argument of that name, that is not over x's last dimension; return it with its defaults. Its
    tensors must have the device of x, called x_name, and, unless `dtype` is False, x's dtype."""
    if not isinstance(norm, tuple) or not 1 <= len(norm) <= 4:
        raise TypeError(f"{name} must be an ops.Norm, got {type(norm).__name__}")
    norm = Norm(*norm)
    weight, bias, eps, kind = norm
    of = (width,), f"({width_name},)"
    check_like(x_name, x, (f"{name}.weight", weight, *of), dtype=dtype)
    if kind not in NORMS:
        raise ValueError(f"{name}.kind must be one of {', '.join(NORMS)}, got {kind!r}")
    if bias is not None:
        check_like(x_name, x, (f"{name}.bias", bias, *of), dtype=dtype)
        if kind == "rms":
            raise ValueError(f"{name}.bias must be None for the kind 'rms': RMSNorm has no bias")
    check_eps(f"{name}.eps", eps)
    return norm


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-6, *, norm: str = "layer"
) -> Tensor:
    """Compute LayerNorm over the last dimension (Ba et al. 2016), with statistics in float32.

    Args:
        x: (..., D), float32, float16, bfloat16 or float64, any strides.
        weight, bias: (D,), x's dtype; the bias may be None.
        eps: added to the variance; not negative.
        norm: "layer", or "rms" for RMSNorm, without a bias: `rms_norm`.

    Returns:
        (..., D), contiguous, x's dtype. Under autocast as eager: float32 on a GPU, x's dtype on the CPU.

    Raises:
        TypeError, ValueError: naming the argument, for dtypes, devices and shapes that do not fit.
    """
    check_float("x", x)
    cast = autocast_dtype(x) is not None
    check_norm(("x", "weight", "bias"), x, weight, bias, eps, norm, "(D,)", dtype=not cast)
    rms = norm == "rms"
    name = "rms_norm" if rms else "layer_norm"
    arguments = x, weight, bias, eps, torch.float32 if cast and x.is_cuda else None, rms
    if needs_autograd(name, x, weight, bias):
        y: Tensor = run(LayerNormFunction, True, name, *arguments)
        return y
    return layer_norm_fwd(*arguments)[0]


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Compute RMSNorm over the last dimension (Zhang and Sennrich 2019, arXiv:1910.07467),
    x * rsqrt(mean(x^2) + eps) * weight, with the mean in float32.

    Args:
        x: (..., D), float32, float16, bfloat16 or float64, any strides.
        weight: (D,), x's dtype.
        eps: added to the mean square; not negative.

    Returns:
        (..., D), contiguous, x's dtype. Under autocast as `layer_norm`.

    Raises:
        TypeError, ValueError: naming the argument, for dtypes, devices and shapes that do not fit.
    """
    return layer_norm(x, weight, None, eps, norm="rms")


def add_layer_norm(
    residual: Tensor, branch: Tensor, weight: Tensor, bias: Tensor | None = None, *,
    layer_scale: Tensor | None = None, row_scale: Tensor | None = None, eps: float = 1e-6, norm: str = "layer",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute a residual sum and its norm in one pass: s = residual + row_scale * layer_scale * branch, and
    LayerNorm(s).

    Args:
        residual, branch: (B, ..., D), any strides. Their dtypes may differ; the sum has the promoted one.
        weight, bias: (D,), the sum's dtype; the bias may be None.
        layer_scale: (D,) LayerScale's gamma (Touvron et al. 2021), or None.
        row_scale: (B,) one factor a sample, as DropPath draws them: 0 or 1 / keep (Huang et al. 2016), or None.
            Not differentiated.
        eps: added to the variance; not negative.
        norm: "layer", or "rms" for RMSNorm as in `rms_norm`, without a bias.

    Returns:
        s and its norm, both (B, ..., D), contiguous, in the promoted dtype.

    Raises:
        TypeError, ValueError: naming the argument, for dtypes, devices and shapes that do not fit.
    """
    check_float("residual", residual)
    check_float("branch", branch)
    cast = autocast_dtype(residual) is not None
    dtype = torch.promote_types(residual.dtype, branch.dtype)
    s = residual if residual.dtype is dtype else branch
    if s.dtype is not dtype:  # float16 and bfloat16, whose sum is float32
        s = residual.new_empty(residual.shape[-1:], dtype=dtype)
    check_like("residual", residual, ("branch", branch, residual.shape, "residual's shape"), dtype=False)
    check_norm(("residual", "weight", "bias"), s, weight, bias, eps, norm, "(D,)", dtype=not cast)
    if layer_scale is not None:
        check_like("residual", residual, ("layer_scale", layer_scale, residual.shape[-1:], "(D,)"), dtype=False)
    check_row_scale("residual", residual, row_scale)
    arguments = residual, branch, weight, bias, layer_scale, row_scale
    if needs_autograd("add_layer_norm", *arguments[:5]):
        s, y, *_ = _AddLayerNorm.apply(*repeats_as_views(*arguments), eps, norm == "rms")
        return unshared(s), y
    s, y, *_ = add_layer_norm_fwd(*arguments, eps, norm == "rms")
    return s, y
