"""Gradients at the end of a residual branch: residual + row_scale * layer_scale * (x @ weight.T + bias)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def scale_samples(x: Tensor, row_scale: Tensor | None, rows: int) -> Tensor:
    """row_scale * x for x [M, D], `rows` rows a sample; x's dtype."""
    if row_scale is None:
        return x
    return (x.view(row_scale.shape[0], rows, x.shape[1]) * row_scale[:, None, None]).to(x.dtype).view(x.shape)


def input_gradient_operands(g: Tensor, weight: Tensor, layer_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """A [M, N] and B [N, K] whose product is the gradient of x [M, K], from g [M, N], the gradient of
    layer_scale * (x @ weight.T + bias). layer_scale goes to the smaller one; in float16 always to g, because a small
    layer_scale (DINOv2 starts at 1e-5) times a weight underflows there, while loss scaling protects g."""
    if layer_scale is None:
        return g, weight
    if g.dtype is torch.float16 or g.shape[0] < weight.shape[1]:
        return (g * layer_scale).to(g.dtype), weight
    return g, (weight * layer_scale[:, None]).to(weight.dtype)


def parameter_gradients(
    g: Tensor,
    x: Any,
    weight: Tensor,
    bias: Tensor | None,
    layer_scale: Tensor | None,
    wants: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of weight, bias and layer_scale as far as wanted, from g [M, N], the gradient of
    layer_scale * (x @ weight.T + bias). x [M, K] may be None when neither weight's nor layer_scale's is wanted.

    With G = g.T @ x, which without layer_scale is the weight's gradient,
        dlayer_scale[j] = sum_m g[m, j] (x @ weight.T + bias)[m, j] = sum_k weight[j, k] G[j, k] + bias[j] sum_m g[m, j]
    so neither the branch nor a second pass over [M, N] is needed.
    """
    want_weight, want_bias, want_scale = wants
    if layer_scale is None:
        return g.t() @ x if want_weight else None, g.sum(0) if want_bias else None, None
    wide = torch.promote_types(g.dtype, torch.float32)  # the sums over k and m cancel
    scale = layer_scale.to(wide)
    total: Any = g.sum(0, dtype=wide) if want_bias or (want_scale and bias is not None) else None
    dweight = dlayer_scale = None
    if want_weight or want_scale:
        G = _wide_product(g, x)
        if want_scale:
            dlayer_scale = torch.linalg.vecdot(weight.to(wide), G.to(wide))
            if bias is not None:
                dlayer_scale = torch.addcmul(dlayer_scale, bias.to(wide), total)
            dlayer_scale = dlayer_scale.to(layer_scale.dtype)
        dweight = (G * scale[:, None]).to(weight.dtype) if want_weight else None
    return dweight, (total * scale).to(weight.dtype) if want_bias else None, dlayer_scale


def _wide_product(g: Tensor, x: Tensor) -> Tensor:
    """g.T @ x; float32 in place of float16, whose range a loss scale that suits a small layer_scale exceeds."""
    if g.dtype is not torch.float16:
        return g.t() @ x
    if g.is_cuda:
        return torch.mm(g.t(), x, out_dtype=torch.float32)
    return g.t().float() @ x.float()
