"""LayerNorm and the linear layer behind it as one autograd node, which does not store the normalised rows."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch.nn.functional as F
from torch import Tensor

from fastvit.ops._checks import as_rows, check_eps, check_float, check_like, from_rows
from fastvit.ops._layer_norm import layer_norm_bwd, layer_norm_bwd_recompute, layer_norm_fwd
from fastvit.ops._library import FusedFunction, autocast_dtype, needs_autograd, once
from fastvit.ops.linear import check_linear


def check_norm(x: Tensor, norm_weight: Tensor, norm_bias: Tensor, eps: float, *, dtype: bool) -> None:
    shape = (x.shape[-1],)
    check_like("norm_weight", norm_weight, "x", x, shape, "(in,)", dtype=dtype)
    check_like("norm_bias", norm_bias, "x", x, shape, "(in,)", dtype=dtype)
    check_eps(eps)


def _forward(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """-> out (..., out), mean [M, 1], rstd [M, 1]"""
    y, mean, rstd = layer_norm_fwd(as_rows(x), norm_weight, norm_bias, eps, weight.dtype)
    return from_rows(F.linear(y, weight, bias), x), mean, rstd


def _backward(
    dout: Tensor,
    dresidual: Tensor | None,
    x: Tensor | None,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
    wants: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """-> gradients of x [M, in], the norm's and the matmul's weight and bias; None if not wanted."""
    rows: Any = None if x is None else as_rows(x)
    dout = as_rows(dout)
    dx: Any = None
    y: Any = None
    dnorm_weight = dnorm_bias = None
    if any(wants[:3]):
        dy = dout @ weight
        dresidual = None if dresidual is None else as_rows(dresidual)
        if wants[3]:
            dx, dnorm_weight, dnorm_bias, y = layer_norm_bwd_recompute(
                dy, rows, mean, rstd, norm_weight, norm_bias, dresidual
            )
        else:
            dx, dnorm_weight, dnorm_bias = layer_norm_bwd(dy, rows, mean, rstd, norm_weight, dresidual)
    elif wants[3]:
        y, *_ = layer_norm_fwd(rows, norm_weight, norm_bias, eps, weight.dtype)
    return dx, dnorm_weight, dnorm_bias, dout.t() @ y if wants[3] else None, dout.sum(0) if wants[4] else None


class _LayerNormLinear(FusedFunction):
    @staticmethod
    def forward(
        x: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        return_residual: bool,
    ) -> tuple[Tensor, ...]:
        outputs = _forward(x, norm_weight, norm_bias, weight, bias, eps)
        # a view, because autograd refuses to save an input that is returned as it is
        return (*outputs, x.view_as(x)) if return_residual else outputs

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, norm_weight, norm_bias, weight, _, ctx.eps, _ = inputs
        ctx.shape = x.shape
        _, mean, rstd, *_ = output
        keep_x = any(ctx.needs_input_grad[:4])
        ctx.save_for_backward(x if keep_x else None, norm_weight, norm_bias, weight, mean, rstd)
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(
        ctx: Any, dout: Tensor | None, dmean: None, drstd: None, dresidual: Tensor | None = None
    ) -> tuple[Any, ...]:
        if dout is None:
            return dresidual, None, None, None, None, None, None
        dx, *rest = once(
            "layer_norm_linear", _backward, dout, dresidual, *ctx.saved_tensors, ctx.eps, ctx.needs_input_grad[:5]
        )
        return None if dx is None else dx.view(ctx.shape), *rest, None, None


@overload
def layer_norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-6,
    return_residual: Literal[False] = False,
) -> Tensor: ...
@overload
def layer_norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-6,
    return_residual: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def layer_norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-6,
    return_residual: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """LayerNorm(x) @ weight.T + bias (Ba et al. 2016) as one autograd node, which saves x and the row statistics.

    The normalised rows are computed again in the LayerNorm's backward pass, for the weight's gradient.

    Args:
        x: (..., in), float32, float16, bfloat16 or float64, any strides.
        norm_weight, norm_bias: (in,), x's dtype.
        weight: (out, in), x's dtype.
        bias: (out,), x's dtype, or None.
        eps: added to the variance; not negative.
        return_residual: also return x, for use as the residual: the gradient that reaches it there joins inside the
            LayerNorm's backward pass instead of in an addition of its own.

    Returns:
        (..., out), contiguous, x's dtype; with return_residual a pair of it and x. Under autocast x keeps its dtype,
        and weight, bias and output have autocast's, to which the LayerNorm's output is rounded.

    Raises:
        TypeError, ValueError: naming the argument, for dtypes, devices and shapes that do not fit.
    """
    check_float("x", x)
    cast = autocast_dtype(x)
    check_linear(x, weight, bias, dtype=cast is None)
    check_norm(x, norm_weight, norm_bias, eps, dtype=cast is None)
    if cast is not None:
        weight, bias = weight.to(cast), None if bias is None else bias.to(cast)
    if needs_autograd(x, norm_weight, norm_bias, weight, bias):
        out, _, _, *residual = _LayerNormLinear.apply(x, norm_weight, norm_bias, weight, bias, eps, return_residual)
        return (out, *residual) if return_residual else out
    out = _forward(x, norm_weight, norm_bias, weight, bias, eps)[0]
    return (out, x) if return_residual else out
