"""Launch the kernels of the gated linear ops. Matmuls to which a kernel adds nothing are the vendor's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastvit.kernels import _configs, _tuned
from fastvit.kernels.gated_linear import gated_act_kernel, gated_dact_kernel, gated_fwd_kernel
from fastvit.ops.linear import gated_aten as aten
from fastvit.ops.linear.launch import activation_constants, aligned_rows, gemm, gemm_constants, is_our_matmul
from fastvit.ops.runtime import device
from fastvit.ops.runtime.backend import KernelUnsupported
from fastvit.ops.runtime.call import Call
from fastvit.ops.runtime.column_sum import SummedLaunch
from fastvit.ops.runtime.device import dot_precision
from fastvit.ops.runtime.launch import Constants, Launch, cdiv
from fastvit.ops.runtime.rows import by_rows, contiguous, empty_like, row_stride


def gated_fwd(
    x: Tensor, gate_weight: Tensor, value_weight: Tensor, gate_bias: Tensor | None, value_bias: Tensor | None,
    activation: str, *, call: Call,
) -> Tensor:  # fmt: skip
    if not call.once("gated_fwd is ours", is_our_matmul, x, gate_weight.shape[0]):
        return gated_act(aten.both(x, gate_weight, value_weight, gate_bias, value_bias), activation, call=call)
    launch, tensors, h, _ = _forward(
        x, gate_weight, value_weight, gate_bias, value_bias, activation, call, keep_pre=False
    )
    launch(*tensors)
    return h


def gated_act_fwd(
    x: Tensor, gate_weight: Tensor, value_weight: Tensor, gate_bias: Tensor | None, value_bias: Tensor | None,
    activation: str, *, call: Call,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if not call.once("gated_act_fwd is ours", is_our_matmul, x, gate_weight.shape[0]):
        pre = aten.both(x, gate_weight, value_weight, gate_bias, value_bias)
        return gated_act(pre, activation, call=call), pre
    launch, tensors, h, pre = _forward(
        x, gate_weight, value_weight, gate_bias, value_bias, activation, call, keep_pre=True
    )
    launch(*tensors)
    return h, pre


def gated_act(pre: Tensor, activation: str, *, call: Call) -> Tensor:
    if pre.dtype is torch.float64:
        raise KernelUnsupported("float64")
    h = pre.new_empty(*pre.shape[:-1], pre.shape[-1] // 2)
    if pre.numel():
        (pre,) = call.as_read(by_rows, pre)
        call.once("gated_act", _act, pre, activation)(None, pre, None, h, None)
    return h


def gated_dact(
    dy: Tensor, weight: Tensor, pre: Tensor, activation: str, *, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    N = weight.shape[1]
    ours = call.once("gated_dact is ours", is_our_matmul, dy, N, True, True)
    dpre, h = empty_like(pre), pre.new_empty(*pre.shape[:-1], N)
    if not ours or pre.numel() == 0:
        return dpre, h, _activation_backward(dy @ weight, pre, activation, dpre, h, call)
    dy, weight, pre = call.as_read(aligned_rows, dy, weight, pre)
    launch = call.once("gated_dact", _dact, dy, weight, pre, activation)
    (dbias,) = launch(pre, dy, weight, pre, dpre, h)
    return dpre, h, dbias


def gated_act_bwd(dh: Tensor, pre: Tensor, activation: str, *, call: Call) -> tuple[Tensor, Tensor]:
    if pre.dtype is torch.float64:
        raise KernelUnsupported("float64")
    dpre = empty_like(pre)
    return dpre, _activation_backward(dh, pre, activation, dpre, None, call)


def _forward(
    x: Tensor, gate: Tensor, value: Tensor, gate_bias: Tensor | None, value_bias: Tensor | None, activation: str,
    call: Call, *, keep_pre: bool,
) -> tuple[Launch, tuple[Any, ...], Tensor, Any]:  # fmt: skip
    """Return the launch and its tensors. It fills h, and gate and value if they are kept."""
    rows, gate, value = call.as_read(aligned_rows, x, gate, value)
    gate_bias, value_bias = call.as_read(contiguous, gate_bias, value_bias)
    launch = call.once("gated_fwd", _forward_launch, rows, gate, value, activation)
    N = gate.shape[0]
    h = x.new_empty(*x.shape[:-1], N)
    pre = x.new_empty(*x.shape[:-1], 2 * N) if keep_pre else None
    return launch, (rows, gate, value, gate_bias, value_bias, h, pre), h, pre


def _forward_launch(x: Tensor, gate: Tensor, value: Tensor, activation: str) -> Launch:
    N, K = gate.shape
    M = x.numel() // K
    programs, constants = _gated_plan(M, N, K, x.element_size(), device.arch(x), dot_precision(x), activation)
    numbers = M, N, K, row_stride(x), row_stride(gate), row_stride(value)
    return Launch(gated_fwd_kernel, programs, numbers, constants)


def _dact(dy: Tensor, weight: Tensor, pre: Tensor, activation: str) -> SummedLaunch:
    """Configure gated_dact_kernel."""
    K, N = weight.shape
    M = pre.numel() // (2 * N)
    programs, constants = gemm(M, N, K, dy, activation)
    numbers = M, N, K, row_stride(dy), row_stride(weight), row_stride(pre)
    launch = Launch(gated_dact_kernel, programs, numbers, constants)
    return SummedLaunch(launch, (1, cdiv(M, constants["BLOCK_M"]), 2 * N), [pre.dtype], device.arch(pre))


@_tuned.cached
def _gated_plan(
    M: int, N: int, K: int, itemsize: int, arch: str, precision: str, activation: str
) -> tuple[int, Constants]:
    cfg = _configs.gated_gemm(M, N, K, itemsize, arch)
    return cdiv(M, cfg.block_m) * cdiv(N, cfg.block_n), gemm_constants(cfg, K, precision, activation)


def _activation_backward(
    dh: Tensor, pre: Tensor, activation: str, dpre: Tensor, h: Tensor | None, call: Call
) -> Tensor:
    """Write dpre and h; return dbias."""
    if pre.numel() == 0:
        return pre.new_zeros(pre.shape[-1])
    dh, pre = call.as_read(by_rows, dh, pre)
    (dbias,) = call.once("gated_act_bwd", _act_backward, dh, pre, activation)(pre, dh, pre, dpre, h)
    return dbias


def _act(pre: Tensor, activation: str) -> Launch:
    """Configure gated_act_kernel for the forward pass."""
    return _elementwise_launch(None, pre, activation)[0]


def _act_backward(dh: Tensor, pre: Tensor, activation: str) -> SummedLaunch:
    """Configure gated_act_kernel for the backward pass."""
    launch, tiles = _elementwise_launch(dh, pre, activation)
    return SummedLaunch(launch, (1, tiles, pre.shape[-1]), [pre.dtype], device.arch(pre))


def _elementwise_launch(dh: Tensor | None, pre: Tensor, activation: str) -> tuple[Launch, int]:
    """Return the launch of gated_act_kernel, and the rows of its partial sums."""
    N = pre.shape[-1] // 2
    M = pre.numel() // (2 * N)
    cfg = _configs.activation_backward(N, pre.element_size(), device.arch(pre))
    tiles = cdiv(M, cfg.steps * cfg.block_m)
    numbers = M, N, row_stride(dh), row_stride(pre)
    constants = activation_constants(cfg, activation)
    return Launch(gated_act_kernel, tiles * cdiv(N, cfg.block_n), numbers, constants), tiles
