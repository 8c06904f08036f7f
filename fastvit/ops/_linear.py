"""The registered linear ops: ATen path, Triton launch, fakes. The gradient is in linear.py.

The two forward ops take x, and the residual like it, as rows [M, K] or as contiguous tokens [B, N, K], and return what
they compute in the same form; the backward ops take rows."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastvit.ops import _library
from fastvit.ops._activations import activate, activate_, activate_backward, activate_backward_
from fastvit.ops._checks import as_rows, contiguous, row_stride, rows_and_columns
from fastvit.ops._column_sums import column_sums
from fastvit.ops._library import Unsupported, dot_precision, register

if _library.HAVE_TRITON:
    import triton

    from fastvit.kernels import _configs
    from fastvit.kernels.linear import act_bwd_kernel, linear_dact_kernel, linear_fwd_kernel


def out_dtype(x: Tensor, layer_scale: Tensor | None, residual: Tensor | None) -> torch.dtype:
    """The dtype of residual + layer_scale * linear(x) by PyTorch's promotion; row_scale never changes it."""
    dtype = x.dtype
    for t in (layer_scale, residual):
        if t is not None and t.dtype is not dtype:
            dtype = torch.promote_types(dtype, t.dtype)
    return dtype


# ---- ATen ----


_LEAST = 8192  # elements of x: for fewer, the cost of one call more shows


def _grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear of plain tensors, outside of autograd and of traces. In float32 on the CPU a wide result is computed
    as one batched product over groups of K columns, which MKL does in 0.93 to 0.99 of the time (benchmarks/NOTES.md);
    each sum over K is made the same way."""
    (*leading, K), N = x.shape, weight.shape[0]
    if K < 128 or N <= K or N % K or x.dtype is not torch.float32 or not x.is_cpu or not weight.is_contiguous():
        return F.linear(x, weight, bias)
    groups, x = N // K, as_rows(x)
    M = x.shape[0]
    y = torch.empty(*leading, N, dtype=x.dtype)
    columns = y.view(M, groups, K).transpose(0, 1)
    matrices = weight.view(groups, K, K).transpose(1, 2)
    if bias is None:
        torch.bmm(x.expand(groups, M, K), matrices, out=columns)
    else:
        torch.baddbmm(bias.view(groups, 1, K), x.expand(groups, M, K), matrices, out=columns)
    return y


def _fwd_aten(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    layer_scale: Tensor | None,
    row_scale: Tensor | None,
    residual: Tensor | None,
    rows: int,
) -> Tensor:
    # fresh, so the epilogue works in place
    y = F.linear(x, weight, bias) if x.numel() < _LEAST else _grouped_linear(x, weight, bias)
    if activation != "none":
        activate_(y, activation)
    if row_scale is not None:
        y.view(row_scale.shape[0], rows, y.shape[-1]).mul_(row_scale[:, None, None])
    if layer_scale is not None:
        y = y.mul_(layer_scale) if layer_scale.dtype is y.dtype else y * layer_scale
    if residual is None:
        return y
    return y.add_(residual) if residual.dtype is y.dtype else residual + y


def _act_fwd_aten(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    pre = F.linear(x, weight, bias) if x.numel() < _LEAST else _grouped_linear(x, weight, bias)
    return activate(pre, activation), pre


def _dact_aten(dy: Tensor, weight: Tensor, pre: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    dpre = activate_backward_(dy @ weight, pre, activation)
    return dpre, activate(pre, activation), dpre.sum(0)


def _act_bwd_aten(dy: Tensor, pre: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    dpre = activate_backward(dy, pre, activation)
    return dpre, dpre.sum(0)


# ---- Triton ----


def _uses_kernel(x: Tensor, n: int, *, has_epilogue: bool = True) -> bool:
    """Whether x [..., K] @ [K, n] is our kernel's. The interpreter runs all, so that tests reach every dtype."""
    if x.dtype is torch.float64:
        raise Unsupported("float64")
    if _library.INTERPRET:
        return True
    return has_epilogue and _configs.use_triton_gemm(n, x.shape[-1], x.element_size(), _library.arch(x))


