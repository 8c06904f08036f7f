"""Launch the kernels of the norms of q and k."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastvit.kernels import _configs, _tuned
from fastvit.kernels.qk_norm import qk_norm_bwd_kernel, qk_norm_fwd_kernel
from fastvit.ops.attention.launch import in_units, readable
from fastvit.ops.rotary.launch import readable_tables
from fastvit.ops.runtime import devices
from fastvit.ops.runtime.checks import contiguous, empty_like
from fastvit.ops.runtime.column_sum import column_sums
from fastvit.ops.runtime.dispatch import KernelUnsupported
from fastvit.ops.runtime.launch import Constants, cdiv, launch


def qk_norm_fwd(
    q: Tensor, k: Tensor, q_weight: Tensor, q_bias: Tensor | None, k_weight: Tensor, k_bias: Tensor | None,
    sin: Tensor | None, cos: Tensor | None, eps: float, rms: bool, interleaved: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _check(q, sin, cos)
    out = empty_like(q), empty_like(k)
    if q.numel() == 0:
        return out
    _, N, H, d = q.shape
    q, k = _alike(q, k)
    sin, cos, P, tables, table = _positions(sin, cos, N)
    unit, strides = in_units(q.shape, q.stride(), table)
    cfg, constants = _plan(d, devices.arch(q))
    steps, programs = _shares(q, cfg)
    launch(
        qk_norm_fwd_kernel,
        2 * programs,
        (q, k, *map(contiguous, (q_weight, k_weight, q_bias, k_bias)), sin, cos, *out),
        (N, P, H, steps, tables, *strides, eps),
        {"UNIT": unit, **_pairs(sin, d, interleaved), "RMS": rms, **constants},
    )
    return out


def qk_norm_bwd(
    dq_out: Tensor, dk_out: Tensor, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor,
    sin: Tensor | None, cos: Tensor | None, eps: float, rms: bool, has_bias: bool, interleaved: bool,
    dq: Tensor | None = None, dk: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Launch the backward kernel. dq, dk: tensors to write the gradients to, which may be dq_out and dk_out, or others
    of equal strides."""
    _check(q, sin, cos)
    if dq is None or dk is None:
        dq, dk = empty_like(q), empty_like(k)
    _, N, H, d = q.shape
    of_weights = q_weight.dtype, k_weight.dtype
    dtypes = *of_weights, *(of_weights if has_bias else (None, None))
    if q.numel() == 0:
        return dq, dk, *(q.new_zeros(0 if dtype is None else d, dtype=dtype) for dtype in dtypes)
    (q, k), (dq_out, dk_out) = _alike(q, k), _alike(dq_out, dk_out)
    sin, cos, P, tables, table = _positions(sin, cos, N)
    unit, strides = in_units(q.shape, q.stride(), dq_out.stride(), dq.stride(), table)
    cfg, constants = _plan(d, devices.arch(q))
    steps, programs = _shares(q, cfg)
    partial = q.new_empty((4 if has_bias else 2, programs, d), dtype=torch.float32)
    launch(
        qk_norm_bwd_kernel,
        2 * programs,
        (dq_out, dk_out, q, k, *map(contiguous, (q_weight, k_weight)), sin, cos, dq, dk, partial),
        (N, P, H, steps, tables, *strides, eps),
        {"UNIT": unit, **_pairs(sin, d, interleaved), "RMS": rms, "HAS_BIAS": has_bias, **constants},
    )
    return dq, dk, *column_sums(partial, *dtypes)


def _check(q: Tensor, sin: Tensor | None, cos: Tensor | None) -> None:
    if any(t is not None and t.dtype is torch.float64 for t in (q, sin, cos)):
        raise KernelUnsupported("float64")


def _alike(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return both, or copies with the same strides."""
    q, k = readable(q), readable(k)
    return (q, k) if q.stride() == k.stride() else (q.contiguous(), k.contiguous())


def _positions(sin: Tensor | None, cos: Tensor | None, N: int) -> tuple[Any, Any, int, int, tuple[int, int, int]]:
    """Return the tables as a kernel reads them, the number of prefix tokens, the number of tables, and their
    strides."""
    if sin is None or cos is None:
        return None, None, 0, 1, (0, 0, 0)
    sin, cos, strides = readable_tables(sin, cos)
    return sin, cos, N - sin.shape[2], len(sin), strides


def _pairs(sin: Tensor | None, d: int, interleaved: bool) -> Constants:
    """Return the constants of the pairing. Without positions any pairing will do: neighbours, if the second half of a
    head does not begin at a multiple of 8."""
    if sin is None:
        return {"TABLE_HEADS": 1, "INTERLEAVED": d % 16 != 0}
    return {"TABLE_HEADS": sin.shape[1], "INTERLEAVED": interleaved}


def _shares(q: Tensor, cfg: _configs.HeadsConfig) -> tuple[int, int]:
    """Return steps and programs for q; k has as many."""
    B, N, H, _ = q.shape
    steps = B * cdiv(N, cfg.block_n) * H
    return steps, cfg.programs(steps, devices.multiprocessors(q.device.index) / 2)


@_tuned.cached
def _plan(d: int, arch: str) -> tuple[_configs.HeadsConfig, Constants]:
    """Return the config, and the constants of both kernels."""
    cfg = _configs.heads(d, arch)
    return cfg, {
        "HEAD_DIM": d, "HALF": cfg.half, "BLOCK_N": cfg.block_n, "STAGES": cfg.num_stages, "num_warps": cfg.num_warps,
        **_configs.register_limit(cfg.max_registers),
    }  # fmt: skip
