"""How a residual branch ends, residual + row_scale * layer_scale * branch: what the ops share of it, and the gradients
of a linear layer before it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastvit.ops._checks import as_rows, check_float, check_like, check_row_scale, promoted_dtype
from fastvit.ops._library import transforming


class Epilogue(NamedTuple):
    """What is absent is None. Schemas and autograd Functions, which want tensors flat, take it as `*epilogue`."""

    layer_scale: Tensor | None = None  # (D,)
    row_scale: Tensor | None = None  # (B,), for a branch whose rows are B samples of as many rows each
    residual: Tensor | None = None  # as the branch (..., D)

    def dtype(self, x: Tensor) -> torch.dtype:
        """Of residual + layer_scale * x by PyTorch's promotion; row_scale never changes it."""
        return promoted_dtype(x, self.layer_scale, self.residual)

    def check(self, x: Tensor, out_features: int, *, dtype: bool) -> None:
        """For a branch that makes (..., out) of x (..., in). dtype: whether layer_scale must have x's."""
        layer_scale, row_scale, residual = self
        if layer_scale is not None:
            check_like("x", x, ("layer_scale", layer_scale, (out_features,), "(out,)"), dtype=dtype)
        if residual is not None and (residual is not x or x.shape[-1] != out_features):
            check_like("x", x, ("residual", residual, (*x.shape[:-1], out_features), "(..., out)"), dtype=False)
            if residual.dtype is not x.dtype:
                check_float("residual", residual)
        if row_scale is not None:
            check_row_scale("x", x, row_scale)


EpilogueTuple = tuple[Tensor | None, Tensor | None, Tensor | None]  # an Epilogue, without the time to make one


def rows_per_sample(x: Tensor, row_scale: Tensor | None) -> int:
    """How many rows of x [..., D] share one entry of row_scale."""
    return 1 if row_scale is None else x.numel() // max(row_scale.shape[0] * x.shape[-1], 1)


def by_sample(x: Tensor, row_scale: Tensor) -> Tensor:
    """x [..., D] as [samples, rows of a sample, D]."""
    return as_rows(x).view(row_scale.shape[0], rows_per_sample(x, row_scale), x.shape[-1])


def scale_samples(x: Tensor, row_scale: Tensor | None) -> Tensor:
    """row_scale * x for x [..., D], in x's dtype."""
    if row_scale is None:
        return x
    return (by_sample(x, row_scale) * row_scale[:, None, None]).to(x.dtype).view(x.shape)


def add_residual_(
    x: Tensor, layer_scale: Tensor | None = None, row_scale: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """residual + row_scale * layer_scale * x in the promoted dtype; overwrites the contiguous x where it has that."""
    if row_scale is not None:
        by_sample(x, row_scale).mul_(row_scale[:, None, None])
    if layer_scale is not None:
        x = x.mul_(layer_scale) if layer_scale.dtype is x.dtype else x * layer_scale
    if residual is None:
        return x
    return x.add_(residual) if residual.dtype is x.dtype else x + residual


def input_gradient_operands(g: Tensor, weight: Tensor, layer_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """A [..., N] and B [N, K] whose product is the gradient of x [..., K], from g [..., N], the gradient of
    layer_scale * (x @ weight.T + bias). layer_scale goes to the weight, which is smaller but for a few images
    (a choice by size would cost a graph more under torch.compile); in float16 to g, because a small layer_scale (DINOv2
    starts at 1e-5) times a weight underflows there, while loss scaling protects g."""
    if layer_scale is None:
        return g, weight
    if g.dtype is torch.float16:
        return (g * layer_scale).to(g.dtype), weight
    return g, (weight * layer_scale[:, None]).to(weight.dtype)


def parameter_gradients(
    g: Tensor, x: Any, weight: Tensor, bias: Tensor | None, layer_scale: Tensor | None, wants: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of weight, bias and layer_scale as far as wanted, from g [..., N], the gradient of
    layer_scale * (x @ weight.T + bias). x [..., K] may be None when neither weight's nor layer_scale's is wanted.

    With G = g.T @ x, which without layer_scale is the weight's gradient,
        dlayer_scale[j] = sum_m g[m, j] (x @ weight.T + bias)[m, j] = sum_k weight[j, k] G[j, k] + bias[j] sum_m g[m, j]
    so neither the branch nor a second pass over [M, N] is needed.
    """
    want_weight, want_bias, want_scale = wants
    g = as_rows(g)
    if layer_scale is None:
        return g.t() @ as_rows(x) if want_weight else None, g.sum(0) if want_bias else None, None
    wide = torch.promote_types(g.dtype, torch.float32)  # the sums over k and m cancel
    scale = layer_scale.to(wide)
    total: Any = g.sum(0, dtype=wide) if want_bias or (want_scale and bias is not None) else None
    dweight = dlayer_scale = None
    if want_weight or want_scale:
        G = _wide_product(g, as_rows(x))
        if want_scale:
            dlayer_scale = torch.linalg.vecdot(weight.to(wide), G.to(wide))
            if bias is not None:
                dlayer_scale = torch.addcmul(dlayer_scale, bias.to(wide), total)
            dlayer_scale = dlayer_scale.to(layer_scale.dtype)
        if want_weight:
            in_place = G.dtype is weight.dtype and not transforming()  # vmap's G may have one sample for many scales
            dweight = G.mul_(scale[:, None]) if in_place else (G * scale[:, None]).to(weight.dtype)
    return dweight, (total * scale).to(weight.dtype) if want_bias else None, dlayer_scale


def _wide_product(g: Tensor, x: Tensor) -> Tensor:
    """g.T @ x; float32 in place of float16, whose range a loss scale that suits a small layer_scale exceeds."""
    if g.dtype is not torch.float16:
        return g.t() @ x
    if g.is_cuda:
        return torch.mm(g.t(), x, out_dtype=torch.float32)
    return g.t().float() @ x.float()
