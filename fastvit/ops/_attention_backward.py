"""Launches the backward kernels of softmax attention; the registered op and its ATen path are in attention.py."""

from __future__ import annotations

import torch
from torch import Tensor

from fastvit.ops import _library
from fastvit.ops._library import Unsupported

if _library.HAVE_TRITON:
    import triton

    from fastvit.kernels import _configs
    from fastvit.kernels.attention_bwd import attention_bwd_dkdv_kernel, attention_bwd_dq_kernel
    from fastvit.kernels.attention_bwd_short import attention_bwd_short_kernel

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _strides(tensors: tuple[Tensor, ...]) -> tuple[int, list[tuple[int, ...]]]:
    """(unit, per tensor the strides of batch, token and head in units). The unit is 8 elements where all strides are
    multiples of that, so that the kernels can tell 16-byte alignment; dimensions of one element have no stride."""
    elements = [tuple(t.stride(i) if t.shape[i] > 1 else 0 for i in range(3)) for t in tensors]
    unit = 8 if all(stride % 8 == 0 for strides in elements for stride in strides) else 1
    return unit, [tuple(stride // unit for stride in strides) for strides in elements]


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
    if q.dtype not in _DTYPES:
        raise Unsupported(f"attention has no kernel for {q.dtype}")
    if q.numel() == 0:
        return
    B, N, H, d = q.shape
    if N == 1 and seed is None:  # softmax over one key is constant: no gradient, not even one of rounding errors
        dq.zero_()
        dk.zero_()
        dv.copy_(do)
        return
    if do.stride(3) != 1:
        do = do.contiguous()
    D0, D1 = _configs.split_head_dim(d)
    unit, (q_s, k_s, v_s, o_s, do_s, dq_s, dk_s, dv_s) = _strides((q, k, v, o, do, dq, dk, dv))
    shape = N, d, q.element_size(), seed is not None, _library.arch(q)
    tf32 = q.dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest"
    common = {"D0": D0, "D1": D1, "HEAD_DIM": d, "UNIT": unit, "PRECISION": "tf32" if tf32 else "ieee"}

    short = _configs.attention_bwd_short(*shape)
    if short is not None:
        attention_bwd_short_kernel[(B * H,)](
            q, k, v, o, do, lse, seed, dq, dk, dv, N, H,
            *q_s, *k_s, *v_s, *o_s, *do_s, *dq_s, *dk_s, *dv_s, scale, dropout_p, **common,
            BLOCK_M=short.block_m, BLOCK_N=short.block_n, num_warps=short.num_warps, num_stages=short.num_stages,
        )  # fmt: skip
        return

    lse2, delta = torch.empty_like(lse), torch.empty_like(lse)
    config = _configs.attention_bwd_dq(*shape)
    attention_bwd_dq_kernel[(B * H * triton.cdiv(N, config.block_m),)](
        q, k, v, o, do, lse, seed, dq, lse2, delta, N, H,
        *q_s, *k_s, *v_s, *o_s, *do_s, *dq_s, scale, dropout_p, **common,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, TAIL=config.tail,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    config = _configs.attention_bwd_dkdv(*shape)
    attention_bwd_dkdv_kernel[(B * H * triton.cdiv(N, config.block_n),)](
        q, k, v, do, lse2, delta, seed, dk, dv, N, H,
        *q_s, *k_s, *v_s, *do_s, *dk_s, *dv_s, scale, dropout_p, **common,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, TAIL=config.tail,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
