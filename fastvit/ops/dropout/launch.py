"""Launch the kernel of dropout."""

from __future__ import annotations

import torch
from torch import Tensor

from fastvit.kernels import _configs
from fastvit.kernels.dropout import dropout_kernel
from fastvit.ops.runtime.backend import KernelUnsupported
from fastvit.ops.runtime.epilogue import Epilogue, rows_per_sample
from fastvit.ops.runtime.launch import Launch, cdiv
from fastvit.ops.runtime.rows import by_rows, contiguous, empty_like, row_stride


def dropout(x: Tensor, seed: Tensor, p: float, *epilogue: Tensor | None) -> Tensor:
    layer_scale, row_scale, residual = epilogue if len(epilogue) == 3 else Epilogue(*epilogue)
    rows, residual = map(by_rows, (x, residual))
    layer_scale, row_scale = map(contiguous, (layer_scale, row_scale))
    launch, dtype = _launch(rows, p, Epilogue(layer_scale, row_scale, residual))
    out = empty_like(x, dtype)
    launch(rows, seed, layer_scale, row_scale, residual, out)
    return out


def _launch(x: Tensor, p: float, branch: Epilogue) -> tuple[Launch, torch.dtype]:
    """Configure the kernel. Also return the dtype of its result."""
    if x.dtype is torch.float64:
        raise KernelUnsupported("float64")
    D = x.shape[-1]
    M = x.numel() // max(D, 1)
    cfg = _configs.dropout(D)
    numbers = M, D, rows_per_sample(x, branch.row_scale), row_stride(x), row_stride(branch.residual), p
    constants = {"BLOCK_M": cfg.block_rows, "BLOCK_D": cfg.block_dim, "num_warps": cfg.num_warps}
    programs = cdiv(M, cfg.block_rows) * cdiv(D, 4 * cfg.block_dim)
    return Launch(dropout_kernel, programs, numbers, constants), branch.dtype(x)
