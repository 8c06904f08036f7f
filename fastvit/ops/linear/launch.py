"""Launch the kernels of the linear ops. A matmul to which a kernel adds nothing is the vendor's."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fastvit.kernels import _configs
from fastvit.kernels.gated_linear import gated_act_kernel, gated_dact_kernel, gated_fwd_kernel
from fastvit.kernels.linear import act_bwd_kernel, linear_dact_kernel, linear_fwd_kernel
from fastvit.ops.linear import aten, hopper
from fastvit.ops.runtime import backend, device
from fastvit.ops.runtime.backend import KernelUnsupported
from fastvit.ops.runtime.column_sum import launch_and_sum
from fastvit.ops.runtime.device import dot_precision
from fastvit.ops.runtime.epilogue import Epilogue, add_residual_, rows_per_sample
from fastvit.ops.runtime.launch import Constants, Launch, cdiv
from fastvit.ops.runtime.rows import by_rows, contiguous, empty_like, row_stride


def linear_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, layer_scale: Tensor | None = None,
    row_scale: Tensor | None = None, residual: Tensor | None = None, value_weight: Tensor | None = None,
    value_bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if value_weight is not None:
        h, _ = _gated_fwd(x, (weight, value_weight), (bias, value_bias), activation, keep_pre=False)
        return add_residual_(h, layer_scale, row_scale, residual)
    has_epilogue = activation != "none" or residual is not None or layer_scale is not None or row_scale is not None
    scales = layer_scale is not None or row_scale is not None
    turns = has_epilogue and hopper.takes(x, weight.shape[0], weight, layer_scale, residual, scales=scales)
    if not (turns or is_our_matmul(x, weight.shape[0], has_epilogue)):
        return aten.linear_fwd(x, weight, bias, activation, layer_scale, row_scale, residual)
    rows, weight, residual = map(aligned_rows, (x, weight, residual))
    bias, layer_scale, row_scale = map(contiguous, (bias, layer_scale, row_scale))
    branch = layer_scale, row_scale, residual
    launch, shape, dtype = _forward(x.shape, rows, weight, activation, *branch, turns=turns)
    out = x.new_empty(shape) if dtype is x.dtype else x.new_empty(shape, dtype=dtype)
    launch(rows, weight, bias, *branch, out, None)
    return out


def linear_act_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, value_weight: Tensor | None = None,
    value_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if value_weight is not None:
        return _gated_fwd(x, (weight, value_weight), (bias, value_bias), activation, keep_pre=True)
    turns = hopper.takes(x, weight.shape[0], weight)
    if not (turns or is_our_matmul(x, weight.shape[0])):
        return aten.linear_act_fwd(x, weight, bias, activation)
    rows, weight = map(aligned_rows, (x, weight))
    bias = contiguous(bias)
    launch, shape, _ = _forward(x.shape, rows, weight, activation, turns=turns)
    h = x.new_empty(shape)
    pre = torch.empty_like(h)
    launch(rows, weight, bias, None, None, None, h, pre)
    return h, pre


def gated_act(pre: Tensor, activation: str) -> Tensor:
    if pre.dtype is torch.float64:
        raise KernelUnsupported("float64")
    h = pre.new_empty(*pre.shape[:-1], pre.shape[-1] // 2)
    if pre.numel():
        pre = by_rows(pre)
        launch, _ = _elementwise(None, pre, activation, h.shape[-1])
        launch(None, pre, None, h, None)
    return h


def linear_dact(dy: Tensor, weight: Tensor, pre: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    K, N = weight.shape
    dpre, h, width = empty_like(pre), pre.new_empty(*pre.shape[:-1], N), pre.shape[-1]
    turns = width == N and hopper.takes(dy, N, weight, pre)
    if not (turns or is_our_matmul(dy, N, True, True)):
        return dpre, h, _activation_backward(dy @ weight, pre, activation, dpre, h)
    if pre.numel() == 0:
        return dpre, h, pre.new_zeros(width)
    dy, weight, pre = map(aligned_rows, (dy, weight, pre))
    M = pre.numel() // width
    programs, constants = gemm(M, N, K, dy, activation)
    if turns:  # whose partial sums a launch for other addresses must have, too
        constants = {**constants, "BLOCK_M": hopper.ROWS}
        programs = cdiv(M, hopper.ROWS) * cdiv(N, constants["BLOCK_N"])
    numbers = M, N, K, row_stride(dy), row_stride(weight), row_stride(pre)
    kernel = linear_dact_kernel if width == N else gated_dact_kernel
    launch, tiles = Launch(kernel, programs, numbers, constants), cdiv(M, constants["BLOCK_M"])
    if turns:
        launch = hopper.launch(dy, N, numbers, activation, launch, backward=True)
    (dbias,) = launch_and_sum(launch, tiles, width, [pre.dtype], dy, weight, pre, dpre, h)
    return dpre, h, dbias


def act_bwd(dh: Tensor, pre: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    dpre = empty_like(pre)
    return dpre, _activation_backward(dh, pre, activation, dpre, None)


def _activation_backward(dh: Tensor, pre: Tensor, activation: str, dpre: Tensor, h: Tensor | None) -> Tensor:
    """Write dpre, and h if given; return dbias."""
    if pre.dtype is torch.float64:
        raise KernelUnsupported("float64")
    if pre.numel() == 0:
        return pre.new_zeros(pre.shape[-1])
    dh, pre = map(by_rows, (dh, pre))
    launch, tiles = _elementwise(dh, pre, activation, dh.shape[-1])
    (dbias,) = launch_and_sum(launch, tiles, pre.shape[-1], [pre.dtype], dh, pre, dpre, h)
    return dbias


def _elementwise(dh: Tensor | None, pre: Tensor, activation: str, N: int) -> tuple[Launch, int]:
    """Configure act_bwd_kernel, or gated_act_kernel if pre has more than N columns, for rows of N results. Also return
    the rows of its partial sums."""
    M, width = pre.numel() // pre.shape[-1], pre.shape[-1]
    device.arch(pre)  # raises for a GPU without kernels
    constants = {"ACTIVATION": activation, **_configs.ACTIVATION_BACKWARD}
    tiles = cdiv(M, constants["STEPS"] * constants["BLOCK_M"])
    numbers = M, N, row_stride(dh), row_stride(pre)
    kernel = act_bwd_kernel if width == N else gated_act_kernel
    return Launch(kernel, tiles * cdiv(N, constants["BLOCK_N"]), numbers, constants), tiles


def is_our_matmul(x: Tensor, n: int, has_epilogue: bool = True, backward: bool = False) -> bool:
    """Return whether our kernel multiplies x [..., K] @ [K, n]. In the interpreter it always does, so that tests reach
    every dtype."""
    if x.dtype is torch.float64:
        raise KernelUnsupported("float64")
    if backend.INTERPRET:
        return True
    k = x.shape[-1]
    return has_epilogue and _configs.use_triton_gemm(x.numel() // k, n, k, x.element_size(), backward, device.arch(x))


def gemm(M: int, N: int, K: int, a: Tensor, activation: str, gated: bool = False) -> tuple[int, Constants]:
    """Return the number of programs, and the constants, of a kernel that multiplies a [M, K] with [K, N], or with two
    of these if gated."""
    return _gemm_plan(M, N, K, a.element_size(), device.arch(a), dot_precision(a), activation, gated)


@functools.cache
def _gemm_plan(
    M: int, N: int, K: int, itemsize: int, arch: str, precision: str, activation: str, gated: bool
) -> tuple[int, Constants]:
    cfg = (_configs.gated_gemm if gated else _configs.gemm)(M, N, K, itemsize, arch)
    return cdiv(M, cfg.block_m) * cdiv(N, cfg.block_n), _gemm_constants(cfg, K, precision, activation)


def _gemm_constants(cfg: _configs.GemmConfig, K: int, precision: str, activation: str) -> Constants:
    """Return the constants of a kernel that sums over K."""
    return {
        "ACTIVATION": activation, "EVEN_K": K % cfg.block_k == 0, "PRECISION": precision,
        "BLOCK_M": cfg.block_m, "BLOCK_N": cfg.block_n, "BLOCK_K": cfg.block_k, "GROUP_M": cfg.group_m,
        "num_warps": cfg.num_warps, "num_stages": cfg.num_stages, **_configs.register_limit(cfg.max_registers),
    }  # fmt: skip


def _forward(
    shape: torch.Size, x: Tensor, weight: Tensor, activation: str, *epilogue: Tensor | None, turns: bool
) -> tuple[Launch, tuple[int, ...], torch.dtype]:
    """Configure linear_fwd_kernel. Also return the output's shape and dtype. shape: x before it was in rows.
    turns: whether linear_hopper.py takes it."""
    branch = Epilogue(*epilogue)
    N, K = weight.shape
    M = x.numel() // K
    programs, constants = gemm(M, N, K, x, activation)
    strides = row_stride(x), row_stride(weight), row_stride(branch.residual)
    numbers = M, N, K, rows_per_sample(x, branch.row_scale), *strides
    launch = Launch(linear_fwd_kernel, programs, numbers, {"TMA": False, **constants})
    if _can_be_described(M, *strides[:2], x.element_size()):
        cfg = _configs.gemm(M, N, K, x.element_size(), device.arch(x), True)
        if cfg.programs_per_sm:
            tiles = cdiv(M, cfg.block_m) * cdiv(N, cfg.block_n)
            programs = min(tiles, cfg.programs_per_sm * device.multiprocessors(x.device.index))
            constants = {"TMA": True, **_gemm_constants(cfg, K, dot_precision(x), activation)}
            launch = Launch(linear_fwd_kernel, programs, numbers, constants, unaligned=launch)
    if turns:
        launch = hopper.launch(x, N, numbers, activation, launch)
    return launch, (*shape[:-1], N), branch.dtype(x)


def _can_be_described(M: int, stride_a: int, stride_b: int, itemsize: int) -> bool:
    """Return whether TMA can copy from matrices with these row strides, whose first rows are at multiples of 16 bytes.
    Its coordinates have 32 bits."""
    return M < 1 << 31 and stride_a * itemsize % 16 == stride_b * itemsize % 16 == 0


def _gated_fwd(
    x: Tensor, weights: tuple[Tensor, Tensor], biases: tuple[Tensor | None, Tensor | None], activation: str,
    *, keep_pre: bool,
) -> tuple[Tensor, Any]:  # fmt: skip
    """Return h of a gate and a value; and both next to each other, or None if the kernel need not write them."""
    N, K = weights[0].shape
    if not is_our_matmul(x, N):
        pre = aten.side_by_side(x, weights, biases)
        return gated_act(pre, activation), pre
    rows, gate, value = map(aligned_rows, (x, *weights))
    M = rows.numel() // K
    programs, constants = gemm(M, N, K, rows, activation, gated=True)
    launch = Launch(gated_fwd_kernel, programs, (M, N, K, *map(row_stride, (rows, gate, value))), constants)
    h = x.new_empty(*x.shape[:-1], N)
    kept = x.new_empty(*x.shape[:-1], 2 * N) if keep_pre else None
    launch(rows, gate, value, *map(contiguous, biases), h, kept)
    return h, kept


def aligned_rows(x: Tensor | None) -> Any:
    """Return `by_rows` of x, or a copy if the row stride is not a multiple of 16 elements (the compiler would see no
    alignment) or so large that offsets within a tile of up to 256 rows would not fit 32 bits."""
    x = by_rows(x)
    stride = row_stride(x)
    return x if x is None or (stride % 16 == 0 and stride <= 1 << 22) else x.contiguous()
