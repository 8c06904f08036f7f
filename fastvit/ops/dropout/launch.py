"""Launch the kernel of dropout."""

from __future__ import annotations

import torch
from torch import Tensor

from fastvit.kernels import _configs
from fastvit.kernels.dropout import dropout_kernel
from fastvit.ops.runtime.checks import by_rows, contiguous, empty_like, row_stride
from fastvit.ops.runtime.dispatch import KernelUnsupported
from fastvit.ops.runtime.epilogue import Epilogue, rows_per_sample
from fastvit.ops.runtime.launch import cdiv, launch


def dropout(x: Tensor, seed: Tensor, p: float, *epilogue: Tensor | None) -> Tensor:
    if x.dtype is torch.float64:
        raise KernelUnsupported("float64")
    branch = layer_scale, row_scale, residual = Epilogue(*epilogue)
    out = empty_like(x, branch.dtype(x))
    if size := x.numel():
        x, residual = by_rows(x), by_rows(residual)
        layer_scale, row_scale = contiguous(layer_scale), contiguous(row_scale)
        D = x.shape[-1]
        M = size // D
        cfg = _configs.dropout(D)
        launch(
            dropout_kernel,
            cdiv(M, cfg.block_rows) * cdiv(D, 4 * cfg.block_dim),
            (x, seed, layer_scale, row_scale, residual, out),
            (M, D, rows_per_sample(x, row_scale), row_stride(x), row_stride(residual), p),
            {"BLOCK_M": cfg.block_rows, "BLOCK_D": cfg.block_dim, "num_warps": cfg.num_warps},
        )
    return out
