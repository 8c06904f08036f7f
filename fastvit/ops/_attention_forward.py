"""Launches the forward kernels of softmax attention; the registered ops are in _attention.py."""

from __future__ import annotations

import torch
from torch import Tensor

from fastvit.ops import _library
from fastvit.ops._library import Unsupported, dot_precision

if _library.HAVE_TRITON:
    import triton

    from fastvit.kernels import _attention_configs
    from fastvit.kernels.attention import attention_fwd_kernel
    from fastvit.kernels.attention_short import attention_short_fwd_kernel

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_STRIDE = 1 << 22  # elements between two tokens, so that offsets within a tile fit 32 bits


def check_launch(q: Tensor, scale: float) -> None:
    """Raises `Unsupported` for what neither the forward nor the backward kernels take."""
    if q.dtype not in _DTYPES:
        raise Unsupported(f"attention has no kernel for {q.dtype}")
    if not scale > 0.0:  # the kernels scale the maximum of the unscaled scores
        raise Unsupported(f"attention's kernels need a positive scale, got {scale}")


def readable(x: Tensor) -> Tensor:
    """x (B, N, H, d) itself, or a copy if its head dimension is strided or its tokens are very far apart."""
    return x if x.stride(3) == 1 and x.stride(1) <= _MAX_STRIDE else x.contiguous()


def unit_strides(tensors: tuple[Tensor, ...]) -> tuple[int, list[int]]:
    """(unit, strides of batch, token and head of each (B, N, H, d) tensor, in units). The unit is 8 elements where all
    are multiples of that, so that the kernels see 16-byte alignment; dimensions of one element have no stride."""
    strides = [t.stride(i) if t.shape[i] > 1 else 0 for t in tensors for i in range(3)]
    unit = 8 if all(s % 8 == 0 for s in strides) else 1
    return unit, [s // unit for s in strides]


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None, scale: float, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """q, k, v (B, N, H, d), one of float32, bfloat16, float16, by stride; seed int64 [1], or None without dropout.

    -> o (B, N, H, d) contiguous, and LSE (B, H, N) float32, natural logarithm. Raises `Unsupported`.
    """
    check_launch(q, scale)
    B, N, H, d = q.shape
    o = torch.empty((B, N, H, d), dtype=q.dtype, device=q.device)
    lse = torch.empty((B, H, N), dtype=torch.float32, device=q.device)
    if q.numel() == 0:
        return o, lse
    q, k, v = readable(q), readable(k), readable(v)
    unit, strides = unit_strides((q, k, v))
    precision = dot_precision(q)
    config = _attention_configs.attention_fwd(
        N, d, q.element_size(), seed is not None, _library.arch(q), precision == "tf32"
    )
    grid = (B * H * triton.cdiv(N, config.block_m),)
    tensors = (q, k, v, seed, o, lse)
    common = {
        "UNIT": unit,
        "HEAD_DIM": d,
        "D0": config.parts[0],
        "D1": config.parts[1],
        "BLOCK_M": config.block_m,
        "PRECISION": precision,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    if config.algorithm == "short":
        keys = config.chunks
        attention_short_fwd_kernel[grid](
            *tensors, N, H, *strides, scale, dropout_p, KEYS_0=keys[0], KEYS_1=keys[1], KEYS_2=keys[2], **common
        )
    else:
        attention_fwd_kernel[grid](
            *tensors, N, H, *strides, scale, dropout_p,
            BLOCK_N=config.block_n, LOOP=config.loop, TAIL_0=config.chunks[0], TAIL_1=config.chunks[1],
            **common,
        )  # fmt: skip
    return o, lse
