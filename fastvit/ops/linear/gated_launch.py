"""Launch the kernels of the gated linear ops. Matmuls to which a kernel adds nothing are the vendor's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastvit.kernels.gated_linear import gated_act_kernel, gated_dact_kernel, gated_fwd_kernel
from fastvit.ops.linear.aten import side_by_side
from fastvit.ops.linear.launch import (
    activation_backward,
    aligned_rows,
    elementwise_launch,
    gemm,
    is_our_matmul,
    launch_dact,
)
from fastvit.ops.runtime.backend import KernelUnsupported
from fastvit.ops.runtime.launch import Launch
from fastvit.ops.runtime.rows import by_rows, contiguous, empty_like, row_stride


def gated_fwd(
    x: Tensor, gate_weight: Tensor, value_weight: Tensor, gate_bias: Tensor | None, value_bias: Tensor | None,
    activation: str,
) -> Tensor:  # fmt: skip
    h, _ = _forward(x, gate_weight, value_weight, gate_bias, value_bias, activation, keep_pre=False)
    return h


def gated_act_fwd(
    x: Tensor, gate_weight: Tensor, value_weight: Tensor, gate_bias: Tensor | None, value_bias: Tensor | None,
    activation: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _forward(x, gate_weight, value_weight, gate_bias, value_bias, activation, keep_pre=True)


def gated_act(pre: Tensor, activation: str) -> Tensor:
    if pre.dtype is torch.float64:
        raise KernelUnsupported("float64")
    h = pre.new_empty(*pre.shape[:-1], pre.shape[-1] // 2)
    if pre.numel():
        pre = by_rows(pre)
        launch, _ = elementwise_launch(gated_act_kernel, None, pre, activation, h.shape[-1])
        launch(None, pre, None, h, None)
    return h


def gated_dact(dy: Tensor, weight: Tensor, pre: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    N = weight.shape[1]
    ours = is_our_matmul(dy, N, True, True)
    dpre, h = empty_like(pre), pre.new_empty(*pre.shape[:-1], N)
    if not ours or pre.numel() == 0:
        return dpre, h, activation_backward(gated_act_kernel, dy @ weight, pre, activation, dpre, h)
    return dpre, h, launch_dact(gated_dact_kernel, dy, weight, pre, activation, dpre, h)


def gated_act_bwd(dh: Tensor, pre: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    dpre = empty_like(pre)
    return dpre, activation_backward(gated_act_kernel, dh, pre, activation, dpre, None)


def _forward(
    x: Tensor, gate: Tensor, value: Tensor, gate_bias: Tensor | None, value_bias: Tensor | None, activation: str,
    *, keep_pre: bool,
) -> tuple[Tensor, Any]:  # fmt: skip
    """Return h; and gate and value next to each other, or None if the kernel need not write them."""
    N = gate.shape[0]
    if not is_our_matmul(x, N):
        pre = side_by_side(x, (gate, value), (gate_bias, value_bias))
        return gated_act(pre, activation), pre
    rows, gate, value = map(aligned_rows, (x, gate, value))
    gate_bias, value_bias = map(contiguous, (gate_bias, value_bias))
    launch = _forward_launch(rows, gate, value, activation)
    h = x.new_empty(*x.shape[:-1], N)
    kept = x.new_empty(*x.shape[:-1], 2 * N) if keep_pre else None
    launch(rows, gate, value, gate_bias, value_bias, h, kept)
    return h, kept


def _forward_launch(x: Tensor, gate: Tensor, value: Tensor, activation: str) -> Launch:
    N, K = gate.shape
    M = x.numel() // K
    programs, constants = gemm(M, N, K, x, activation, gated=True)
    numbers = M, N, K, row_stride(x), row_stride(gate), row_stride(value)
    return Launch(gated_fwd_kernel, programs, numbers, constants)
