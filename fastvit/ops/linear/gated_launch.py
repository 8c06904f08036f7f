"""Launch the kernels of the gated linear ops. Matmuls to which a kernel adds nothing are the vendor's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastvit.kernels import _configs, _tuned
from fastvit.kernels.gated_linear import gated_act_kernel, gated_dact_kernel, gated_fwd_kernel
from fastvit.ops.linear import gated_aten as aten
from fastvit.ops.linear.launch import activation_constants, aligned_rows, gemm, gemm_constants, is_our_matmul
from fastvit.ops.runtime import devices
from fastvit.ops.runtime.checks import by_rows, contiguous, empty_like, row_stride
from fastvit.ops.runtime.column_sum import launch_with_sum
from fastvit.ops.runtime.devices import dot_precision
from fastvit.ops.runtime.dispatch import KernelUnsupported
from fastvit.ops.runtime.launch import Constants, Launch, cdiv
from fastvit.ops.runtime.plans import AFRESH, Plans


def gated_fwd(
    x: Tensor, gate_weight: Tensor, value_weight: Tensor, gate_bias: Tensor | None, value_bias: Tensor | None,
    activation: str, *, plans: Plans = AFRESH,
) -> Tensor:  # fmt: skip
    if not plans.plan(is_our_matmul, x, gate_weight.shape[0]):
        return gated_act(aten.both(x, gate_weight, value_weight, gate_bias, value_bias), activation, plans=plans)
    launch, tensors, h, _ = _forward(
        x, gate_weight, value_weight, gate_bias, value_bias, activation, plans, keep_pre=False
    )
    launch(*tensors)
    return h


def gated_act_fwd(
    x: Tensor, gate_weight: Tensor, value_weight: Tensor, gate_bias: Tensor | None, value_bias: Tensor | None,
    activation: str, *, plans: Plans = AFRESH,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if not plans.plan(is_our_matmul, x, gate_weight.shape[0]):
        pre = aten.both(x, gate_weight, value_weight, gate_bias, value_bias)
        return gated_act(pre, activation, plans=plans), pre
    launch, tensors, h, pre = _forward(
        x, gate_weight, value_weight, gate_bias, value_bias, activation, plans, keep_pre=True
    )
    launch(*tensors)
    return h, pre


def gated_act(pre: Tensor, activation: str, *, plans: Plans = AFRESH) -> Tensor:
    if pre.dtype is torch.float64:
        raise KernelUnsupported("float64")
    h = pre.new_empty(*pre.shape[:-1], pre.shape[-1] // 2)
    _elementwise(None, pre, activation, None, h, plans)
    return h


def gated_dact(
    dy: Tensor, weight: Tensor, pre: Tensor, activation: str, *, plans: Plans = AFRESH
) -> tuple[Tensor, Tensor, Tensor]:
    N = weight.shape[1]
    ours = plans.plan(is_our_matmul, dy, N, True, True)
    dpre, h = empty_like(pre), pre.new_empty(*pre.shape[:-1], N)
    if not ours or pre.numel() == 0:
        return dpre, h, _elementwise(dy @ weight, pre, activation, dpre, h, plans)
    dy, weight, pre = plans.readable(aligned_rows, dy, weight, pre)
    launch, shape = plans.plan(_dact_plan, dy, weight, pre, activation)
    return dpre, h, launch_with_sum(launch, shape, (dy, weight, pre, dpre, h), pre, plans)


def gated_act_bwd(dh: Tensor, pre: Tensor, activation: str, *, plans: Plans = AFRESH) -> tuple[Tensor, Tensor]:
    if pre.dtype is torch.float64:
        raise KernelUnsupported("float64")
    dpre = empty_like(pre)
    return dpre, _elementwise(dh, pre, activation, dpre, None, plans)


def _forward(
    x: Tensor, gate: Tensor, value: Tensor, gate_bias: Tensor | None, value_bias: Tensor | None, activation: str,
    plans: Plans, *, keep_pre: bool,
) -> tuple[Launch, tuple[Any, ...], Tensor, Any]:  # fmt: skip
    """Return the launch and its tensors. It fills h, and gate and value if they are kept."""
    rows, gate, value = plans.readable(aligned_rows, x, gate, value)
    gate_bias, value_bias = plans.readable(contiguous, gate_bias, value_bias)
    launch = plans.plan(_forward_plan, rows, gate, value, activation)
    N = gate.shape[0]
    h = x.new_empty(*x.shape[:-1], N)
    pre = x.new_empty(*x.shape[:-1], 2 * N) if keep_pre else None
    return launch, (rows, gate, value, gate_bias, value_bias, h, pre), h, pre


def _forward_plan(x: Tensor, gate: Tensor, value: Tensor, activation: str) -> Launch:
    N, K = gate.shape
    M = x.numel() // K
    programs, constants = _gated_plan(M, N, K, x.element_size(), devices.arch(x), dot_precision(x), activation)
    numbers = M, N, K, row_stride(x), row_stride(gate), row_stride(value)
    return Launch(gated_fwd_kernel, programs, numbers, constants)


def _dact_plan(dy: Tensor, weight: Tensor, pre: Tensor, activation: str) -> tuple[Launch, tuple[int, int, int]]:
    """Configure gated_dact_kernel. Also return the shape of the partial sums."""
    K, N = weight.shape
    M = pre.numel() // (2 * N)
    programs, constants = gemm(M, N, K, dy, activation)
    numbers = M, N, K, row_stride(dy), row_stride(weight), row_stride(pre)
    return Launch(gated_dact_kernel, programs, numbers, constants), (1, cdiv(M, constants["BLOCK_M"]), 2 * N)


@_tuned.cached
def _gated_plan(
    M: int, N: int, K: int, itemsize: int, arch: str, precision: str, activation: str
) -> tuple[int, Constants]:
    cfg = _configs.gated_gemm(M, N, K, itemsize, arch)
    return cdiv(M, cfg.block_m) * cdiv(N, cfg.block_n), gemm_constants(cfg, K, precision, activation)


def _elementwise(
    dh: Tensor | None, pre: Tensor, activation: str, dpre: Tensor | None, h: Tensor | None, plans: Plans
) -> Any:
    """Write dpre and h; return dbias, or None without dh."""
    if pre.numel() == 0:
        return None if dh is None else pre.new_zeros(pre.shape[-1])
    dh, pre = plans.readable(by_rows, dh, pre)
    launch, shape = plans.plan(_elementwise_plan, dh, pre, activation)
    if dh is not None:
        return launch_with_sum(launch, shape, (dh, pre, dpre, h), pre, plans)
    launch(None, pre, dpre, h, None)
    return None


def _elementwise_plan(dh: Tensor | None, pre: Tensor, activation: str) -> tuple[Launch, tuple[int, int, int]]:
    """Configure gated_act_kernel. Also return the shape of the partial sums."""
    N = pre.shape[-1] // 2
    M = pre.numel() // (2 * N)
    cfg = _configs.activation_backward(N, pre.element_size(), devices.arch(pre))
    tiles = cdiv(M, cfg.steps * cfg.block_m)
    numbers = M, N, row_stride(dh), row_stride(pre)
    constants = activation_constants(cfg, activation)
    return Launch(gated_act_kernel, tiles * cdiv(N, cfg.block_n), numbers, constants), (1, tiles, 2 * N)
