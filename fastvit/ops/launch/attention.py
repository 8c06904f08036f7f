"""Launches the kernels of softmax attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from fastvit.kernels import _attention_configs
from fastvit.kernels._configs import register_limit
from fastvit.kernels.attention import attention_fwd_kernel
from fastvit.kernels.attention_bwd import attention_bwd_dkdv_kernel, attention_bwd_dq_kernel
from fastvit.kernels.attention_bwd_short import attention_bwd_short_kernel
from fastvit.kernels.attention_short import attention_short_fwd_kernel
from fastvit.ops import _library
from fastvit.ops._library import Unsupported, dot_precision

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_STRIDE = 1 << 22  # elements between two tokens, so that offsets within a tile fit 32 bits


def attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None, scale: float, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """q, k, v (B, N, H, d), one of float32, bfloat16, float16, by stride; seed int64 [1], or None without dropout.

    -> o (B, N, H, d) contiguous, and LSE (B, H, N) float32, natural logarithm. Raises `Unsupported`.
    """
    o, lse, launch = _forward(q, k, v, seed, scale, dropout_p)
    if launch is not None:
        launch()
    return o, lse


def attention_qkvpacked_fwd(qkv: Tensor, seed: Tensor | None, scale: float, dropout_p: float) -> tuple[Tensor, Tensor]:
    """The same for qkv (B, N, 3, H, d)."""
    q, k, v = qkv.unbind(2)
    o, lse, launch = _forward(q, k, v, seed, scale, dropout_p)
    if launch is not None:
        launch()
    return o, lse


def _forward(
    q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None, scale: float, dropout_p: float
) -> tuple[Tensor, Tensor, Callable[[], object] | None]:
    """Room for o and LSE, and the launch that fills it, if there is anything to fill."""
    _check(q, scale)
    B, N, H, _ = q.shape
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((B, H, N), dtype=torch.float32, device=q.device)
    if q.numel() == 0:
        return o, lse, None
    q, k, v = _readable(q), _readable(k), _readable(v)
    unit, strides = _unit_strides((q, k, v))
    workload, common = _workload(q, seed, unit)
    config = _attention_configs.attention_fwd(*workload)
    keys = config.chunks
    if config.algorithm == "short":
        kernel: Any = attention_short_fwd_kernel
        tiles = {"KEYS_0": keys[0], "KEYS_1": keys[1], "KEYS_2": keys[2]}
    else:
        kernel = attention_fwd_kernel
        tiles = {"BLOCK_N": config.block_n, "LOOP": config.loop, "TAIL_0": keys[0], "TAIL_1": keys[1]}
    launch = partial(
        kernel[(B * H * triton.cdiv(N, config.block_m),)],
        q, k, v, seed, o, lse, N, H, *strides, scale, dropout_p, **common, **_tiles(config), **tiles,
    )  # fmt: skip
    return o, lse, launch


def attention_bwd(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    gradients: Any = tuple([torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v)])
    launch_backward(do, q, k, v, *rest, *gradients)
    return gradients


def attention_qkvpacked_bwd(do: Tensor, qkv: Tensor, *rest: Any) -> Tensor:
    dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    arguments: Any = (do, *qkv.unbind(2), *rest, *dqkv.unbind(2))
    launch_backward(*arguments)
    return dqkv


def launch_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, seed: Tensor | None, scale: float,
    dropout_p: float, dq: Tensor, dk: Tensor, dv: Tensor,
) -> None:  # fmt: skip
    """Writes the gradients of attention's inputs into dq, dk, dv.

    do, q, k, v, o, dq, dk, dv: (B, N, H, d), one of float32, bfloat16, float16, read and written by stride; the last
    dimension of all but do must be contiguous. lse: (B, H, N) float32, natural logarithm, contiguous. seed: int64 [1],
    the forward's, or None without dropout. Raises `Unsupported` for another dtype.
    """
    _check(q, scale)
    if q.numel() == 0:
        return
    B, N, H, _ = q.shape
    if N == 1 and seed is None:  # softmax over one key is constant: no gradient, not even one of rounding errors
        dq.zero_()
        dk.zero_()
        dv.copy_(do)
        return
    do, q, k, v = _readable(do), _readable(q), _readable(k), _readable(v)
    unit, strides = _unit_strides((q, k, v, o, do, dq, dk, dv))
    workload, common = _workload(q, seed, unit)

    config = _attention_configs.attention_bwd_short(*workload)
    if config is not None:
        attention_bwd_short_kernel[(B * H,)](
            q, k, v, o, do, lse, seed, dq, dk, dv, N, H, *strides, scale, dropout_p,
            **common, **_tiles(config), BLOCK_N=config.block_n,
        )  # fmt: skip
        return
    statistics = torch.empty((B, H, 2, N), dtype=torch.float32, device=q.device)
    config = _attention_configs.attention_bwd_dq(*workload)
    attention_bwd_dq_kernel[(B * H * triton.cdiv(N, config.block_m),)](
        q, k, v, o, do, lse, seed, dq, statistics, N, H, *strides[:18], scale, dropout_p,
        **common, **_tiles(config), BLOCK_N=config.block_n, LOOP=config.loop, TAIL=config.tail,
        **register_limit(config.max_registers),
    )  # fmt: skip
    config = _attention_configs.attention_bwd_dkdv(*workload)
    attention_bwd_dkdv_kernel[(B * H * triton.cdiv(N, config.block_n),)](
        q, k, v, do, statistics, seed, dk, dv, N, H, *strides[:9], *strides[12:15], *strides[18:], scale, dropout_p,
        **common, **_tiles(config), BLOCK_N=config.block_n, LOOP=config.loop, TAIL=config.tail,
    )  # fmt: skip


def _check(q: Tensor, scale: float) -> None:
    """Raises `Unsupported` for what neither the forward nor the backward kernels take."""
    if q.dtype not in _DTYPES:
        raise Unsupported(f"attention has no kernel for {q.dtype}")
    if not scale > 0.0:  # the kernels scale the maximum of the unscaled scores
        raise Unsupported(f"attention's kernels need a positive scale, got {scale}")


def _readable(x: Tensor) -> Tensor:
    """x (B, N, H, d) itself, or a copy if its head dimension is strided or its tokens are very far apart."""
    return x if x.stride(3) == 1 and x.stride(1) <= _MAX_STRIDE else x.contiguous()


def _unit_strides(tensors: tuple[Tensor, ...]) -> tuple[int, list[int]]:
    """(unit, strides of batch, token and head of each (B, N, H, d) tensor, in units). The unit is 8 elements where all
    are multiples of that, so that the kernels see 16-byte alignment; dimensions of one element have no stride."""
    strides = [t.stride(i) if t.shape[i] > 1 else 0 for t in tensors for i in range(3)]
    unit = 8 if all(s % 8 == 0 for s in strides) else 1
    return unit, [s // unit for s in strides]


def _workload(q: Tensor, seed: Tensor | None, unit: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a config is chosen by, and the constants that all kernels have."""
    _, N, _, d = q.shape
    precision = dot_precision(q)
    workload = N, d, q.element_size(), seed is not None, _library.arch(q), precision == "tf32"
    return workload, {"HEAD_DIM": d, "UNIT": unit, "PRECISION": precision}


def _tiles(config: Any) -> dict[str, int]:
    D0, D1 = config.parts
    return {
        "D0": D0, "D1": D1, "BLOCK_M": config.block_m, "num_warps": config.num_warps, "num_stages": config.num_stages,
    }  # fmt: skip
