"""Launches the kernel of dropout."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from fastvit.kernels import _configs
from fastvit.kernels.dropout import dropout_kernel
from fastvit.ops._checks import as_rows, contiguous
from fastvit.ops._epilogue import Epilogue, rows_per_sample
from fastvit.ops._library import Unsupported


def dropout(x: Tensor, seed: Tensor, p: float, *epilogue: Tensor | None) -> Tensor:
    if x.dtype is torch.float64:
        raise Unsupported("float64")
    ends = layer_scale, row_scale, residual = Epilogue(*epilogue)
    out = torch.empty(x.shape, dtype=ends.dtype(x), device=x.device)
    if x.numel():
        x, residual = as_rows(x), None if residual is None else as_rows(residual)
        layer_scale, row_scale = contiguous(layer_scale, row_scale)
        M, D = x.shape
        cfg = _configs.dropout(D)
        grid = (triton.cdiv(M, cfg.block_rows) * triton.cdiv(D, 4 * cfg.block_dim),)
        dropout_kernel[grid](
            x, seed, layer_scale, row_scale, residual, out,
            M, D, rows_per_sample(x, row_scale), x.stride(0), 0 if residual is None else residual.stride(0), p,
            BLOCK_M=cfg.block_rows, BLOCK_D=cfg.block_dim, num_warps=cfg.num_warps,
        )  # fmt: skip
    return out
