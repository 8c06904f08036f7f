"""Launches the kernels of the linear ops. What a kernel adds nothing to is the vendor's matmul."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastvit.kernels import _configs, _tuned
from fastvit.kernels.linear import act_bwd_kernel, linear_dact_kernel, linear_fwd_kernel
from fastvit.ops import _library
from fastvit.ops._checks import by_rows, contiguous, empty_like
from fastvit.ops._epilogue import Epilogue, rows_per_sample
from fastvit.ops._launch import Call, Constants, cdiv, launch
from fastvit.ops._library import Unsupported, dot_precision
from fastvit.ops.aten import linear as aten
from fastvit.ops.launch.column_sum import column_sums


def linear_fwd(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, *epilogue: Tensor | None) -> Tensor:
    ends = Epilogue(*epilogue)
    plain = activation == "none" and ends.layer_scale is None and ends.row_scale is None and ends.residual is None
    if not is_our_matmul(x, weight.shape[0], has_epilogue=not plain):
        return aten.linear_fwd(x, weight, bias, activation, *epilogue)
    out = x.new_empty(*x.shape[:-1], weight.shape[0], dtype=ends.dtype(x))
    if out.numel():
        launch(*_forward(x, weight, bias, activation, out, None, ends))
    return out


def linear_act_fwd(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    if not is_our_matmul(x, weight.shape[0]):
        return aten.linear_act_fwd(x, weight, bias, activation)
    h = x.new_empty(*x.shape[:-1], weight.shape[0])
    pre = torch.empty_like(h)
    if h.numel():
        launch(*_forward(x, weight, bias, activation, h, pre, Epilogue()))
    return h, pre


def linear_dact(dy: Tensor, weight: Tensor, pre: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    dpre, h = empty_like(pre), empty_like(pre)
    if not is_our_matmul(dy, pre.shape[-1], backward=True):
        return dpre, h, _activation_backward(dy @ weight, pre, activation, dpre, h)
    if pre.numel() == 0:
        return dpre, h, pre.new_zeros(pre.shape[-1])
    (dy, dy_stride), (pre, pre_stride) = aligned_rows(dy), aligned_rows(pre)
    K, N = weight.shape
    weight, weight_stride = aligned_rows(weight)
    M = pre.numel() // N
    programs, constants = gemm(M, N, K, dy, activation)
    partial = pre.new_empty((1, cdiv(M, constants["BLOCK_M"]), N), dtype=torch.float32)
    numbers = M, N, K, dy_stride, weight_stride, pre_stride
    launch(linear_dact_kernel, programs, (dy, weight, pre, dpre, h, partial), numbers, constants)
    return dpre, h, column_sums(partial, pre)[0]


def act_bwd(dy: Tensor, pre: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    if pre.dtype is torch.float64:
        raise Unsupported("float64")
    dpre = empty_like(pre)
    return dpre, _activation_backward(dy, pre, activation, dpre, None)


def is_our_matmul(x: Tensor, n: int, *, has_epilogue: bool = True, backward: bool = False) -> bool:
    """Whether x [..., K] @ [K, n] is our kernel's. The interpreter runs all, so that tests reach every dtype."""
    if x.dtype is torch.float64:
        raise Unsupported("float64")
    if _library.INTERPRET:
        return True
    k = x.shape[-1]
    return has_epilogue and _configs.use_triton_gemm(x.numel() // k, n, k, x.element_size(), backward, _library.arch(x))


def gemm(M: int, N: int, K: int, a: Tensor, activation: str) -> tuple[int, Constants]:
    """How many programs of a kernel that multiplies a [M, K] with [K, N], and its constants."""
    return _gemm_plan(M, N, K, a.element_size(), _library.arch(a), dot_precision(a), activation)


@_tuned.cached
def _gemm_plan(
    M: int, N: int, K: int, itemsize: int, arch: str, precision: str, activation: str
) -> tuple[int, Constants]:
    cfg = _configs.gemm(M, N, K, itemsize, arch)
    return cdiv(M, cfg.block_m) * cdiv(N, cfg.block_n), gemm_constants(cfg, K, precision, activation)


def gemm_constants(cfg: _configs.GemmConfig, K: int, precision: str, activation: str) -> Constants:
    """Of a kernel that sums over K."""
    return {
        "ACTIVATION": activation, "EVEN_K": K % cfg.block_k == 0, "PRECISION": precision,
        "BLOCK_M": cfg.block_m, "BLOCK_N": cfg.block_n, "BLOCK_K": cfg.block_k, "GROUP_M": cfg.group_m,
        "num_warps": cfg.num_warps, "num_stages": cfg.num_stages, **_configs.register_limit(cfg.max_registers),
    }  # fmt: skip


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, out: Tensor, pre: Tensor | None, ends: Epilogue
) -> Call:
    """Of linear_fwd_kernel, which writes out and pre."""
    N, K = weight.shape
    (x, x_stride), (weight, weight_stride) = aligned_rows(x), aligned_rows(weight)
    residual, residual_stride = aligned_rows(ends.residual)
    bias, layer_scale, row_scale = contiguous(bias, ends.layer_scale, ends.row_scale)
    M = x.numel() // K
    programs, constants = gemm(M, N, K, x, activation)
    return (
        linear_fwd_kernel, programs, (x, weight, bias, layer_scale, row_scale, residual, out, pre),
        (M, N, K, rows_per_sample(x, row_scale), x_stride, weight_stride, residual_stride), constants,
    )  # fmt: skip


def _activation_backward(dy: Tensor, pre: Tensor, activation: str, dpre: Tensor, h: Tensor | None) -> Tensor:
    """Writes dpre and h; -> dbias."""
    if pre.numel() == 0:
        return pre.new_zeros(pre.shape[-1])
    (dy, dy_stride), (pre, pre_stride) = by_rows(dy), by_rows(pre)
    N = pre.shape[-1]
    M = pre.numel() // N
    cfg = _configs.activation_backward(N, pre.element_size(), _library.arch(pre))
    tiles = cdiv(M, cfg.steps * cfg.block_m)
    partial = pre.new_empty((1, tiles, N), dtype=torch.float32)
    launch(
        act_bwd_kernel, tiles * cdiv(N, cfg.block_n),
        (dy, pre, dpre, h, partial), (M, N, dy_stride, pre_stride),
        {"ACTIVATION": activation, "BLOCK_M": cfg.block_m, "BLOCK_N": cfg.block_n, "STEPS": cfg.steps,
         "num_warps": cfg.num_warps},
    )  # fmt: skip
    return column_sums(partial, pre)[0]


def aligned_rows(x: Tensor | None) -> tuple[Any, int]:
    """`by_rows`, but a copy where rows are not a multiple of 16 elements apart, without which the compiler sees no
    alignment, or so far that offsets within a tile of up to 256 rows would not fit 32 bits."""
    rows, stride = by_rows(x)
    return (rows, stride) if stride % 16 == 0 and stride <= 1 << 22 else by_rows(rows.contiguous())
