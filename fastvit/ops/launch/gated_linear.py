"""Launches the kernels of the gated linear ops. Where theirs add nothing, the matmuls are the vendor's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastvit.kernels import _configs, _tuned
from fastvit.kernels.gated_linear import gated_act_kernel, gated_dact_kernel, gated_fwd_kernel
from fastvit.ops import _library
from fastvit.ops._checks import by_rows, contiguous, empty_like
from fastvit.ops._launch import Call, Constants, cdiv, launch
from fastvit.ops._library import Unsupported, dot_precision
from fastvit.ops.aten import gated_linear as aten
from fastvit.ops.launch.column_sum import column_sums
from fastvit.ops.launch.linear import aligned_rows, gemm, gemm_constants, is_our_matmul


def gated_fwd(
    x: Tensor, gate_weight: Tensor, value_weight: Tensor, gate_bias: Tensor | None, value_bias: Tensor | None,
    activation: str,
) -> Tensor:  # fmt: skip
    if not is_our_matmul(x, gate_weight.shape[0]):
        return gated_act(aten.both(x, gate_weight, value_weight, gate_bias, value_bias), activation)
    h = x.new_empty(*x.shape[:-1], gate_weight.shape[0])
    if h.numel():
        launch(*_forward(x, (gate_weight, value_weight), (gate_bias, value_bias), activation, h, None))
    return h


def gated_act_fwd(
    x: Tensor, gate_weight: Tensor, value_weight: Tensor, gate_bias: Tensor | None, value_bias: Tensor | None,
    activation: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    N = gate_weight.shape[0]
    if not is_our_matmul(x, N):
        pre = aten.both(x, gate_weight, value_weight, gate_bias, value_bias)
        return gated_act(pre, activation), pre
    h, pre = (x.new_empty(*x.shape[:-1], n) for n in (N, 2 * N))
    if h.numel():
        launch(*_forward(x, (gate_weight, value_weight), (gate_bias, value_bias), activation, h, pre))
    return h, pre


def gated_act(pre: Tensor, activation: str) -> Tensor:
    if pre.dtype is torch.float64:
        raise Unsupported("float64")
    h = pre.new_empty(*pre.shape[:-1], pre.shape[-1] // 2)
    _elementwise(None, pre, activation, None, h)
    return h


def gated_dact(dy: Tensor, weight: Tensor, pre: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    K, N = weight.shape
    ours = is_our_matmul(dy, N, backward=True)
    dpre, h = empty_like(pre), pre.new_empty(*pre.shape[:-1], N)
    if not ours or pre.numel() == 0:
        return dpre, h, _elementwise(dy @ weight, pre, activation, dpre, h)
    (dy, dy_stride), (pre, pre_stride) = aligned_rows(dy), aligned_rows(pre)
    weight, weight_stride = aligned_rows(weight)
    M = pre.numel() // (2 * N)
    programs, constants = gemm(M, N, K, dy, activation)
    partial = pre.new_empty((1, cdiv(M, constants["BLOCK_M"]), 2 * N), dtype=torch.float32)
    numbers = M, N, K, dy_stride, weight_stride, pre_stride
    launch(gated_dact_kernel, programs, (dy, weight, pre, dpre, h, partial), numbers, constants)
    return dpre, h, column_sums(partial, pre)[0]


def gated_act_bwd(dh: Tensor, pre: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    if pre.dtype is torch.float64:
        raise Unsupported("float64")
    dpre = empty_like(pre)
    return dpre, _elementwise(dh, pre, activation, dpre, None)


def _forward(
    x: Tensor, weights: tuple[Tensor, Tensor], biases: tuple[Tensor | None, ...], activation: str,
    h: Tensor, pre: Tensor | None,
) -> Call:  # fmt: skip
    """Of gated_fwd_kernel, which writes h and pre."""
    N, K = weights[0].shape
    x, x_stride = aligned_rows(x)
    (gate, gate_stride), (value, value_stride) = map(aligned_rows, weights)
    M = x.numel() // K
    programs, constants = _gated_plan(M, N, K, x.element_size(), _library.arch(x), dot_precision(x), activation)
    return (
        gated_fwd_kernel, programs, (x, gate, value, *contiguous(*biases), h, pre),
        (M, N, K, x_stride, gate_stride, value_stride), constants,
    )  # fmt: skip


@_tuned.cached
def _gated_plan(
    M: int, N: int, K: int, itemsize: int, arch: str, precision: str, activation: str
) -> tuple[int, Constants]:
    cfg = _configs.gated_gemm(M, N, K, itemsize, arch)
    return cdiv(M, cfg.block_m) * cdiv(N, cfg.block_n), gemm_constants(cfg, K, precision, activation)


def _elementwise(dh: Tensor | None, pre: Tensor, activation: str, dpre: Tensor | None, h: Tensor | None) -> Any:
    """Writes dpre and h; -> dbias, or None without dh."""
    if pre.numel() == 0:
        return None if dh is None else pre.new_zeros(pre.shape[-1])
    (dh, dh_stride), (pre, pre_stride) = by_rows(dh), by_rows(pre)
    N = pre.shape[-1] // 2
    M = pre.numel() // (2 * N)
    cfg = _configs.activation_backward(N, pre.element_size(), _library.arch(pre))
    tiles = cdiv(M, cfg.steps * cfg.block_m)
    partial = None if dh is None else pre.new_empty((1, tiles, 2 * N), dtype=torch.float32)
    launch(
        gated_act_kernel, tiles * cdiv(N, cfg.block_n),
        (dh, pre, dpre, h, partial), (M, N, dh_stride, pre_stride),
        {"ACTIVATION": activation, "BLOCK_M": cfg.block_m, "BLOCK_N": cfg.block_n, "STEPS": cfg.steps,
         "num_warps": cfg.num_warps},
    )  # fmt: skip
    return None if partial is None else column_sums(partial, pre)[0]
