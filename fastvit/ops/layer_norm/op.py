"""LayerNorm and RMSNorm, also of a residual sum: registration, gradients, checks, public functions."""

# No `annotations` from __future__: pdoc cannot resolve string annotations of a NamedTuple re-exported elsewhere

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastvit.ops.layer_norm import aten
from fastvit.ops.runtime.autograd import Computed, FusedNode, inputs, needs_autograd
from fastvit.ops.runtime.backend import Route
from fastvit.ops.runtime.checks import check_float, check_like, check_norm, check_row_scale
from fastvit.ops.runtime.dtypes import autocast_dtype, stat_dtype
from fastvit.ops.runtime.registry import register
from fastvit.ops.runtime.run import Prepared, run


class Norm(NamedTuple):
    """A norm over the last dimension, as other ops take it.

    Attributes:
        weight, bias: (D,); the bias may be None.
        eps: added to the variance, or to the mean square.
        kind: "layer" for LayerNorm (Ba et al. 2016), "rms" for RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467),
            which has no bias.
    """

    weight: Tensor
    bias: Tensor | None = None
    eps: float = 1e-6
    kind: str = "layer"


NormTuple = tuple[Tensor, Tensor | None, float, str]  # a Norm as a plain tuple, which is faster to make
NO_NORM: Any = None, None, 0.0, ""  # no norm

# ---- registered ops, on (..., D) of any strides with statistics (..., 1); results are contiguous ----
#
# RMSNorm has no mean and no bias: its mean and dbias are None. dresidual is the gradient of the residual branch. total
# is row_scale * dresidual summed over rows in total_dtype, or None without one; it gives the gradient of a bias that
# was added there (runtime/epilogue.py).


def _fwd_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out_dtype: torch.dtype | None, rms: bool = False
) -> tuple[Tensor | None, ...]:
    rstd = x.new_empty(*x.shape[:-1], 1, dtype=stat_dtype(x))
    return x.new_empty(x.shape, dtype=out_dtype or x.dtype), None if rms else rstd.new_empty(rstd.shape), rstd


