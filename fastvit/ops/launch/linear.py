"""Launches the kernels of the linear ops. What a kernel adds nothing to is the vendor's matmul."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from fastvit.kernels import _configs
from fastvit.kernels.linear import act_bwd_kernel, linear_dact_kernel, linear_fwd_kernel
from fastvit.ops import _library
from fastvit.ops._checks import as_rows, contiguous
from fastvit.ops._epilogue import Epilogue, rows_per_sample
from fastvit.ops._library import Unsupported, dot_precision
from fastvit.ops.aten import linear as aten
from fastvit.ops.launch.column_sum import column_sums


def linear_fwd(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, *epilogue: Tensor | None) -> Tensor:
    ends = Epilogue(*epilogue)
    plain = activation == "none" and ends.layer_scale is None and ends.row_scale is None and ends.residual is None
    if not _uses_kernel(x, weight.shape[0], has_epilogue=not plain):
        return aten.linear_fwd(x, weight, bias, activation, *epilogue)
    out = x.new_empty(*x.shape[:-1], weight.shape[0], dtype=ends.dtype(x))
    if out.numel():
        grid, arguments, constants = _forward(x, weight, bias, activation, out, None, ends)
        linear_fwd_kernel[grid](*arguments, **constants)
    return out


def linear_act_fwd(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    if not _uses_kernel(x, weight.shape[0]):
        return aten.linear_act_fwd(x, weight, bias, activation)
    h, pre = (x.new_empty(*x.shape[:-1], weight.shape[0]) for _ in range(2))
    if h.numel():
        grid, arguments, constants = _forward(x, weight, bias, activation, h, pre, Epilogue())
        linear_fwd_kernel[grid](*arguments, **constants)
    return h, pre


def linear_dact(dy: Tensor, weight: Tensor, pre: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    dpre, h = (torch.empty(pre.shape, dtype=pre.dtype, device=pre.device) for _ in range(2))
    if not _uses_kernel(dy, pre.shape[-1]):
        return dpre, h, _activation_backward(dy @ weight, pre, activation, dpre, h)
    if pre.numel() == 0:
        return dpre, h, pre.new_zeros(pre.shape[-1])
    dy, pre, weight = _aligned_rows(dy), _aligned_rows(pre), _aligned_rows(weight)
    (M, K), N = dy.shape, pre.shape[1]
    grid, constants = _gemm(M, N, K, dy, activation)
    partial = torch.empty(1, triton.cdiv(M, constants["BLOCK_M"]), N, dtype=torch.float32, device=dy.device)
    linear_dact_kernel[grid](
        dy, weight, pre, dpre, h, partial, M, N, K, dy.stride(0), weight.stride(0), pre.stride(0), **constants
    )
    return dpre, h, column_sums(partial, pre)[0]


def act_bwd(dy: Tensor, pre: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    if pre.dtype is torch.float64:
        raise Unsupported("float64")
    dpre = torch.empty(pre.shape, dtype=pre.dtype, device=pre.device)
    return dpre, _activation_backward(dy, pre, activation, dpre, None)


def _uses_kernel(x: Tensor, n: int, *, has_epilogue: bool = True) -> bool:
    """Whether x [..., K] @ [K, n] is our kernel's. The interpreter runs all, so that tests reach every dtype."""
    if x.dtype is torch.float64:
        raise Unsupported("float64")
    if _library.INTERPRET:
        return True
    return has_epilogue and _configs.use_triton_gemm(n, x.shape[-1], x.element_size(), _library.arch(x))


def _gemm(M: int, N: int, K: int, a: Tensor, activation: str) -> tuple[tuple[int], dict[str, Any]]:
    """The grid and the constants of a kernel that multiplies a [M, K] with [K, N]."""
    cfg = _configs.gemm(M, N, K, a.element_size(), _library.arch(a))
    return (triton.cdiv(M, cfg.block_m) * triton.cdiv(N, cfg.block_n),), {
        "ACTIVATION": activation, "EVEN_K": K % cfg.block_k == 0, "PRECISION": dot_precision(a),
        "BLOCK_M": cfg.block_m, "BLOCK_N": cfg.block_n, "BLOCK_K": cfg.block_k, "GROUP_M": cfg.group_m,
        "num_warps": cfg.num_warps, "num_stages": cfg.num_stages, **_configs.register_limit(cfg.max_registers),
    }  # fmt: skip


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, out: Tensor, pre: Tensor | None, ends: Epilogue
) -> tuple[tuple[int], tuple[Any, ...], dict[str, Any]]:
    """Grid, arguments and constants of linear_fwd_kernel, which writes out and pre."""
    x, weight = _aligned_rows(x), _aligned_rows(weight)
    residual = None if ends.residual is None else _aligned_rows(ends.residual)
    bias, layer_scale, row_scale = contiguous(bias, ends.layer_scale, ends.row_scale)
    (M, K), N = x.shape, weight.shape[0]
    arguments = (
        x, weight, bias, layer_scale, row_scale, residual, out, pre, M, N, K, rows_per_sample(x, row_scale),
        x.stride(0), weight.stride(0), 0 if residual is None else residual.stride(0),
    )  # fmt: skip
    grid, constants = _gemm(M, N, K, x, activation)
    return grid, arguments, constants


def _activation_backward(dy: Tensor, pre: Tensor, activation: str, dpre: Tensor, h: Tensor | None) -> Tensor:
    """Writes dpre and h; -> dbias."""
    if pre.numel() == 0:
        return pre.new_zeros(pre.shape[-1])
    dy, pre = as_rows(dy), as_rows(pre)
    M, N = pre.shape
    cfg = _configs.activation_backward(N, pre.element_size(), _library.arch(pre))
    tiles = triton.cdiv(M, cfg.steps * cfg.block_m)
    partial = torch.empty(1, tiles, N, dtype=torch.float32, device=pre.device)
    act_bwd_kernel[(tiles * triton.cdiv(N, cfg.block_n),)](
        dy, pre, dpre, h, partial, M, N, dy.stride(0), pre.stride(0),
        ACTIVATION=activation, BLOCK_M=cfg.block_m, BLOCK_N=cfg.block_n, STEPS=cfg.steps, num_warps=cfg.num_warps,
    )  # fmt: skip
    return column_sums(partial, pre)[0]


def _aligned_rows(x: Tensor) -> Tensor:
    """[..., D] -> [M, D], copied where rows are not a multiple of 16 elements apart, without which the compiler sees no
    alignment, or so far that offsets within a tile of up to 256 rows would not fit 32 bits."""
    rows = as_rows(x)
    return rows if rows.stride(0) % 16 == 0 and rows.stride(0) <= 1 << 22 else rows.contiguous()