def _launch_gemm(kernel: Any, a: Tensor, n: int, activation: str, args: tuple[Any, ...]) -> None:
    """a [..., K] @ [K, n] and the kernel's epilogue."""
    M, K = rows_and_columns(a)
    cfg = _configs.gemm(M, n, K, a.element_size(), _library.arch(a))
    kernel[(triton.cdiv(M, cfg.block_m) * triton.cdiv(n, cfg.block_n),)](
        *args, ACTIVATION=activation, EVEN_K=K % cfg.block_k == 0, PRECISION=dot_precision(a),
        BLOCK_M=cfg.block_m, BLOCK_N=cfg.block_n, BLOCK_K=cfg.block_k, GROUP_M=cfg.group_m,
        num_warps=cfg.num_warps, num_stages=cfg.num_stages, **_configs.register_limit(cfg.max_registers),
    )  # fmt: skip


def _launch_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    out: Tensor,
    pre: Tensor | None,
    layer_scale: Tensor | None = None,
    row_scale: Tensor | None = None,
    residual: Tensor | None = None,
    rows: int = 1,
) -> None:
    """Writes out and pre."""
    (M, K), N = rows_and_columns(x), weight.shape[0]
    weight = _unit_columns(weight)
    bias, layer_scale, row_scale = contiguous(bias, layer_scale, row_scale)
    if M:
        args = (
            x, weight, bias, layer_scale, row_scale, residual, out, pre, M, N, K, rows,
            row_stride(x), weight.stride(0), 0 if residual is None else row_stride(residual),
        )  # fmt: skip
        _launch_gemm(linear_fwd_kernel, x, N, activation, args)


def _fwd_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    layer_scale: Tensor | None,
    row_scale: Tensor | None,
    residual: Tensor | None,
    rows: int,
) -> Tensor:
    plain = activation == "none" and layer_scale is None and row_scale is None and residual is None
    if not _uses_kernel(x, weight.shape[0], has_epilogue=not plain):
        return _fwd_aten(x, weight, bias, activation, layer_scale, row_scale, residual, rows)
    out = _fwd_fake(x, weight, bias, activation, layer_scale, row_scale, residual, rows)
    _launch_fwd(x, weight, bias, activation, out, None, layer_scale, row_scale, residual, rows)
    return out


