"""The end of a residual branch, residual + row_scale * layer_scale * branch, and the gradients of a linear layer before
it, for all ops that have them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastvit.ops.runtime.autograd import transforming
from fastvit.ops.runtime.checks import check_float, check_like, check_row_scale
from fastvit.ops.runtime.dtypes import promoted_dtype
from fastvit.ops.runtime.rows import as_rows


class Epilogue(NamedTuple):
    """The end of a branch; None for what is absent. Schemas and autograd Functions take it as `*epilogue`: they want
    tensors flat."""

    layer_scale: Tensor | None = None  # (D,)
    row_scale: Tensor | None = None  # (B,), for a branch of B samples with equally many rows
    residual: Tensor | None = None  # as the branch (..., D)

    def dtype(self, x: Tensor) -> torch.dtype:
        """Return the dtype of residual + layer_scale * x by PyTorch's promotion; row_scale never changes it."""
        return promoted_dtype(x, self.layer_scale, self.residual)

    def check(self, x: Tensor, out_features: int, *, dtype: bool) -> None:
        """Check it for a branch from x (..., in) to (..., out). dtype: whether layer_scale must have x's."""
        layer_scale, row_scale, residual = self
        if layer_scale is not None:
            check_like("x", x, ("layer_scale", layer_scale, (out_features,), "(out,)"), dtype=dtype)
        if residual is not None and (residual is not x or x.shape[-1] != out_features):
            check_like("x", x, ("residual", residual, (*x.shape[:-1], out_features), "(..., out)"), dtype=False)
            if residual.dtype is not x.dtype:
                check_float("residual", residual)
        if row_scale is not None:
            check_row_scale("x", x, row_scale)


def rows_per_sample(x: Tensor, row_scale: Tensor | None) -> int:
    """Return how many rows of x [..., D] share one entry of row_scale."""
    return 1 if row_scale is None else x.numel() // max(row_scale.shape[0] * x.shape[-1], 1)


def by_sample(x: Tensor, row_scale: Tensor) -> Tensor:
    """View x [..., D] as [samples, rows of a sample, D]."""
    return as_rows(x).view(row_scale.shape[0], rows_per_sample(x, row_scale), x.shape[-1])


def scale_samples(x: Tensor, row_scale: Tensor | None) -> Tensor:
    """Return row_scale * x for x [..., D], in x's dtype."""
    if row_scale is None:
        return x
    return (by_sample(x, row_scale) * row_scale[:, None, None]).to(x.dtype).view(x.shape)


def add_residual_(
    x: Tensor, layer_scale: Tensor | None = None, row_scale: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """Return residual + row_scale * layer_scale * x in the promoted dtype, to which products are rounded too. Overwrite
    the contiguous x if it has that dtype."""
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


class LastLayer(NamedTuple):
    """The linear layer at the end of a branch, layer_scale * (x @ weight.T + bias), and which gradients are wanted. g
    [..., N] is the gradient of the result, x [..., K] the layer's input.

    Without layer_scale the gradients of the parameters are G = g.T @ x and total = sum_m g[m] over rows m. With it,
    which scales both,
        dlayer_scale[j] = sum_m g[m, j] (x @ weight.T + bias)[m, j] = sum_k weight[j, k] G[j, k] + bias[j] total[j]
    so neither the branch nor a second pass over [M, N] is needed. If g is the residual's gradient too, the norm's
    backward pass reads it and returns its total.
    """

    weight: Tensor
    bias: Tensor | None
    layer_scale: Tensor | None
    wants_weight: bool
    wants_bias: bool
    wants_scale: bool

    def input_operands(self, g: Tensor) -> tuple[Tensor, Tensor]:
        """Return A [..., N] and B [N, K], whose product is the gradient of x. Fold layer_scale into the weight, usually
        the smaller tensor: choosing by size would add a recompilation. In float16 fold it into g: a small layer_scale
        (DINOv2 starts at 1e-5) times a weight underflows, while loss scaling protects g."""
        if self.layer_scale is None:
            return g, self.weight
        if g.dtype is torch.float16:
            return (g * self.layer_scale).to(g.dtype), self.weight
        return g, (self.weight * self.layer_scale[:, None]).to(self.weight.dtype)

    def product(self, g: Tensor, x: Any) -> Tensor | None:
        """Return G, or None if no gradient needs it; then x may be None. With layer_scale use float32 instead of
        float16: a loss scale that suits a small layer_scale exceeds float16's range."""
        if not (self.wants_weight or self.wants_scale):
            return None
        g, x = as_rows(g), as_rows(x)
        if self.layer_scale is None or g.dtype is not torch.float16:
            return g.t() @ x
        if g.is_cuda:
            return torch.mm(g.t(), x, out_dtype=torch.float32)
        return g.t().float() @ x.float()

    def total_dtype(self) -> torch.dtype | None:
        """Return the dtype of the total, or None if no gradient needs it."""
        if not self.wants_bias and (not self.wants_scale or self.bias is None):
            return None
        return self.weight.dtype if self.layer_scale is None else self._wide()

    def total(self, g: Tensor) -> Tensor | None:
        """Return the total, or None if no gradient needs it."""
        dtype = self.total_dtype()
        return None if dtype is None else as_rows(g).sum(0, dtype=dtype)

    def gradients(self, G: Any, total: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the wanted gradients of weight, bias and layer_scale. G is overwritten."""
        weight, bias, layer_scale = self.weight, self.bias, self.layer_scale
        if layer_scale is None:
            return G, total if self.wants_bias else None, None
        wide = self._wide()  # the sums over k and m cancel
        scale = layer_scale.to(wide)
        dweight = dlayer_scale = None
        if self.wants_scale:
            dlayer_scale = torch.linalg.vecdot(weight.to(wide), G.to(wide))
            if bias is not None:
                dlayer_scale = torch.addcmul(dlayer_scale, bias.to(wide), total)
            dlayer_scale = dlayer_scale.to(layer_scale.dtype)
        if self.wants_weight:
            in_place = G.dtype is weight.dtype and not transforming()  # under vmap one G may serve many scales
            dweight = G.mul_(scale[:, None]) if in_place else (G * scale[:, None]).to(weight.dtype)
        return dweight, (total * scale).to(weight.dtype) if self.wants_bias else None, dlayer_scale

    def _wide(self) -> torch.dtype:
        return torch.promote_types(self.weight.dtype, torch.float32)