def _bwd_fake(
    dy: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, bias: Tensor | None,
    dresidual: Tensor | None, row_scale: Tensor | None = None, total_dtype: torch.dtype | None = None,
    want_y: bool = False,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    total = None if total_dtype is None else weight.new_empty(weight.shape, dtype=total_dtype)
    return x, weight, None if mean is None else weight, dy if want_y else None, total


def _add_fwd_fake(
    residual: Tensor, branch: Tensor, weight: Tensor, bias: Tensor | None, layer_scale: Tensor | None,
    row_scale: Tensor | None, eps: float, rms: bool = False,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    s = residual.new_empty(residual.shape, dtype=torch.promote_types(residual.dtype, branch.dtype))
    return s, *_fwd_fake(s, weight, bias, eps, None, rms)


def _add_bwd_fake(
    dy: Tensor, dsum: Tensor | None, s: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, branch: Tensor,
    layer_scale: Tensor | None, row_scale: Tensor | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    return s, branch, weight, None if mean is None else weight, layer_scale


layer_norm_fwd = register(
    "layer_norm_fwd(Tensor x, Tensor weight, Tensor? bias, float eps, ScalarType? out_dtype, bool rms=False)"
    " -> (Tensor y, Tensor mean, Tensor rstd)",
    aten=aten.layer_norm_fwd,
    fake=_fwd_fake,
    plain=aten.plain_norm,
)
layer_norm_bwd = register(
    "layer_norm_bwd(Tensor dy, Tensor x, Tensor? mean, Tensor rstd, Tensor weight, Tensor? bias, Tensor? dresidual,"
    " Tensor? row_scale=None, ScalarType? total_dtype=None, bool want_y=False)"
    " -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor y, Tensor total)",
    aten=aten.layer_norm_bwd,
    fake=_bwd_fake,
)
add_layer_norm_fwd = register(
    "add_layer_norm_fwd(Tensor residual, Tensor branch, Tensor weight, Tensor? bias, Tensor? layer_scale,"
    " Tensor? row_scale, float eps, bool rms=False) -> (Tensor sum, Tensor y, Tensor mean, Tensor rstd)",
    aten=aten.add_layer_norm_fwd,
    fake=_add_fwd_fake,
    plain=aten.plain_add_norm,
)
add_layer_norm_bwd = register(
    "add_layer_norm_bwd(Tensor dy, Tensor? dsum, Tensor sum, Tensor? mean, Tensor rstd, Tensor weight, Tensor branch,"
    " Tensor? layer_scale, Tensor? row_scale)"
    " -> (Tensor ds, Tensor dbranch, Tensor dweight, Tensor dbias, Tensor dlayer_scale)",
    aten=aten.add_layer_norm_bwd,
    fake=_add_bwd_fake,
)


# ---- gradients ----


class Residual(NamedTuple):
    """The residual branch in a norm's backward pass, which joins the gradient of the norm's input.

    dresidual: the gradient of the residual branch, or None.
    row_scale, total_dtype: for `total`, the sum of row_scale * dresidual over rows; no sum for None.
    """

    dresidual: Tensor | None = None
    row_scale: Tensor | None = None
    total_dtype: torch.dtype | None = None


_NO_RESIDUAL = Residual()


def norm_backward(
    dy: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, bias: Tensor | None,
    residual: Residual = _NO_RESIDUAL, y: Tensor | None = None, *, want_y: bool, route: Route,
) -> tuple[Any, ...]:  # fmt: skip
    """Compute the backward pass of a norm within an op. Return the gradients of x, weight and bias; the norm's output,
    which is y, or computed again if wanted, or None; and the residual's total."""
    dresidual, row_scale, dtype = residual
    row_scale, want_y = None if dtype is None else row_scale, want_y and y is None
    dx, dweight, dbias, y_again, total = layer_norm_bwd(
        dy, x, mean, rstd, weight, bias, dresidual, row_scale, dtype, want_y, route=route
    )
    return dx, dweight, dbias, y_again if want_y else y, total


class NormOptions(NamedTuple):
    op: str
    eps: float
    out_dtype: torch.dtype | None
    rms: bool


NormInputs = inputs("x", "weight", "bias")


class LayerNormNode(FusedNode):
    """LayerNorm or RMSNorm."""

    Inputs = NormInputs
    intermediates = ("mean", "rstd")
    saved = ("x", "weight", "mean", "rstd")

    @staticmethod
    def compute(t: Any) -> Computed:
        _, eps, out_dtype, rms = t.options
        y, mean, rstd = layer_norm_fwd(t.x, t.weight, t.bias, eps, out_dtype, rms, route=t.route)
        return (y,), {"mean": mean, "rstd": rstd}

    @staticmethod
    def needed(t: Any, intermediates: dict[str, Any], needs_grad: Any) -> dict[str, bool]:
        return {"mean": not t.options.rms}

    @staticmethod
    def gradients(s: dict[str, Any], douts: Any, o: NormOptions, needs_grad: Any, route: Route) -> dict[str, Any]:
        saved = s["x"], s["mean"], s["rstd"], s["weight"], None
        dx, dweight, dbias, *_ = layer_norm_bwd(*douts, *saved, None, route=route)
        return {"x": dx, "weight": dweight, "bias": dbias if needs_grad.bias else None}


class _AddOptions(NamedTuple):
    op: str
    eps: float
    rms: bool
    dtypes: tuple[torch.dtype, torch.dtype]  # of residual and branch


class _AddLayerNorm(FusedNode):
    """The sum, and its norm."""

    Inputs = inputs("residual", "branch", "weight", "bias", "layer_scale", "row_scale")
    intermediates = ("mean", "rstd")
    saved = ("branch", "weight", "layer_scale", "row_scale", "result", "mean", "rstd")
    single = False

    @staticmethod
    def compute(t: Any) -> Computed:
        o, route, *tensors = t
        s, y, mean, rstd = add_layer_norm_fwd(*tensors, o.eps, o.rms, route=route)
        return (s, y), {"mean": mean, "rstd": rstd}

    @staticmethod
    def needed(t: Any, intermediates: dict[str, Any], needs_grad: Any) -> dict[str, bool]:
        return {"branch": t.layer_scale is not None or t.row_scale is not None, "mean": not t.options.rms}

    @staticmethod
    def gradients(s: dict[str, Any], douts: Any, o: _AddOptions, needs_grad: Any, route: Route) -> dict[str, Any]:
        (dsum, dy), total, norm = douts, s["result"], (s["mean"], s["rstd"], s["weight"])
        dy = torch.zeros_like(total) if dy is None else dy
        dlayer_scale = None
        if s["branch"] is None:
            dsum, dweight, dbias, *_ = layer_norm_bwd(dy, total, *norm, None, dsum, route=route)
            dbranch = dsum.to(o.dtypes[1])
        else:
            dsum, dbranch, dweight, dbias, dlayer_scale = add_layer_norm_bwd(
                dy, dsum, total, *norm, s["branch"], s["layer_scale"], s["row_scale"], route=route
            )
        by_name = {"residual": dsum.to(o.dtypes[0]), "branch": dbranch, "weight": dweight}
        if s["layer_scale"] is not None:
            by_name["layer_scale"] = dlayer_scale
        return by_name | {"bias": dbias if needs_grad.bias else None}


# ---- public functions ----

_NAMES = "weight", "bias", "eps", "norm"


def checked_norm(
    name: str, x: Tensor, norm: Any, width_name: str, width: int, *, dtype: bool, x_name: str = "x"
) -> Norm:
    """Check a norm, in an argument of that name, that is not over x's last dimension; return it with its defaults. Its
    tensors must have the device of x, called x_name, and, unless `dtype` is False, x's dtype."""
    if not isinstance(norm, tuple) or not 1 <= len(norm) <= 4:
        raise TypeError(f"{name} must be an ops.Norm, got {type(norm).__name__}")
    norm = Norm(*norm)
    names = [f"{name}.{field}" for field in norm._fields]
    check_norm(x_name, x, names, norm, (width,), f"({width_name},)", dtype=dtype)
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
    y: Tensor = run("layer_norm", _prepared, (x, weight, bias), (eps, norm))
    return y


def _prepared(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, norm: str) -> Prepared:
    check_float("x", x)
    cast = autocast_dtype(x) is not None
    check_norm("x", x, _NAMES, (weight, bias, eps, norm), x.shape[-1:], "(D,)", dtype=not cast)
    op = "rms_norm" if norm == "rms" else "layer_norm"
    options = NormOptions(op, eps, torch.float32 if cast and x.is_cuda else None, norm == "rms")
    return LayerNormNode, needs_autograd(op, x, weight, bias), options, (x, weight, bias)


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
    tensors = residual, branch, weight, bias, layer_scale, row_scale
    total, y = run("add_layer_norm", _prepared_sum, tensors, (eps, norm))
    return total, y


def _prepared_sum(
    residual: Tensor, branch: Tensor, weight: Tensor, bias: Tensor | None, layer_scale: Tensor | None,
    row_scale: Tensor | None, eps: float, norm: str,
) -> Prepared:  # fmt: skip
    check_float("residual", residual)
    check_float("branch", branch)
    cast = autocast_dtype(residual) is not None
    dtype = torch.promote_types(residual.dtype, branch.dtype)
    s = residual if residual.dtype is dtype else branch
    if s.dtype is not dtype:  # float16 and bfloat16, whose sum is float32
        s = residual.new_empty(residual.shape[-1:], dtype=dtype)
    check_like("residual", residual, ("branch", branch, residual.shape, "residual's shape"), dtype=False)
    check_norm("residual", s, _NAMES, (weight, bias, eps, norm), s.shape[-1:], "(D,)", dtype=not cast)
    if layer_scale is not None:
        check_float("layer_scale", layer_scale)
        check_like("residual", residual, ("layer_scale", layer_scale, residual.shape[-1:], "(D,)"), dtype=False)
    check_row_scale("residual", residual, row_scale)
    options = _AddOptions("add_layer_norm", eps, norm == "rms", (residual.dtype, branch.dtype))
    autograd = needs_autograd("add_layer_norm", residual, branch, weight, bias, layer_scale)
    return _AddLayerNorm, autograd, options, (residual, branch, weight, bias, layer_scale, row_scale)
