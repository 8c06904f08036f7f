"""How a residual branch ends, residual + row_scale * layer_scale * branch: what the ops share of it, and the gradients
of a linear layer before it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastvit.ops.runtime.autograd import transforming
from fastvit.ops.runtime.checks import as_rows, check_float, check_like, check_row_scale, promoted_dtype


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
    """residual + row_scale * layer_scale * x in the promoted dtype, in which products are rounded too; overwrites the
    contiguous x where it has that."""
    if layer_scale is not None or row_scale is not None:
        for t in (layer_scale, residual):
            if t is not None and t.dtype is not x.dtype:
                x = x.to(torch.promote_types(x.dtype, t.dtype))
        if layer_scale is not None:
            x.mul_(layer_scale)
        if row_scale is not None:
            by_sample(x, row_scale).mul_(row_scale[:, None, None])
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


def total_dtype(
    weight: Tensor, bias: Tensor | None, layer_scale: Tensor | None, wants: tuple[bool, ...]
) -> torch.dtype | None:
    """Of the total that `parameter_gradients` takes, or None where it needs none."""
    _, want_bias, want_scale = wants
    if not want_bias and (not want_scale or bias is None):
        return None
    return weight.dtype if layer_scale is None else _wide(weight)


def total_over_rows(g: Tensor, dtype: torch.dtype | None) -> Tensor | None:
    """g [..., N] summed over all rows."""
    return None if dtype is None else as_rows(g).sum(0, dtype=dtype)


def product_over_rows(g: Tensor, x: Any, layer_scale: Tensor | None, wants: tuple[bool, ...]) -> Tensor | None:
    """G = g.T @ x, or None where `parameter_gradients` needs none, and then x may be None; with layer_scale float32 in
    place of float16, whose range a loss scale that suits a small layer_scale exceeds."""
    want_weight, _, want_scale = wants
    if not (want_weight or want_scale):
        return None
    g, x = as_rows(g), as_rows(x)
    if layer_scale is None or g.dtype is not torch.float16:
        return g.t() @ x
    if g.is_cuda:
        return torch.mm(g.t(), x, out_dtype=torch.float32)
    return g.t().float() @ x.float()


def parameter_gradients(
    G: Any, total: Any, weight: Tensor, bias: Tensor | None, layer_scale: Tensor | None, wants: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of weight, bias and layer_scale as far as wanted, from sums over the rows m of g [..., N], the gradient
    of layer_scale * (x @ weight.T + bias): G = g.T @ x and total = sum_m g[m]. G is used up.

    Without layer_scale they are the gradients themselves. With it, which scales both,
        dlayer_scale[j] = sum_m g[m, j] (x @ weight.T + bias)[m, j] = sum_k weight[j, k] G[j, k] + bias[j] total[j]
    so neither the branch nor a second pass over [M, N] is needed. Where g is the residual's gradient too, the norm's
    backward pass reads it and has its total.
    """
    want_weight, want_bias, want_scale = wants
    if layer_scale is None:
        return G, total if want_bias else None, None
    wide = _wide(weight)  # the sums over k and m cancel
    scale = layer_scale.to(wide)
    dweight = dlayer_scale = None
    if want_scale:
        dlayer_scale = torch.linalg.vecdot(weight.to(wide), G.to(wide))
        if bias is not None:
            dlayer_scale = torch.addcmul(dlayer_scale, bias.to(wide), total)
        dlayer_scale = dlayer_scale.to(layer_scale.dtype)
    if want_weight:
        in_place = G.dtype is weight.dtype and not transforming()  # vmap's G may have one sample for many scales
        dweight = G.mul_(scale[:, None]) if in_place else (G * scale[:, None]).to(weight.dtype)
    return dweight, (total * scale).to(weight.dtype) if want_bias else None, dlayer_scale


def _wide(weight: Tensor) -> torch.dtype:
    return torch.promote_types(weight.dtype, torch.float32)
