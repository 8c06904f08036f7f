"""Launches the backward kernels of softmax attention; the registered ops and their ATen path are in _attention.py."""

from __future__ import annotations

import torch
from torch import Tensor

from fastvit.ops import _library
from fastvit.ops._attention_forward import check_launch, readable, unit_strides
from fastvit.ops._library import dot_precision

if _library.HAVE_TRITON:
    import triton

    from fastvit.kernels import _attention_configs
    from fastvit.kernels.attention_bwd import attention_bwd_dkdv_kernel, attention_bwd_dq_kernel
    from fastvit.kernels.attention_bwd_short import attention_bwd_short_kernel


def launch_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    seed: Tensor | None,
    scale: float,
    dropout_p: float,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Writes the gradients of attention's inputs into dq, dk, dv.

    do, q, k, v, o, dq, dk, dv: (B, N, H, d), one of float32, bfloat16, float16, read and written by stride; the last
    dimension of all but do must be contiguous. lse: (B, H, N) float32, natural logarithm, contiguous. seed: int64 [1],
    the forward's, or None without dropout. Raises `Unsupported` for another dtype.
    """
    check_launch(q, scale)
    if q.numel() == 0:
        return
    B, N, H, d = q.shape
    if N == 1 and seed is None:  # softmax over one key is constant: no gradient, not even one of rounding errors
        dq.zero_()
        dk.zero_()
        dv.copy_(do)
        return
    do, q, k, v = readable(do), readable(q), readable(k), readable(v)
    unit, strides = unit_strides((q, k, v, o, do, dq, dk, dv))
    precision = dot_precision(q)
    shape = N, d, q.element_size(), seed is not None, _library.arch(q), precision == "tf32"
    common = {"HEAD_DIM": d, "UNIT": unit, "PRECISION": precision}

    config = _attention_configs.attention_bwd_short(*shape)
    if config is not None:
        attention_bwd_short_kernel[(B * H,)](
            q, k, v, o, do, lse, seed, dq, dk, dv, N, H, *strides, scale, dropout_p, **common, **_tiles(config)
        )
        return
    statistics = torch.empty((B, H, 2, N), dtype=torch.float32, device=q.device)
    config = _attention_configs.attention_bwd_dq(*shape)
    attention_bwd_dq_kernel[(B * H * triton.cdiv(N, config.block_m),)](
        q, k, v, o, do, lse, seed, dq, statistics, N, H, *strides[:18], scale, dropout_p, **common, **_tiles(config),
        LOOP=config.loop, TAIL=config.tail,
    )  # fmt: skip
    config = _attention_configs.attention_bwd_dkdv(*shape)
    attention_bwd_dkdv_kernel[(B * H * triton.cdiv(N, config.block_n),)](
        q, k, v, do, statistics, seed, dk, dv, N, H, *strides[:9], *strides[12:15], *strides[18:],
        scale, dropout_p, **common, **_tiles(config), LOOP=config.loop, TAIL=config.tail,
    )  # fmt: skip


def _tiles(config: _attention_configs.AttentionBackwardConfig) -> dict[str, int]:
    return {
        "D0": config.parts[0],
        "D1": config.parts[1],
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
