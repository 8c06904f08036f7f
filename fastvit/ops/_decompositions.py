"""The forward ops in the functions that exporters know, LayerNorm, GELU and attention among them: what is traced in
place of them while `torch.onnx.export` runs, and `decompositions`. Nothing is computed in place, as torch demands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastvit.ops._activations import activate
from fastvit.ops._checks import promoted_dtype
from fastvit.ops._epilogue import scale_samples
from fastvit.ops._library import DECOMPOSITIONS, stat_dtype


def decompositions() -> dict[Any, Callable[..., Any]]:
    """fastvit's forward ops as PyTorch's own, a table for `torch.export.ExportedProgram.run_decompositions`:

        program = torch.export.export(model.eval(), (images,))  # calls torch.ops.fastvit
        program = program.run_decompositions(fastvit.ops.decompositions())  # calls torch.ops.aten alone

    The first program runs the fused kernels wherever `import fastvit` came before `torch.export.load`, which otherwise
    fails with "We failed to resolve torch.ops.fastvit...": the loader imports nothing by itself. The second one needs
    no fastvit, and goes into what takes ATen programs: `torch.onnx.export`, ExecuTorch, ... `torch.onnx.export` of a
    module needs no table, and traces these forms by itself.

    Returns:
        {overload: function}. Dropout, where it is on, draws other masks.
    """
    return dict(DECOMPOSITIONS)


def _activate(x: Tensor, name: str) -> Tensor:
    if name == "quick_gelu":
        return x * (1.702 * x).sigmoid()
    return x if name == "none" else activate(x, name)


def _add_residual(
    x: Tensor, layer_scale: Tensor | None = None, row_scale: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    x = scale_samples(x, row_scale)
    x = x if layer_scale is None else x * layer_scale
    return x if residual is None else x + residual


def layer_norm_fwd(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, out_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    out_dtype, wide = out_dtype or x.dtype, x.to(stat_dtype(x))
    rstd = (wide.var(-1, correction=0, keepdim=True) + eps).rsqrt()
    if weight.dtype is not x.dtype:
        x, weight, bias = wide, weight.to(wide.dtype), bias.to(wide.dtype)
    return F.layer_norm(x, weight.shape, weight, bias, eps).to(out_dtype), wide.mean(-1, keepdim=True), rstd


def add_layer_norm_fwd(
    residual: Tensor, branch: Tensor, weight: Tensor, bias: Tensor, layer_scale: Tensor | None,
    row_scale: Tensor | None, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    s = _add_residual(branch, layer_scale, row_scale, residual)
    return s, *layer_norm_fwd(s, weight, bias, eps, None)


def linear_fwd(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, *epilogue: Tensor | None) -> Tensor:
    return _add_residual(_activate(F.linear(x, weight, bias), activation), *epilogue)


def linear_act_fwd(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    pre = F.linear(x, weight, bias)
    return _activate(pre, activation), pre


def dropout(x: Tensor, seed: Tensor, p: float, *epilogue: Tensor | None) -> Tensor:
    return _add_residual(F.dropout(x, p), *epilogue)


def attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None, scale: float, dropout_p: float
) -> tuple[Tensor, Tensor]:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    lse = (q.to(stat_dtype(q)) @ k.to(stat_dtype(q)).transpose(2, 3) * scale).logsumexp(-1)
    return F.scaled_dot_product_attention(q, k, v, None, dropout_p, scale=scale).transpose(1, 2).contiguous(), lse


def attention_qkvpacked_fwd(qkv: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return attention_fwd(*qkv.unbind(2), *rest)


def patch_embed_fwd(
    image: Tensor, weight: Tensor, bias: Tensor | None,
    pos_embed: Tensor | None, prefix: Tensor | None, normalize: Tensor | None,
) -> Tensor:  # fmt: skip
    if normalize is not None:
        scale, shift = normalize[:, :, None, None]
        image = image.to(normalize.dtype) * scale + shift
    bias = None if bias is None else bias.to(weight.dtype)
    tokens = F.conv2d(image.to(weight.dtype), weight, bias, weight.shape[2:]).flatten(2).transpose(1, 2)
    if pos_embed is not None:
        tokens = tokens + pos_embed
    dtype = promoted_dtype(weight, pos_embed, prefix)
    if prefix is not None:
        tokens = torch.cat([prefix.to(dtype).expand(tokens.shape[0], -1, -1), tokens.to(dtype)], dim=1)
    return tokens.to(dtype).contiguous()