def _act_fwd_triton(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    if not _uses_kernel(x, weight.shape[0]):
        return _act_fwd_aten(x, weight, bias, activation)
    h, pre = _act_fwd_fake(x, weight, bias, activation)
    _launch_fwd(x, weight, bias, activation, h, pre)
    return h, pre


def _dact_triton(dy: Tensor, weight: Tensor, pre: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    (M, K), N = dy.shape, pre.shape[1]
    if not _uses_kernel(dy, N):
        h = torch.empty(pre.shape, dtype=pre.dtype, device=pre.device)
        dpre, dbias = _launch_act_bwd(dy @ weight, pre, activation, h)
        return dpre, h, dbias
    dpre, h, dbias = _dact_fake(dy, weight, pre, activation)
    if M == 0:
        return dpre, h, dbias.zero_()
    weight = _unit_columns(weight)
    block_m = _configs.gemm(M, N, K, dy.element_size(), _library.arch(dy)).block_m
    partial = torch.empty(1, triton.cdiv(M, block_m), N, dtype=torch.float32, device=dy.device)
    args = (dy, weight, pre, dpre, h, partial, M, N, K, dy.stride(0), weight.stride(0), pre.stride(0))
    _launch_gemm(linear_dact_kernel, dy, N, activation, args)
    (dbias,) = column_sums(partial, dbias)
    return dpre, h, dbias


def _act_bwd_triton(dy: Tensor, pre: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    if pre.dtype is torch.float64:
        raise Unsupported("float64")
    return _launch_act_bwd(dy, pre, activation, None)


def _launch_act_bwd(dy: Tensor, pre: Tensor, activation: str, h: Tensor | None) -> tuple[Tensor, Tensor]:
    """-> dpre, dbias; writes h."""
    dpre, dbias = _act_bwd_fake(dy, pre, activation)
    M, N = pre.shape
    if M == 0:
        return dpre, dbias.zero_()
    cfg = _configs.activation_backward(N, pre.element_size(), _library.arch(pre))
    tiles = triton.cdiv(M, cfg.steps * cfg.block_m)
    partial = torch.empty(1, tiles, N, dtype=torch.float32, device=pre.device)
    act_bwd_kernel[(tiles * triton.cdiv(N, cfg.block_n),)](
        dy, pre, dpre, h, partial, M, N, dy.stride(0), pre.stride(0),
        ACTIVATION=activation, BLOCK_M=cfg.block_m, BLOCK_N=cfg.block_n, STEPS=cfg.steps, num_warps=cfg.num_warps,
    )  # fmt: skip
    (dbias,) = column_sums(partial, dbias)
    return dpre, dbias


def _unit_columns(weight: Tensor) -> Tensor:
    return weight if weight.stride(1) == 1 or weight.shape[1] == 1 else weight.contiguous()


# ---- registration ----


def _like_by(x: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    return x.new_empty(*x.shape[:-1], columns, dtype=dtype)


def _fwd_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    layer_scale: Tensor | None,
    row_scale: Tensor | None,
    residual: Tensor | None,
    rows: int,
) -> Tensor:
    return _like_by(x, weight.shape[0], out_dtype(x, layer_scale, residual))


def _act_fwd_fake(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    return _like_by(x, weight.shape[0], x.dtype), _like_by(x, weight.shape[0], x.dtype)


def _dact_fake(dy: Tensor, weight: Tensor, pre: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    return pre.new_empty(pre.shape), pre.new_empty(pre.shape), pre.new_empty(pre.shape[1])


def _act_bwd_fake(dy: Tensor, pre: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    return pre.new_empty(pre.shape), pre.new_empty(pre.shape[1])


def _fwd_flops(x: Any, weight: Any, *_: Any, out_shape: Any = None) -> int:
    return int(2 * math.prod(x) * weight[0])


def _dact_flops(dy: Any, weight: Any, *_: Any, out_shape: Any = None) -> int:
    return int(2 * dy[0] * weight[0] * weight[1])


linear_fwd = register(
    "linear_fwd(Tensor x, Tensor weight, Tensor? bias, str activation, Tensor? layer_scale, Tensor? row_scale,"
    " Tensor? residual, int rows_per_sample) -> Tensor",
    aten=_fwd_aten, triton=_fwd_triton, fake=_fwd_fake, flops=_fwd_flops,
)  # fmt: skip
linear_act_fwd = register(
    "linear_act_fwd(Tensor x, Tensor weight, Tensor? bias, str activation) -> (Tensor h, Tensor pre)",
    aten=_act_fwd_aten, triton=_act_fwd_triton, fake=_act_fwd_fake, flops=_fwd_flops,
)  # fmt: skip
linear_dact = register(
    "linear_dact(Tensor dy, Tensor weight, Tensor pre, str activation) -> (Tensor dpre, Tensor h, Tensor dbias)",
    aten=_dact_aten, triton=_dact_triton, fake=_dact_fake, flops=_dact_flops,
)  # fmt: skip
act_bwd = register(
    "act_bwd(Tensor dy, Tensor pre, str activation) -> (Tensor dpre, Tensor dbias)",
    aten=_act_bwd_aten, triton=_act_bwd_triton, fake=_act_bwd_fake,
)  # fmt: skip
