"""Launch the kernels of the norms of q and k."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastvit.kernels import _configs
from fastvit.kernels.qk_norm import qk_norm_bwd_kernel, qk_norm_fwd_kernel
from fastvit.ops.attention.softmax_launch import readable
from fastvit.ops.attention.workload import in_units
from fastvit.ops.rotary.launch import Tables, readable_tables, tables_as_read
from fastvit.ops.runtime import device
from fastvit.ops.runtime.backend import KernelUnsupported
from fastvit.ops.runtime.column_sum import launch_and_sum
from fastvit.ops.runtime.launch import Constants, Launch, cdiv
from fastvit.ops.runtime.rows import contiguous, empty_like


def qk_norm_fwd(
    q: Tensor, k: Tensor, q_weight: Tensor, q_bias: Tensor | None, k_weight: Tensor, k_bias: Tensor | None,
    sin: Tensor | None, cos: Tensor | None, eps: float, rms: bool, interleaved: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out = empty_like(q), empty_like(k)
    q, k = _alike(q, k)
    q_weight, q_bias, k_weight, k_bias = map(contiguous, (q_weight, q_bias, k_weight, k_bias))
    if sin is not None and cos is not None:
        sin, cos = readable_tables(sin, cos)
    programs, numbers, constants = _configured(q, sin, cos, rms, interleaved)
    launch = Launch(qk_norm_fwd_kernel, programs, (*numbers, eps), constants)
    launch(q, k, q_weight, k_weight, q_bias, k_bias, sin, cos, *out)
    return out


def qk_norm_bwd(
    dq_out: Tensor, dk_out: Tensor, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor,
    sin: Tensor | None, cos: Tensor | None, eps: float, rms: bool, has_bias: bool, interleaved: bool,
    *, out: Sequence[Tensor] | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Launch the backward kernel. out: tensors to write dq and dk to, dq_out and dk_out or others of equal strides."""
    dq, dk = (empty_like(q), empty_like(k)) if out is None else out
    q, k = _alike(q, k)
    dq_out, dk_out = _alike(dq_out, dk_out)
    q_weight, k_weight = map(contiguous, (q_weight, k_weight))
    if sin is not None and cos is not None:
        sin, cos = readable_tables(sin, cos)
    of_weights = q_weight.dtype, k_weight.dtype
    dtypes = *of_weights, *(of_weights if has_bias else (None, None))
    programs, numbers, constants = _configured(q, sin, cos, rms, interleaved, dq_out, dq)
    d = q.shape[3]
    if q.numel() == 0:
        return dq, dk, *(None if dtype is None else q.new_zeros(d, dtype=dtype) for dtype in dtypes)
    launch = Launch(qk_norm_bwd_kernel, programs, (*numbers, eps), {**constants, "HAS_BIAS": has_bias})
    tensors = dq_out, dk_out, q, k, q_weight, k_weight, sin, cos, dq, dk
    return dq, dk, *launch_and_sum(launch, programs // 2, d, dtypes, *tensors)


def _alike(q: Tensor, k: Tensor) -> Any:
    """Return both, or copies with the same strides."""
    q, k = map(readable, (q, k))
    return (q, k) if q.stride() == k.stride() else map(torch.Tensor.contiguous, (q, k))


def _configured(
    q: Tensor, sin: Tensor | None, cos: Tensor | None, rms: bool, interleaved: bool, *others: Tensor
) -> tuple[int, tuple[int, ...], Constants]:
    """Return the number of programs, numbers, and constants of a launch, for q and as large a k. others: tensors
    like q that the kernel reads or writes by stride."""
    if any(t is not None and t.dtype is torch.float64 for t in (q, sin, cos)):
        raise KernelUnsupported("float64")
    B, N, H, d = q.shape
    # Without positions any pairing will do: neighbours, if the second half of a head does not begin at a multiple of 8
    tables, P, pairs = Tables(1, 1, (0, 0, 0)), 0, d % 16 != 0
    if sin is not None:
        tables, P, pairs = tables_as_read(sin), N - sin.shape[2], interleaved
    unit, strides = in_units(q.shape, q.stride(), *[t.stride() for t in others], tables.strides)
    cfg, constants = _plan(d, device.arch(q))
    steps = B * cdiv(N, cfg.block_n) * H
    programs = cfg.programs(steps, device.multiprocessors(q.device.index) / 2) if steps else 0
    constants = {"UNIT": unit, "TABLE_HEADS": tables.heads, "INTERLEAVED": pairs, "RMS": rms, **constants}
    return 2 * programs, (N, P, H, steps, tables.samples, *strides), constants


@functools.cache
def _plan(d: int, arch: str) -> tuple[_configs.HeadsConfig, Constants]:
    """Return the config, and the constants of both kernels."""
    cfg = _configs.heads(d, arch)
    return cfg, {
        "HEAD_DIM": d, "HALF": cfg.half, "BLOCK_N": cfg.block_n, "STAGES": cfg.num_stages, "num_warps": cfg.num_warps,
        **_configs.register_limit(cfg.max_registers),
    }  # fmt: skip
